"""What `trilane simulate` says of runs that are not exactly what the trace holds."""

from __future__ import annotations

import pytest

from tests.kit.commands import SHORT, Trilane


def test_simulate_says_how_much_a_policy_changes(trilane: Trilane) -> None:
    words = ("simulate", *SHORT, "--policy", "daop")
    line = next(line for line in trilane(*words).out.splitlines() if line.startswith("approximated, decode"))
    found = trilane(*words, "--json", "-").json
    run, layers = found["run"], found["approximation"]
    decode = [row for row in layers if row["phase"] == "decode"]
    assert [row["layer"] for row in decode] == list(range(26))
    weight = sum(row["weight"] for row in decode)
    for cause in ("approximated", "degraded", "stale"):
        of_layers = sum(row[f"{cause}_weight_share"] * row["weight"] for row in decode) / weight
        assert run[f"{cause}_weight_share"] == pytest.approx(of_layers)
        assert f"{of_layers:.1%}" in line
    assert f"{run['approximated_token_share']:.1%} of the tokens" in line
    assert "substituted" not in line  # nothing was: causes without a share are left out
    assert "changes routing" in run["labels"]


def test_simulate_is_silent_where_nothing_is_changed(trilane: Trilane) -> None:
    assert "approximated" not in trilane("simulate", *SHORT, "--policy", "dali").out
    assert trilane("simulate", *SHORT, "--policy", "dali", "--json", "-").json["approximation"] is None


def test_noisy_forecasts_stand_in_every_heading(trilane: Trilane) -> None:
    noisy = (*SHORT, "--set", "noisy_forecast_recall=[0.8,0.5]")
    told = "where it lacks forecasts, noisy forecasts (recall 0.8, 0.5)"
    for words in (("simulate", *noisy), ("compare", *noisy, "--policies", "dali", "--draws", "1", "--jobs", "1")):
        assert told in trilane(*words).out
