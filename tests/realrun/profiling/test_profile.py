"""A small model profiled on real host lanes: whole, finite, kept in a file, simulated with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from realrun.errors import RefusedError
from realrun.machine.host_lanes import HostLanes
from realrun.machine.machines import machine_of
from realrun.profiling.cpu_threads import counts_up_to, thread_times
from realrun.profiling.decisions import fitted_cost
from realrun.profiling.hardware import Aim
from realrun.profiling.lab import Lab, Points
from realrun.profiling.profile import Findings, points_of, profile
from realrun.profiling.timing import Effort
from sim.machine.hardware import load_hardware, write_hardware
from sim.machine.interpolation import Table, TimeGrid
from sim.machine.plan_costs import PlanCost
from sim.machine.profile import MeasuredModel, MeasuredSizes, Profile
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.tiny_bench import machine as tiny_machine
from tests.kit.tiny_bench import tiny_setting
from traces.models.catalogue import load_model

SHAPE = load_model("mini-moe:3")
POINTS = Points(batches=(1, 2), contexts=(4, 8), prompts=(2, 4))
ONCE = Effort(rounds=2, most=1, probe_ns=0)


@pytest.fixture(scope="module")
def lanes() -> Iterator[HostLanes]:
    with tiny_machine(link_bytes_per_s=4e9) as machine:
        yield machine


@pytest.fixture(scope="module")
def found(lanes: HostLanes) -> Findings:
    return profile(lanes, [SHAPE], POINTS, ["fiddler", "oracle"], name="tiny", effort=ONCE)


@pytest.fixture
def path(found: Findings, tmp_path: Path) -> Path:
    write_hardware(found.hardware, tmp_path / "tiny.yaml")
    return tmp_path / "tiny.yaml"


def profile_in(found: Findings) -> Profile:
    assert found.hardware.profile is not None
    return found.hardware.profile


def model_in(found: Findings) -> MeasuredModel:
    return profile_in(found).models["mini-moe"]


def tables(model: MeasuredModel) -> dict[str, Table | TimeGrid]:
    return {name: part for name, part in vars(model).items() if isinstance(part, Table | TimeGrid)}


def test_a_model_is_measured_by_its_name_without_layers(found: Findings) -> None:
    assert list(profile_in(found).models) == ["mini-moe"]
    assert model_in(found).sizes == MeasuredSizes.of(SHAPE)


def test_tables_have_the_points_that_were_asked_for(found: Findings) -> None:
    model = model_in(found)
    assert model.expert_gpu.at == model.expert_cpu.at == model.combine.at == (1, 2, 4, 8)
    assert model.gate.at == (1, 2, 4, 8)  # decoded and prefilled
    assert (model.attention_decode.batch, model.attention_decode.length) == ((1, 2), (4, 8))
    assert (model.attention_prefill.batch, model.attention_prefill.length) == ((1, 2), (2, 4))


def test_what_computes_takes_time(found: Findings) -> None:
    for name, part in tables(model_in(found)).items():
        times: Any = part.ns if isinstance(part, Table) else [ns for row in part.ns for ns in row]
        assert name == "result" or all(ns > 0 for ns in times), name
    assert model_in(found).copy.ns > 0


def test_rates_are_finite_and_stand_beside_aims(found: Findings) -> None:
    rates = profile_in(found).rates
    assert rates
    assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())
    assert [aim.wanted for aim in found.aims] == [0.9, 0.8]
    copied, read = (rates[f"mini-moe, {name}_bytes_per_s"] for name in ("expert_copy", "cpu_expert_read"))
    plain = rates["plain_copy_bytes_per_s"], rates["plain_read_bytes_per_s"]
    assert [aim.share for aim in found.aims] == [copied / plain[0], read / plain[1]]


def test_sums_of_results_stand_with_the_rates_by_batch_alone_and_beside_copies(found: Findings) -> None:
    names = {name for name in profile_in(found).rates if "sum_of_results" in name}
    assert names == {
        f"mini-moe, sum_of_results{beside}_ns, {batch} tokens" for beside in ("", "_beside_copies") for batch in (1, 2)
    }


@pytest.mark.parametrize(("share", "met"), [(0.79, False), (0.8, True), (1.3, True)])
def test_an_aim_is_met_from_the_wanted_share_on(share: float, met: bool) -> None:
    assert Aim("read", share, 0.8).met == met


def test_decisions_are_timed_but_for_oracles(found: Findings) -> None:
    assert list(profile_in(found).plan) == list(profile_in(found).foresee) == ["fiddler"]
    assert sum(profile_in(found).plan["fiddler"]) > 0
    assert found.skipped == {"oracle": "decisions of an oracle cost nothing"}


def test_every_number_says_where_it_is_from(found: Findings) -> None:
    origins = found.hardware.origins
    assert set(origins) == set(found.hardware.flat())
    by_word: dict[str, set[str]] = {}
    for key, origin in origins.items():
        by_word.setdefault(origin.source.split()[0].rstrip(",:"), set()).add(key)
    assert by_word == {
        "measured": set(origins) - by_word["chosen"] - by_word["assumed"] - by_word["setting"] - by_word["reported"],
        "chosen": {"gpu.name", "gpu.memory_bytes"},
        "setting": {"cpu.cores", "link.result_path"},
        "reported": {"cpu.name"},
        "assumed": {
            "gpu.bandwidth_fraction", "gpu.flops_fraction", "gpu.reserve_bytes", "cpu.sockets",
            "link.theory_bytes_per_s", "link.both_ways_share", "link.copies", "link.pageable_fraction",
            "host.plan_factor",
        },
    }
    assert {"link.h2d_bytes_per_s", "cpu.read_bytes_per_s", "host.sync_ns"} < by_word["measured"]
    low = {key for key, origin in origins.items() if origin.confidence != "high"}
    assert low == by_word["assumed"]
    assert found.hardware.power is None


def test_a_profile_survives_its_file(found: Findings, path: Path) -> None:
    assert load_hardware(path) == found.hardware


def test_the_machine_can_be_built_again(lanes: HostLanes, path: Path) -> None:
    there = load_hardware(path).profile
    assert there is not None
    made = machine_of(there)
    made.close()
    assert made.settings == lanes.settings


def test_a_profile_is_what_a_simulation_needs(path: Path) -> None:
    asked = Scenario(
        trace="mini-moe:3", model="mini-moe:3", hardware=str(path), policy="fiddler", cached_share=0.3,
        prompt_tokens=4, generated_tokens=3,
    )
    run = simulate(asked)
    assert run.to_dict()["tpot_ms"] > 0


def test_a_model_is_added_to_those_there(lanes: HostLanes, found: Findings) -> None:
    other = replace(SHAPE, name="other", hidden=64)
    more = profile(lanes, [other], POINTS, [], name="tiny", into=found.hardware, effort=ONCE)
    assert list(profile_in(more).models) == ["mini-moe", "other"]
    assert profile_in(more).models["mini-moe"] == model_in(found)
    assert profile_in(more).plan == profile_in(found).plan
    assert set(profile_in(found).rates) < set(profile_in(more).rates)


def test_a_profile_of_another_machine_is_not_added_to(lanes: HostLanes, found: Findings) -> None:
    there = profile_in(found)
    elsewhere = replace(there, machine={**there.machine, "cpu": "another"})
    with pytest.raises(RefusedError, match=r"profile 'tiny'.*cpu 'another' and not"):
        profile(lanes, [SHAPE], POINTS, [], name="tiny", into=replace(found.hardware, profile=elsewhere))


def test_weights_without_kernels_are_refused(lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match="weights of 16 or 32 bits"):
        Lab(lanes, replace(SHAPE, weight_bits=4.84375), POINTS)


def test_no_expert_is_used_twice_in_a_row(lanes: HostLanes) -> None:
    lab = Lab(lanes, SHAPE, POINTS)
    used = [(layer, expert) for layer, experts in (lab.next_experts(2) for _ in range(20)) for expert in experts]
    assert all(one != after for one, after in pairwise(used))
    assert len(set(used)) == min(40, lab.layers * lab.experts)


def test_a_line_through_decisions() -> None:
    assert fitted_cost([(6, 1600.0), (30, 4000.0)]) == PlanCost(1000, 100)
    assert fitted_cost([(6, 500.0), (30, 500.0)]) == PlanCost(500, 0)
    assert fitted_cost([(0.0, 0.0)]) == PlanCost(0.0, 0.0)  # it forecasts nothing


def test_thread_counts_are_tried_up_to_the_most() -> None:
    assert counts_up_to(1) == [1]
    assert counts_up_to(10) == [1, 2, 3, 4, 6, 8, 10]


def test_every_thread_count_has_its_times() -> None:
    times = thread_times(SHAPE, [1, 2], None, [None])
    assert set(times) == {(count, tokens) for count in (1, 2) for tokens in (1, 8, 64)}
    assert min(times.values()) > 0


def test_sizes_are_those_that_the_settings_play() -> None:
    points = points_of([tiny_setting(0.3, 1), tiny_setting(0.3, 2)])
    assert points.batches == (1, 2)
    assert points.prompts == (5,)
    assert points.contexts == (6, 9)  # four tokens behind a prompt of five


@pytest.mark.parametrize(("phase", "prompts", "contexts"), [("decode", (1,), (6, 9)), ("prefill", (5,), (1,))], ids=str)
def test_where_a_phase_is_not_played_one_token_stands_for_it(
    phase: str, prompts: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    whole = tiny_setting()
    part = replace(whole, steps=tuple(step for step in whole.steps if step.phase == phase))
    points = points_of([part])
    assert (points.prompts, points.contexts) == (prompts, contexts)
    assert max(points.tokens) >= 1
