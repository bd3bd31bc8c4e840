"""Comparisons over draws: every policy plays the same ones, and means and spreads are those of their rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from policies.registry import ChoiceError
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import play as simulated
from sim.simulate import simulate
from tests.kit.toys import toy_trace
from traces.file import write_trace
from traces.library import load_trace
from traces.trace import Trace
from trilane.study import compare as comparison
from trilane.study.compare import Comparison, compare
from trilane.study.draws import draws_of, play_draws, refused, summary
from trilane.study.player import Progress
from trilane.study.sampling_error import measured_error

SHORT = Scenario(trace="mini-moe", model=None, prompt_tokens=4, generated_tokens=3, cached_share=0.25)
NAMES = ("on-demand", "fiddler", "dali", "oracle")
SEQUENCES = len(set(load_trace(SHORT.trace).sequence.tolist()))


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(SHORT, NAMES)


# --- the draws --------------------------------------------------------------------------------------------------------


def test_the_first_draw_is_the_scenario_and_the_others_are_like_it() -> None:
    first, *others = draws_of(SHORT.with_(seed=7, batch=3), 4)
    assert first == SHORT.with_(seed=7, batch=3)
    for seed, draw in enumerate(others, 8):
        assert draw == first.with_(seed=seed, sequences=draw.sequences)
        assert draw.sequences == tuple(sorted(set(draw.sequences or ())))
        assert len(draw.sequences) == 3


def test_draws_are_the_same_every_time_and_more_of_them_begin_alike() -> None:
    assert draws_of(SHORT, 6)[:4] == draws_of(SHORT, 4)
    assert draws_of(SHORT, 6)[2].sequences != draws_of(SHORT.with_(seed=1), 6)[2].sequences


def test_no_sequence_is_drawn_again_before_all_have_been() -> None:
    """Draws of batch 1 take one each; of half the sequences, the second draw takes from those that the first left."""
    drawn = [draw.sequences for draw in draws_of(SHORT, SEQUENCES)[1:]]
    assert sorted(drawn, key=str) == sorted([(n,) for n in range(1, SEQUENCES)], key=str)
    half = SEQUENCES // 2
    second = draws_of(SHORT.with_(batch=half), 2)[1].sequences
    assert set(second or ()) <= set(range(half, SEQUENCES))


@pytest.mark.parametrize("changes", [{"sequences": (3, 1), "batch": 2}, {"batch": SEQUENCES}])
def test_what_leaves_no_choice_differs_in_the_seed_alone(changes: dict[str, Any]) -> None:
    draws = draws_of(SHORT.with_(**changes), 3)
    assert [draw.seed for draw in draws] == [0, 1, 2]
    played = {tuple(prepare(draw).steps[0].sequences) for draw in draws}
    assert played == {changes.get("sequences", tuple(range(SEQUENCES)))}


def test_a_prompt_in_chunks_is_drawn_whole() -> None:
    scenario = SHORT.with_(batch=SEQUENCES // 2, prefill_chunk_tokens=3)
    first, second = (set(prepare(draw).steps[-1].sequences) for draw in draws_of(scenario, 2))
    assert len(second) == SEQUENCES // 2
    assert not first & second


def test_negative_seeds_draw_too() -> None:
    assert [draw.seed for draw in draws_of(SHORT.with_(seed=-2), 3)] == [-2, -1, 0]


def uneven(path: Path) -> Scenario:
    """Sequences of (prompt, decode) tokens (2, 4), (2, 3), (1, 0), (2, 2), (1, 4)."""
    lengths = [(2, 4), (2, 3), (1, 0), (2, 2), (1, 4)]
    parts = [toy_trace([[[n % 2]] for n in range(sum(pair))], prompt_tokens=pair[0], experts=2) for pair in lengths]
    tensors = {name: np.concatenate([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}
    tensors["sequence"] = np.repeat(np.arange(5, dtype=np.int32), [sum(pair) for pair in lengths])
    write_trace(Trace.from_tensors(parts[0].shape, tensors, {}), path)
    return Scenario(trace=str(path), model=None, cached_share=0.5)


@pytest.mark.parametrize(("changes", "usable"), [
    ({}, {0, 1, 3, 4}),  # as many decode tokens as there are, but some
    ({"generated_tokens": 3}, {0, 1, 4}),
    ({"prompt_tokens": 2, "generated_tokens": 2}, {0, 1, 3}),
])
def test_sequences_that_are_too_short_are_never_drawn(
    tmp_path: Path, changes: dict[str, Any], usable: set[int]
) -> None:
    draws = draws_of(uneven(tmp_path / "uneven.safetensors").with_(**changes), 20)
    assert {sequence for draw in draws[1:] for sequence in draw.sequences or ()} == usable


# --- pairing, means, spreads ------------------------------------------------------------------------------------------


def test_every_policy_plays_the_same_draws(found: Comparison) -> None:
    assert {name: len(rows) for name, rows in found.draws.items()} == dict.fromkeys(NAMES, 5)
    played = [[(row["seed"], row["sequences"]) for row in rows] for rows in found.draws.values()]
    assert all(draws == played[0] for draws in played)
    assert played[0] == [(d.seed, list(d.sequences or (0,))) for d in draws_of(SHORT, 5)]


def test_a_row_is_that_of_the_simulated_draw(found: Comparison) -> None:
    for place, draw in enumerate(draws_of(SHORT, 5)):
        alone = simulate(draw.with_(policy="dali"))
        played = {"seed": place, "sequences": list(alone.scenario.sequences or ())}
        assert found.draws["dali"][place] == {**alone.to_dict(), **played}


def test_runs_are_those_of_the_scenario_itself(found: Comparison) -> None:
    for run in found.runs:
        assert run.to_dict().items() <= found.draws[run.policy][0].items()
        assert run.spans.equals(simulate(SHORT.with_(policy=run.policy)).spans)


def test_means_and_spreads_are_those_of_the_draws(found: Comparison) -> None:
    for row in found.rows():
        draws = row["draws"]
        times = [draw["tpot_ms"] for draw in draws]
        assert (row["tpot_ms_min"], row["tpot_ms_max"]) == (min(times), max(times))
        for name in ("tpot_ms", "ttft_ms", "decode_resident_hit_rate", "stall_h2d_ms", "regret", "lower_bound_tpot_ms"):
            assert row[name] == pytest.approx(fmean(draw[name] for draw in draws), rel=1e-12)
        assert row["decode_steps"] == 3
        assert type(row["decode_steps"]) is int
        assert row["labels"] == draws[0]["labels"]
        assert row["parameters"] == draws[0]["parameters"]


def test_policies_are_ranked_by_their_means(found: Comparison) -> None:
    rows = found.rows()
    assert [row["policy"] for row in rows] == [run.policy for run in found.runs]
    assert [row["tpot_ms"] for row in rows] == sorted(row["tpot_ms"] for row in rows)


def test_regret_is_taken_draw_by_draw(found: Comparison) -> None:
    for row in found.rows():
        for mine, seer in zip(row["draws"], found.draws["oracle"], strict=True):
            assert mine["regret"] == mine["tpot_ms"] / seer["tpot_ms"] - 1


def test_there_is_no_regret_without_a_clairvoyant_run() -> None:
    [row] = compare(SHORT, ["fiddler"], draws=2).rows()
    assert row["regret"] is None


def test_means_by_hand() -> None:
    """A number that some draws lack is averaged over the others; what is equal in all stays as it is."""
    rows = [
        {"policy": "p", "tpot_ms": tpot, "hit": hit, "steps": 4, "never": None, "seed": seed, "sequences": [seed]}
        for seed, (tpot, hit) in enumerate([(1.0, 0.5), (4.0, None), (1.0, 1.0)])
    ]
    assert summary(rows) == {
        "policy": "p", "tpot_ms": 2.0, "hit": 0.75, "steps": 4, "never": None, "tpot_ms_min": 1.0, "tpot_ms_max": 4.0,
        "draws": rows,
    }


def test_a_prefill_alone_has_no_spread(tmp_path: Path) -> None:
    trace = toy_trace([[[0]], [[1]]], prompt_tokens=2)
    write_trace(trace, tmp_path / "p.safetensors")
    scenario = Scenario(trace=str(tmp_path / "p.safetensors"), model=None, cached_share=0.5)
    [row] = compare(scenario, ["layer-wise"]).rows()
    assert (row["tpot_ms"], row["tpot_ms_min"], row["tpot_ms_max"]) == (None, None, None)
    assert row["ttft_ms"] > 0


# --- processes --------------------------------------------------------------------------------------------------------


def test_the_number_of_processes_changes_no_byte(found: Comparison) -> None:
    shared = compare(SHORT, NAMES, jobs=2)
    assert json.dumps(shared.rows()) == json.dumps(found.rows())
    assert shared.scenario == found.scenario
    for ours, theirs in zip(found.runs, shared.runs, strict=True):
        assert theirs.spans.equals(ours.spans)
        assert list(theirs.spans.dtypes) == list(ours.spans.dtypes)


def test_watchers_hear_of_every_run() -> None:
    heard: list[Progress] = []
    compare(SHORT, NAMES[:2], draws=2, watch=heard.append)
    assert heard == [Progress(4, done) for done in (1, 2, 3, 4)]


# --- what cannot run --------------------------------------------------------------------------------------------------


def refuses_seed_2(prepared: Prepared) -> Run:
    """Runs in all draws but one."""
    if prepared.scenario.seed == 2:
        raise ScenarioError("not with seed 2")
    return simulated(prepared.with_policy("fiddler"))


def test_who_cannot_run_in_one_draw_is_refused() -> None:
    draws = draws_of(SHORT, 4)
    found = play_draws({"mine": refuses_seed_2}, draws)
    assert str(refused(found["mine"])) == "not with seed 2"
    assert refused(play_draws({"mine": refuses_seed_2}, draws[:2])["mine"]) is None
    for jobs in (1, 2):
        with pytest.raises(ScenarioError, match=r"^mine: not with seed 2$"):
            play_draws({"mine": refuses_seed_2}, draws, jobs, insist=["mine"])


def test_who_cannot_run_is_refused_once(tmp_path: Path) -> None:
    found = compare(uneven(tmp_path / "bare.safetensors"), draws=2)
    assert "needs the forecast residual@1" in found.refused["dali"]
    assert {run.policy for run in found.runs} & set(found.refused) == set()
    named = compare(uneven(tmp_path / "bare.safetensors"), ["on-demand", "dali"], draws=2)
    assert ([run.policy for run in named.runs], set(named.refused)) == (["on-demand"], {"dali"})


def test_two_settings_of_one_policy_are_compared() -> None:
    """In the forms of a sweep file and of a command line; each is what it is alone."""
    found = compare(SHORT, ["dali", "dali{prefetch: 0}", {"dali": {"window": 2}}], draws=1)
    assert set(found.draws) == {"dali", "dali{prefetch: 0}", "dali{window: 2}"}
    alone = simulate(SHORT.with_(policy="dali", parameters={"prefetch": 0}))
    assert found.draws["dali{prefetch: 0}"][0]["tpot_ms"] == alone.to_dict()["tpot_ms"]
    assert len({rows[0]["tpot_ms"] for rows in found.draws.values()}) > 1


@pytest.mark.parametrize(("choices", "said"), [
    (["dali{nonsense: 3}"], "there is no key 'nonsense'"), (["dali{window: x}"], "window: expected a whole number"),
    (["dali{window"], "expected a closing brace"), (["fiddler", "fiddler"], "every policy once"),
    ([{"dali": {}, "fiddler": {}}], "expected a name, or"),
])
def test_a_choice_that_is_none_is_refused(choices: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compare(SHORT, choices, draws=1)


def test_nobody_can_run() -> None:
    with pytest.raises(ChoiceError, match=r"none of the policies can run: on-demand.*GB are missing"):
        compare(replace(SHORT, trace="mini-deepseek", model="deepseek-v2-lite", cached_share=0.99), draws=2)


def test_all_reasons_are_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"on-demand": "2.5 GB are missing", "fiddler": "no calibration", "dali": "3 GB are missing"}

    def refuse(prepared: Prepared, policy: str, parameters: object, label: str) -> Run:
        raise ScenarioError(reasons[policy])

    monkeypatch.setattr(comparison, "_simulated", refuse)
    monkeypatch.setattr(comparison, "policy_names", lambda: tuple(reasons))
    with pytest.raises(ChoiceError) as caught:
        compare(SHORT, draws=2)
    assert str(caught.value) == (
        "none of the policies can run: on-demand, dali: 2.5 GB are missing; fiddler: no calibration"
    )


@pytest.mark.parametrize("draws", [0, -1])
def test_no_draws(draws: int) -> None:
    with pytest.raises(ScenarioError, match=f"at least 1 draw, the scenario itself, got {draws}"):
        compare(SHORT, draws=draws)


def test_no_policies() -> None:
    with pytest.raises(ChoiceError, match="at least one policy to compare, got none"):
        compare(SHORT, [])


# --- kinds of programs ------------------------------------------------------------------------------------------------


def test_a_kind_of_programs_has_a_range_of_times_and_another_engine_none(found: Comparison) -> None:
    assert not found.ends
    assert "tpot_ms_quick" not in found.rows()[0]
    kind = compare(SHORT.with_(engine="eager"), ["fiddler", "on-demand"], draws=2)
    for row in kind.rows():
        assert row["tpot_ms_quick"] < row["tpot_ms_min"] <= row["tpot_ms_max"] < row["tpot_ms_slow"]
    assert kind.scenario.engine_overrides == {}, "the scenario itself has the kind's own numbers"


# --- sampled steps ----------------------------------------------------------------------------------------------------


def test_draws_of_a_long_answer_need_no_longer_sequences_than_are_played() -> None:
    long = SHORT.with_(prompt_tokens=1000, sampled_prompt_tokens=16, generated_tokens=500, sampled_steps=8)
    found = compare(long, ["fiddler", "daop"], draws=3)
    assert {row["decode_steps"] for rows in found.draws.values() for row in rows} == {8}
    assert len({tuple(row["sequences"]) for row in found.draws["fiddler"]}) == 3
    assert {row["ttft_ms"] is None for row in found.draws["daop"]} == {True}
    assert found.scenario.generated_tokens == 500


# --- the measured error of a run with few steps is that of the nearest setting ----------------------------------------


@pytest.mark.parametrize(("steps", "batch", "nearest"), [
    (56, 1, (1, 56)), (55, 3, (1, 32)), (24, 4, (4, 24)), (32, 4, (4, 32)), (100, 64, (4, 56)), (8, 1, (1, 24)),
    (1, 16, (4, 24)),
])
def test_the_measured_error_is_that_of_the_nearest_setting_below(
    steps: int, batch: int, nearest: tuple[int, int]
) -> None:
    found = measured_error(steps, batch)
    assert found[:2] == nearest
    assert 0 < found.mean < found.largest < 0.2, "shares of TPOT"


# --- showing a comparison ---------------------------------------------------------------------------------------------


def test_a_comparison_is_a_frame_of_its_rows(found: Comparison) -> None:
    frame = found.to_frame()
    assert list(frame.index) == [row["policy"] for row in found.rows()]
    assert frame["tpot_ms"].tolist() == [row["tpot_ms"] for row in found.rows()]
    assert "draws" not in frame


def test_as_text_a_comparison_is_one_line_with_the_fastest_policies(found: Comparison) -> None:
    times = ", ".join(f"{row['policy']} {row['tpot_ms']:.2f}" for row in found.rows())
    assert repr(found) == f"<Comparison of 4 policies, 0 refused; mean TPOT in ms: {times}>"
    many = found._replace(runs=2 * found.runs, refused={"smoe": "needs scores"})
    assert repr(many).startswith(f"<Comparison of 8 policies, 1 refused; mean TPOT in ms: {times}, ...>")


def test_in_a_notebook_a_comparison_is_a_table_with_a_line_a_policy(found: Comparison) -> None:
    shown = found._repr_html_()
    assert shown.count("<tr>") == len(NAMES)
    for row in found.rows():
        assert row["policy"] in shown
        assert f"<td>{row['tpot_ms']:.2f}</td>" in shown
