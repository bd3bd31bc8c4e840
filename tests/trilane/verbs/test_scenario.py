"""``trilane compare`` and ``ablate``: the table shows what is written, and what cannot run is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import SHORT, Trilane, write_route_csv

MINE = ("--set", "trace=mine.safetensors", "--set", "model=null", "--set", "cached_share=0.5")


def test_the_table_shows_what_is_written(trilane: Trilane) -> None:
    done = trilane("ablate", "dali", *SHORT, "--draws", "2", "--json", "a.json", "--png", "a.png", "--jobs", "1")
    assert done.status == 0
    assert Path("a.png").stat().st_size > 1000
    found = json.loads(Path("a.json").read_text())
    assert (found["policy"], found["scenario"]["policy"]) == ("dali", "dali")
    rows = [*found["ladder"], *found["all_but_one"]]
    assert len(rows) == 5 + 4
    for row in rows:
        [line] = [line for line in done.out.splitlines() if line.startswith(row["label"])]
        cells = line.removeprefix(row["label"]).split()
        assert cells[1] == f"{row['tpot_ms']:,.2f}"
        assert cells[2] in ("-", f"{row['tpot_ms_min']:,.1f}-{row['tpot_ms_max']:,.1f}")
        assert cells[3] == f"{row['speedup']:.2f}x"
    assert "over 2 draws" in done.out
    assert max(map(len, done.out.splitlines()[1:])) < 120  # below the heading


def test_one_draw_has_no_spread(trilane: Trilane) -> None:
    done = trilane("ablate", "fiddler", *SHORT, "--draws", "1", "--jobs", "1", "--json", "-")
    assert [len(row["draws"]) for row in done.json["ladder"]] == [1, 1, 1]
    assert "spread" not in trilane("ablate", "fiddler", *SHORT, "--draws", "1", "--jobs", "1").out


def test_parameters_belong_to_the_scenarios_policy(trilane: Trilane) -> None:
    Path("s.yaml").write_text("policy: dali\nparameters: {prefetch: 0}\nprompt_tokens: 4\ngenerated_tokens: 3\n")
    words = ("--scenario", "s.yaml", "--draws", "1", "--jobs", "1", "--json", "-")
    parts = {name: trilane("ablate", name, *words).json["ladder"][-1]["parts"] for name in ("dali", "dali-ilp")}
    assert parts["dali"] == ["placement", "assigner", "cache"]
    assert parts["dali-ilp"] == ["placement", "assigner", "cache", "prefetcher"]


@pytest.mark.parametrize(("words", "expected"), [
    (("dalii",), "did you mean 'dali'"),
    ((), "Missing argument"),
    (("dali", "--png", "x.docx"), "ending in .png"),
    (("dali", "--draws", "0"), "Invalid value for '--draws'"),
    (("dali", "--json", "x.png", "--png", "x.png"), "a file of its own"),
    (("dali", "--jobs", "1", *MINE), "needs the forecast residual@1"),
])
def test_bad_input_is_one_sentence(trilane: Trilane, words: tuple[str, ...], expected: str) -> None:
    write_route_csv(Path("mine.csv"))
    trilane("trace", "import", "mine.csv", "-o", "mine.safetensors")
    done = trilane("ablate", *words)
    assert done.status == 2
    assert done.out == ""
    [line] = done.err.splitlines()
    assert expected in line
    assert {path.name for path in Path().iterdir()} == {"mine.csv", "mine.safetensors"}


# --- parameters in a comparison ---------------------------------------------------------------------------------------

ONE_DRAW = (*SHORT, "--draws", "1", "--jobs", "1", "--json", "-")


@pytest.mark.parametrize("words", [
    ("--policies", "dali", "--set", "parameters={prefetch: 0}"),
    ("--policies", "dali", "--set", "parameters.prefetch=0"),
    ("--policies", "dali{prefetch: 0}"), ("--policies", "{dali: {prefetch: 0}}"),
])
def test_parameters_reach_the_one_policy_that_runs(trilane: Trilane, words: tuple[str, ...]) -> None:
    alone = trilane("simulate", *SHORT, "--policy", "dali", "--set", "parameters.prefetch=0", "--json", "-").json
    assert alone["scenario"]["parameters"]["prefetch"] == 0
    found = trilane("compare", *ONE_DRAW, *words).json
    assert found["runs"][0]["tpot_ms"] == alone["run"]["tpot_ms"]
    assert "policy" not in found["scenario"]


def test_the_policies_that_ran_are_named(trilane: Trilane) -> None:
    found = trilane("compare", *ONE_DRAW, "--policies", "dali{window: 2},fiddler,dali").json
    assert set(found["policies"]) == {"dali{window: 2}", "fiddler", "dali"} == {run["policy"] for run in found["runs"]}


@pytest.mark.parametrize(("words", "said"), [
    (("--policies", "dali,fiddler", "--set", "parameters={prefetch: 0}"), "whatif --vary parameters.prefetch="),
    (("--set", "parameters.prefetch=0"), "'POLICY{prefetch: VALUE}'"),
    (("--policies", "dali", "--set", "parameters={prefetches: 0}"), "did you mean 'prefetch'"),
    (("--policies", "mix{cache: lruu}"), "'lruu'"),
])
def test_parameters_of_nobody_are_refused(trilane: Trilane, words: tuple[str, ...], said: str) -> None:
    done = trilane("compare", *ONE_DRAW, *words)
    assert (done.status, done.out) == (2, "")
    assert said in done.err


def test_one_policy_takes_its_parameters_in_braces(trilane: Trilane) -> None:
    found = trilane("simulate", *SHORT, "--policy", "dali{window: 2}", "--json", "-").json["scenario"]
    assert (found["policy"], found["parameters"]["window"]) == ("dali", 2)
    assert trilane("ablate", "dali{window: 2}", *ONE_DRAW).status == 0


@pytest.mark.parametrize("words", [("simulate", "--policy"), ("compare", "--policies"), ("fit", "--policies")])
def test_a_brace_that_is_not_closed_is_named(trilane: Trilane, words: tuple[str, str]) -> None:
    verb, option = words
    more = ("--model", "qwen3-30b-a3b", "--gpu", "rtx3090") if verb == "fit" else SHORT
    done = trilane(verb, *more, option, "dali{window: 2")
    assert (done.status, done.out) == (2, "")
    assert ("without parameters" if verb == "fit" else "closing brace") in done.err


def test_pictures_have_names_that_every_system_takes(trilane: Trilane) -> None:
    """Once, a colon was in them, which Windows refuses."""
    trilane("compare", *ONE_DRAW[:-2], "--policies", "dali{window: 2},dali", "--out", "cmp")
    names = {path.name for path in Path("cmp").iterdir()}
    assert names == {"tpot.png", "gantt-dali-window-2.png", "gantt-dali.png", "timeline.json.gz"}


def test_a_policy_that_cannot_run_is_left_out_with_the_reason(trilane: Trilane) -> None:
    write_route_csv(Path("mine.csv"))
    trilane("trace", "import", "mine.csv", "-o", "mine.safetensors")
    done = trilane("compare", "--draws", "1", "--jobs", "1", *MINE, "--policies", "on-demand,fiddler", "--json", "-")
    assert done.json["policies"] == ["on-demand"]
    assert "left out fiddler: policy 'fiddler' needs calibration" in done.err
