"""What limits an answer: one part better at a time, over warm windows, and the numbers that it rests on."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.calibration import Calibration
from policies.parts.placements import NoPlacement
from policies.protocols import Budget
from sim.costs.engine import load_engine
from sim.machine.hardware import load_hardware
from sim.machine.plausibility import check_plausible
from sim.runs import prepare
from sim.runs.prepare import Prepared
from sim.simulate import spans_of
from tests.kit.depth import thinned
from tests.trilane.fit.test_ten_pairs import QUESTIONS
from trilane.engines.gains import (
    BETTER,
    CPU_READS,
    PARTS,
    Gain,
    ScaledPart,
    better_numbers,
    ranked,
    reads_all_it_can,
)
from trilane.engines.question import Question
from trilane.fit import fit as fit_module
from trilane.fit.fit import fit
from trilane.fit.policy_result import BLOCKS, DecodeSteps, PlayedPolicy, play_policy
from trilane.fit.prepared_question import candidate_names, on_machine, prepared_for
from trilane.fit.sensitivity import (
    NEAR,
    WarmPlacement,
    evidence_of,
    gain_of,
    half_tpot_ms,
    parts_of,
    warm_tpot_ms,
    warm_window,
    with_better,
)

HARDWARE = load_hardware("rtx-4080+ddr5-5600")
[DRAM] = [part.keys for part in PARTS if part.name == "DRAM"]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_better_part_changes_its_own_numbers_and_stays_plausible(part: ScaledPart) -> None:
    before = HARDWARE.flat()
    better = {key: before[key] * BETTER for key in part.keys} | {key: before[key] / BETTER for key in part.shrinking}
    after = HARDWARE.with_numbers(better).flat()
    assert {key for key in before if after[key] != before[key]} == set(better)
    assert all(after[key] == pytest.approx(value) for key, value in better.items())
    check_plausible(after, "a better machine")


def test_whole_numbers_stay_whole() -> None:
    assert HARDWARE.with_numbers({"gpu.memory_bytes": 10.6}).gpu.memory_bytes == 11


@pytest.mark.parametrize(("read", "ceiling", "faster_memory", "at_ceiling"), [
    (40e9, None, 50e9, False), (40e9, 60e9, 50e9, False), (40e9, 44e9, 44e9, False), (40e9, 40e9, 40e9, True),
], ids=["no ceiling known", "far below it", "near it", "at it"])
def test_of_faster_memory_the_cpu_reads_no_more_than_it_can(
    read: float, ceiling: float | None, faster_memory: float, at_ceiling: bool
) -> None:
    cpu = replace(HARDWARE.cpu, read_bytes_per_s=read, read_ceiling_bytes_per_s=ceiling)
    hardware = replace(HARDWARE, cpu=cpu)
    assert better_numbers(hardware, DRAM)["cpu.read_bytes_per_s"] == faster_memory
    assert reads_all_it_can(hardware) == at_ceiling


def test_a_cpu_that_reads_more_has_a_higher_ceiling() -> None:
    hardware = replace(HARDWARE, cpu=replace(HARDWARE.cpu, read_bytes_per_s=40e9, read_ceiling_bytes_per_s=40e9))
    [part] = [part for part in PARTS if part.name == CPU_READS]
    assert better_numbers(hardware, part.keys) == {"cpu.read_bytes_per_s": 50e9, "cpu.read_ceiling_bytes_per_s": 50e9}


def test_a_profiles_tables_shrink_where_it_has_no_numbers() -> None:
    prepared = on_a_profile()
    before = prepared.costs.experts[0]
    after = {part.name: with_better(prepared, part).costs.experts[0] for part in PARTS if part.tables}
    assert after["PCIe"] == before._replace(copy_ns=round(before.copy_ns / BETTER))
    assert after["GPU bandwidth"] == before._replace(gpu_ns=tuple(round(ns / BETTER) for ns in before.gpu_ns))
    shorter = tuple(round(ns / BETTER) for ns in before.cpu_ns)
    assert after["DRAM"] == before._replace(cpu_ns=shorter, first_cpu_ns=round(before.first_cpu_ns / BETTER))


def test_gains_on_a_profile_are_those_of_parts_that_its_tables_tell_apart() -> None:
    prepared = on_a_profile().with_policy("ktransformers")
    window = warm_window(prepared, play_policy(prepared))
    gains = ranked(gain_of(prepared, window, part) for part in parts_of(prepared))
    assert {gain.part for gain in gains} == {
        "PCIe", "DRAM", "GPU bandwidth", "GPU memory", "kernel launches", "synchronisation", "decisions",
    }
    assert [gain.tpot for gain in gains] == sorted((gain.tpot for gain in gains), reverse=True)
    assert all(gain.tpot < BETTER - 1 + 1e-3 for gain in gains if gain.part != "GPU memory")


@cache
def on_a_profile() -> Prepared:
    """DeepSeek-V2-Lite's first two layers, of which too little memory holds a part."""
    profile = str(Path(__file__).parents[3] / "docs/validation/host-lanes/profile.yaml")
    question = Question("deepseek-v2-lite:2", machine=profile, trace="mini-deepseek:2", prompt_tokens=32, generated=4)
    prepared = prepared_for(question)
    return on_machine(prepared, prepared.hardware.with_numbers({"gpu.memory_bytes": 2.4e9}))


OFFLOADED: dict[str, Any] = {"model": "deepseek-v2-lite", "trace": "mini-deepseek", "weights": "bf16",
                             "gpu": "rtx-3060", "ram": "ddr4-3200", "prompt_tokens": 256, "generated": 56}
PART = {part.name: part for part in PARTS}
ADAPTIVE, STATIC = "mixtral-offloading@impl", "ktransformers"


def test_a_warm_placement_keeps_the_slots_and_changes_who_sits_in_them() -> None:
    budget = Budget(experts=4, expert_bytes=(10, 10), cache_bytes=30)
    placed = WarmPlacement(NoPlacement(), ((3, 1), (2,))).place(budget)
    assert placed == replace(NoPlacement().place(budget), residents=((3, 1), (2,)))


def test_an_answer_ends_with_the_experts_that_the_next_run_begins_with() -> None:
    one, played = asked(ADAPTIVE), answered(ADAPTIVE)
    assert warm_window(one, played).residents == played.residents
    placed = one.session().residency.resident
    assert [set(experts) for experts in played.residents] != placed
    assert [len(experts) for experts in played.residents] == [len(experts) for experts in placed]


@thinned(2)
@pytest.mark.parametrize("policy", [ADAPTIVE, STATIC, "dali", "best-exact"])
def test_a_few_warm_steps_tell_what_half_of_the_answer_does(policy: str) -> None:
    """Of parts by which no policy decides what to copy; to two in a hundred of TPOT."""
    one = asked(policy)
    short = warm_window(one, answered(policy))
    assert short.residents is not None
    assert short.base_ms == pytest.approx(answered(policy).result.tpot_ms, rel=NEAR)
    half = replace(short, residents=None)
    for name in ("GPU bandwidth", "GPU kernels", "synchronisation"):
        told = gain_of(one, short, PART[name]).tpot
        assert told == pytest.approx(gain_of(one, half, PART[name]).tpot, abs=0.02)
        assert told >= -0.02


@pytest.mark.parametrize("name", ["PCIe", "DRAM", "GPU memory"])
def test_a_part_by_which_it_is_decided_what_to_copy_is_compared_over_half_of_the_answer(name: str) -> None:
    one = asked("best-exact")
    short = warm_window(one, answered("best-exact"))
    better = with_better(one, PART[name])
    expected = short.half_ms / half_tpot_ms(better) - 1
    assert gain_of(one, short, PART[name]).tpot == expected
    assert (expected == short.gain(better, other_copies=False)) == (name == "GPU memory")  # where others are placed
    whole_ms = play_policy(better).result.tpot_ms
    assert expected == pytest.approx(answered("best-exact").result.tpot_ms / whole_ms - 1, abs=0.09)


def test_where_others_are_placed_half_of_the_answer_is_compared() -> None:
    """By a policy that places experts by what the machine costs; the residents of old would sit in other slots."""
    one, short = asked(STATIC), warm_window(asked(STATIC), answered(STATIC))
    better = with_better(one, PART["GPU bandwidth"])
    elsewhere = replace(short, placed=((0,), *short.placed[1:]))
    assert elsewhere.gain(better, other_copies=False) == short.gain(better, other_copies=True)
    assert short.gain(better, other_copies=False) != short.gain(better, other_copies=True)


def test_a_part_that_takes_no_time_of_a_step_gains_nothing() -> None:
    """A token's products on the GPU wait for weights."""
    one, window = asked(STATIC), warm_window(asked(STATIC), answered(STATIC))
    assert gain_of(one, window, PART["GPU compute"]) == Gain("GPU compute", PART["GPU compute"].owner, 0.0)


def test_the_same_machine_is_no_faster() -> None:
    one, window = asked(ADAPTIVE), warm_window(asked(ADAPTIVE), answered(ADAPTIVE))
    assert window.gain(one, other_copies=False) == 0
    assert window.gain(one, other_copies=True) == 0


def test_a_cold_start_would_mislead_and_is_not_used() -> None:
    """The broken twin: an answer that ended with nothing in the cache is compared over half of it."""
    one, played = asked(STATIC), answered(STATIC)
    empty = played._replace(residents=((),) * 26)
    assert warm_tpot_ms(one, empty.residents) > (1 + NEAR) * played.result.tpot_ms
    window = warm_window(one, empty)
    assert window.residents is None
    better = with_better(one, PART["GPU bandwidth"])
    assert window.gain(better, other_copies=False) == window.gain(better, other_copies=True)


@cache
def machine() -> Prepared:
    found = prepared_for(Question(**OFFLOADED))
    return on_machine(found, found.hardware.with_numbers({"gpu.memory_bytes": 12e9}))


def asked(policy: str) -> Prepared:
    return machine().with_policy(policy)


@cache
def answered(policy: str) -> PlayedPolicy:
    return play_policy(asked(policy))


FEW_LAYERS: dict[str, Any] = {"model": "deepseek-v2-lite:6", "trace": "mini-deepseek:6", "weights": "bf16",
                              "gpu": "rtx-3060", "ram": "ddr4-3200", "prompt_tokens": 2048, "generated": 12}
EVERY_PART = [
    Gain(part, "", 0.1)
    for part in ("PCIe", "DRAM", CPU_READS, "CPU compute", "GPU bandwidth", "GPU compute", "GPU memory", "GPU kernels",
                 "kernel launches", "synchronisation", "decisions")
]


@cache
def on_engine(how: str) -> Prepared:
    found = prepared_for(Question(**FEW_LAYERS, policy_engine=how))
    return on_machine(found, found.hardware.with_numbers({"gpu.memory_bytes": 4.2e9}))


def tpot_ms(one: Prepared, policy: str) -> float:
    return play_policy(one.with_policy(policy)).result.tpot_ms


def test_recorded_graphs_have_their_own_numbers_in_place_of_the_machines() -> None:
    kept = {"kernel launches": "graphs: replay_ns", "synchronisation": "graphs: spin_ns"}
    graphs = load_engine("graphs").flat()
    for part, name in kept.items():
        (support,) = evidence_of(on_engine("graphs"), [Gain(part, "", 0.1)])
        assert (support.key, support.value) == (name, graphs[name.partition(": ")[2]].value)
        assert support.source
    eager = [evidence_of(on_engine("pytorch"), [Gain(part, "", 0.1)])[0].key for part in kept]
    assert eager == ["host.launch_ns", "host.sync_ns"]


@pytest.mark.parametrize("how", ["graphs", "pytorch"])
@pytest.mark.parametrize("factor", [BETTER, 1 / BETTER])
def test_every_number_that_is_listed_changes_the_time_per_token(how: str, factor: float) -> None:
    """For a policy that copies, computes on both sides and decides; of parts that gain nothing none would be listed."""
    base = tpot_ms(on_engine(how), "dali")
    for part in EVERY_PART:
        if part.part.endswith("compute"):
            continue  # one token's products wait for bytes: their gain is none
        for support in evidence_of(on_engine(how), [part]):
            one = on_engine(how)
            if support.key.startswith("graphs: "):
                overrides = {support.key.removeprefix("graphs: "): round(support.value * factor)}
                scenario = one.scenario.with_(engine_overrides=overrides)
                changed = on_machine(replace(one, scenario=scenario), one.hardware)
            else:
                changed = on_machine(one, one.hardware.with_numbers({support.key: support.value * factor}))
            assert tpot_ms(changed, "dali") != base, support.key


def test_the_weakest_come_first_and_only_where_their_part_matters() -> None:
    found = fit(Question(**FEW_LAYERS, policies=("ktransformers",))).policies
    assert found is not None
    doubt = {"high": 0.1, "medium": 0.5, "low": 1.0}
    weights = [support.gain * doubt[support.confidence] for support in found.supports]
    assert weights == sorted(weights, reverse=True)
    assert all(support.gain >= 0.02 for support in found.supports)


# --- Spreads ----------------------------------------------------------------------------------------------------------


MS = np.array([9.0, 11.0, 10.0, 14.0, 8.0, 10.0, 12.0, 10.0])


def steps(ms: np.ndarray, weights: object = 1.0) -> DecodeSteps:
    return DecodeSteps(ms, np.broadcast_to(np.asarray(weights, float), ms.shape))


def test_of_equal_weights_it_is_twice_the_standard_error_of_the_mean() -> None:
    assert len(MS) == BLOCKS
    assert steps(MS).mean_ms == MS.mean()
    assert steps(MS).spread_ms == pytest.approx(2 * MS.std(ddof=1) / np.sqrt(len(MS)))


def test_a_step_that_stands_for_many_tokens_decides_the_mean() -> None:
    assert steps(MS, [1, 1, 1, 9, 1, 1, 1, 1]).mean_ms == pytest.approx((70 + 9 * 14) / 16)


def test_neighbours_that_are_alike_count_as_one() -> None:
    slow = np.repeat(MS, 4)
    assert steps(slow).spread_ms == pytest.approx(steps(MS).spread_ms)


def test_policies_are_compared_step_by_step() -> None:
    assert steps(MS).spread_of_difference_ms(steps(MS + 3)) == pytest.approx(0, abs=1e-12)
    assert steps(MS).spread_of_difference_ms(steps(MS[::-1])) > 0


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_steps_have_none(count: int) -> None:
    assert steps(MS[:count]).spread_ms == 0


# --- how many processes share a question, and what they are given -----------------------------------------------------


QUESTION = {"model": "deepseek-v2-lite:2", "gpu": "rtx-3060", "ram": "ddr4-3200"}
ASKED = Question(**QUESTIONS["desktop, 6 GB, a small model"]["asked"])


def test_the_usual_plays_are_those_of_the_candidates_which_are_imported_later() -> None:
    usual = candidate_names(Question(**QUESTION))
    assert len(usual) == fit_module._USUAL_PLAYS
    assert candidate_names(Question(**QUESTION, policies=("usual",))) == usual
    assert len(candidate_names(Question(**QUESTION, policies=("dali",)))) - 1 == fit_module._ADDED


@pytest.mark.parametrize("policy", ["ktransformers", "best-exact", "oracle"])
def test_a_copy_of_a_prepared_question_plays_the_same_without_reading_anything_again(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_for(ASKED).calibrated()
    copy = pickle.loads(pickle.dumps(prepared))
    monkeypatch.setattr(prepare, "load_calibration", _not_again)
    assert spans_of(copy.with_policy(policy)) == spans_of(prepared.with_policy(policy))


def test_a_copy_of_a_trace_is_the_same_trace() -> None:
    trace = prepared_for(ASKED).trace
    copy = pickle.loads(pickle.dumps(trace))
    assert (copy.shape, copy.checksum, dict(copy.provenance)) == (trace.shape, trace.checksum, dict(trace.provenance))
    assert copy.tensors().keys() == trace.tensors().keys()
    for name, tensor in copy.tensors().items():
        np.testing.assert_array_equal(tensor, trace.tensors()[name])
        assert not tensor.flags.writeable


def _not_again(name: str) -> Calibration:
    raise AssertionError(f"{name} is counted again")
