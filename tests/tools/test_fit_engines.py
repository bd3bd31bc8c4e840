"""The fit of engines: its unknowns, its log_residuals on speeds that it made itself, and the files that it writes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.costs.engine import load_engine, load_fitted
from tools import engine_files
from tools.bundle_gpt_oss import GENERATED_TOKENS, PROMPT_TOKENS, RecordedTokens, choose, trace_of
from tools.engine_fit import (
    SIGMAS,
    Observation,
    fitted,
    fitted_without,
    held,
    linear_at,
    log_errors,
    observations_of,
    solved,
    weights_of,
)
from tools.engine_starts import ENGINES, engines_of, read_starts
from tools.fit_engines import rows_to_fit
from traces.layout import TraceError
from trilane.engines.accuracy.measured_rows import MeasuredRow, predict

STARTS = read_starts()
ROW = MeasuredRow(
    id="1", model="qwen3-30b-a3b", weights="q4_k_m", machine="rtx-4080+ddr5-5600+ryzen-9-7950x", engine="llama.cpp",
    cpu_layers=0, decode_tokens_per_s=1, prompt_tokens=512, prompt_tokens_per_s=1, quality="A",
)


def made(changed: dict[str, float]) -> list[MeasuredRow]:
    """Rows of three machines as the engines would have it with other numbers."""
    engines = engines_of(STARTS, STARTS.logs)
    engine = engines["llama.cpp"]
    other = engine.with_numbers({key: engine.flat()[key].value * factor for key, factor in changed.items()})
    rows = [
        replace(ROW, id=gpu, machine=f"{gpu}+ddr5-5600+ryzen-9-7950x") for gpu in ("rtx-4080", "rtx-3090", "rtx-4090")
    ]
    found = [predict(row, {"llama.cpp": other}) for row in rows]
    return [
        replace(row, decode_tokens_per_s=one.decode_tokens_per_s, prompt_tokens_per_s=one.prompt_tokens_per_s)
        for row, one in zip(rows, found, strict=True)
    ]


def test_numbers_start_alike_and_ratios_set_engines_apart() -> None:
    engines = {name: engine.flat() for name, engine in engines_of(STARTS, STARTS.logs).items()}
    start = STARTS.numbers["gpu.layer_ns.grouped"].start
    assert engines["llama.cpp"]["gpu.layer_ns.grouped"].value == pytest.approx(start)
    older = STARTS.ratios["older builds, layers"].start
    assert engines["llama.cpp-2025"]["gpu.layer_ns.grouped"].value == pytest.approx(older * start)
    both = older * STARTS.ratios["ik_llama.cpp, layers"].start
    assert engines["ik_llama.cpp-2025"]["gpu.layer_ns.grouped"].value == pytest.approx(both * start)
    products = STARTS.numbers["cpu.products_per_cycle.k_quant"].start
    repacked = STARTS.ratios["ik_llama.cpp, repacked products, avx512"].start * products
    assert engines["ik_llama.cpp"]["prompt.repacked_products_per_cycle.avx512"].value == pytest.approx(repacked)


def test_a_fit_to_its_own_speeds_stays_where_it_starts() -> None:
    observations = observations_of(made({}))
    assert np.allclose(log_errors(observations, engines_of(STARTS, STARTS.logs)), 0, atol=1e-3)
    assert np.allclose(fitted(STARTS, observations).logs, STARTS.logs, atol=2e-3)


def test_rows_and_a_start_are_weighed_by_what_each_leaves_open() -> None:
    """One unknown with a slope of 1, and a speed that is 1 % off with a standard deviation of 15 %: near the start
    Cauchy's loss is that of squares, so the number goes spread^2 / (spread^2 + 0.15^2) of the way."""
    spread = STARTS.spreads[0]
    observations = [point for point in observations_of(made({})) if point.quantity == "decode"][:1]
    slopes = np.zeros((1, len(STARTS.logs)))
    slopes[0, 0] = 1.0
    linear = linear_at(STARTS, observations, STARTS.logs)._replace(errors=np.array([-0.01]), slopes=slopes)
    moved = solved(linear, STARTS, STARTS.logs) - STARTS.logs
    assert SIGMAS.decode == 0.15
    assert moved[0] == pytest.approx(0.01 * spread**2 / (spread**2 + 0.15**2), rel=0.01)
    assert np.allclose(moved[1:], 0)
    [number, *others] = held(STARTS, linear)
    assert number.spread_after == pytest.approx((spread**-2 + 0.15**-2) ** -0.5, rel=0.01)
    assert (number.machines, number.most) == (1, observations[0].row.machine)
    assert {(one.machines, one.most, one.spread_after) for one in others} == {(0, "", one.spread) for one in others}


def test_a_row_that_is_off_by_a_factor_pulls_less_than_one_that_is_off_by_a_little() -> None:
    observations = [point for point in observations_of(made({})) if point.quantity == "decode"]
    slopes = np.zeros((3, len(STARTS.logs)))
    slopes[:, 0] = 1.0
    for off in (-1.5, -15.0):
        linear = linear_at(STARTS, observations, STARTS.logs)._replace(errors=np.array([0.0, 0.0, off]), slopes=slopes)
        assert abs(solved(linear, STARTS, STARTS.logs)[0] - STARTS.logs[0]) < 0.02


def test_fifty_rows_of_a_machine_count_as_five() -> None:
    many = [Observation(ROW, "decode")] * 50
    assert weights_of(many).sum() == pytest.approx(4.6, abs=0.05)
    assert weights_of([*many, Observation(replace(ROW, machine="gb10"), "decode")])[-1] == 1
    assert weights_of([Observation(ROW, "decode"), Observation(ROW, "prompts")]).tolist() == [1, 1]


def test_a_fit_goes_where_the_rows_are() -> None:
    observations = observations_of(made({"gpu.layer_ns.grouped": 1.3}))
    before = abs(log_errors(observations, engines_of(STARTS, STARTS.logs))[0])
    after = abs(log_errors(observations, engines_of(STARTS, fitted(STARTS, observations).logs))[0])
    assert before > 0.05
    assert after < before / 2


def test_a_fit_without_some_rows_is_that_of_the_others_alone() -> None:
    """With slopes of the fit to all: numbers within 2 %, and speeds of the rows that were left out within 0.5 %."""
    changed = {"gpu.layer_ns.grouped": 1.5, "gpu.read_share": 0.8, "gpu.expert_product_share": 1.3}
    observations = observations_of(made(changed))
    own = [point for point in observations if point.row.machine.startswith("rtx-3090")]
    apart = fitted(STARTS, [point for point in observations if point not in own]).logs
    quick = fitted_without(STARTS, fitted(STARTS, observations), [own[0].row.id])
    assert np.allclose(quick, apart, atol=0.02)
    assert np.max(np.abs(apart - STARTS.logs)) > 0.1
    speeds = (log_errors(own, engines_of(STARTS, logs)) for logs in (quick, apart))
    assert np.allclose(*speeds, atol=0.005)


def test_the_rows_are_those_with_one_assumption_at_most() -> None:
    rows = rows_to_fit()
    assert {row.quality for row in rows} == {"A", "B"}
    assert {row.engine for row in rows} <= set(ENGINES)
    assert not any(row.left_out for row in rows)


def test_no_start_comes_from_rows_and_estimates_say_how_uncertain_they_are() -> None:
    sources = {row.source for row in rows_to_fit()}
    for name, start in STARTS.unknowns.items():
        assert not re.search(r"the rows? of", start.source), name
        assert start.source.strip() not in sources
        assert 0.1 <= start.spread <= 1.0, name


def test_engines_that_are_written_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_files, "FOLDER", tmp_path)
    fit = "1 rows of 1 machines (tools/fit_engines.py)"
    engines = {name: replace(engine, fit=fit) for name, engine in engines_of(STARTS, STARTS.logs + 0.01).items()}
    engine_files.write_engines(engines, STARTS.sources())
    for name, engine in engines.items():
        again = load_engine(str(tmp_path / f"{name}.yaml"))
        assert again.about == engine.about
        if name == "llama.cpp":  # the others are like the engine of that name that comes with the simulator
            assert {key: number.value for key, number in again.flat().items()} == {
                key: pytest.approx(number.value, rel=6e-3) if isinstance(number.value, float) else number.value
                for key, number in engine.flat().items()
            }
            assert again.fit == fit
            start = STARTS.numbers["cpu.layer_ns"]
            assert again.flat()["cpu.layer_ns"].source == f"{start.source}; fitted from {start.start:g}"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_says_once_what_it_was_fitted_to(name: str) -> None:
    engine = load_fitted(name)
    sources = [number.source for number in engine.flat().values()]
    assert engine.fit is not None
    assert any("; fitted from " in source for source in sources)
    assert not any("tools/fit_engines.py" in source for source in sources)


# --- Choosing what is bundled of gpt-oss-20b's recorded tokens, on a few made-up ones ---------------------------------


LENGTH = PROMPT_TOKENS + GENERATED_TOKENS


def recorded(*facts: tuple[str, bool, int], again: tuple[int, int] | None = None, layers: int = 24) -> RecordedTokens:
    """Sequences by (data set, repetition, tokens); ``again``: the second is the first, in another data set."""
    lengths = [tokens for *_, tokens in facts]
    start = np.concatenate([[0], np.cumsum(lengths)])
    random = np.random.default_rng(0)
    ids = random.permuted(np.broadcast_to(np.arange(32, dtype=np.uint8), (start[-1], layers, 32)), axis=-1)[..., :4]
    if again:
        one, other = (slice(start[number], start[number] + LENGTH) for number in again)
        ids[other] = ids[one]
    weights = np.broadcast_to(np.array([0.4, 0.3, 0.2, 0.1], np.float16), ids.shape)
    keys = ("dataset", "repetition", "tokens")
    named: list[dict[str, Any]] = [dict(zip(keys, fact, strict=True)) for fact in facts]
    return RecordedTokens(ids, weights, start, named)


def test_data_sets_take_turns_and_loops_and_short_texts_are_left_out() -> None:
    facts = [("a", False, LENGTH)] * 3 + [("b", False, LENGTH + 7), ("b", True, LENGTH), ("b", False, LENGTH - 1)]
    evaluated, calibration = choose(recorded(*facts), 2)
    chosen = [number for pair in zip(evaluated, calibration, strict=True) for number in pair]
    assert sorted(chosen) == [0, 1, 2, 3]
    assert [facts[number][0] for number in chosen] == ["a", "b", "a", "a"]


def test_a_question_in_two_data_sets_is_taken_once() -> None:
    facts = [("a", False, LENGTH), ("b", False, LENGTH), ("c", False, LENGTH)]
    chosen = [number for part in choose(recorded(*facts, again=(0, 1)), 3) for number in part]
    assert len(chosen) == 2
    assert 2 in chosen


def test_a_trace_holds_the_tokens_of_its_sequences() -> None:
    given = recorded(("a", False, LENGTH), ("b", False, LENGTH))
    trace = trace_of(given, [1, 0])
    np.testing.assert_array_equal(trace.topk_ids[:LENGTH], given.ids[LENGTH:])
    assert trace.provenance["domains"] == ["b", "a"]
    assert trace.sequence[[0, -1]].tolist() == [0, 1]


def test_arrays_of_another_model_are_refused() -> None:
    with pytest.raises(TraceError, match="topk_ids must be"):
        trace_of(recorded(("a", False, LENGTH), layers=23), [0])
