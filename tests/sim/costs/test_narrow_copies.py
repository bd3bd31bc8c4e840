"""Copies of experts in fewer bits: their sizes, and the times of their copies and products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.mechanism.views import ExpertCosts, NarrowCopies
from sim.costs.engine_costs import with_narrow_copies
from sim.costs.roofline_costs import roofline
from sim.machine.hardware import load_hardware
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.toys import uniform_costs
from traces.models.catalogue import load_model

WIDE = ExpertCosts((0, 100, 100, 130, 300), (0, 10, 20, 30, 40), 5, 1010, 4000, 400, 900, 800, 7, 8)


def narrow(latency_ns: int = 0, back_latency_ns: int = 0, bytes_per_ns: float | None = None) -> ExpertCosts:
    layers = with_narrow_copies(
        replace(uniform_costs(2), experts=(WIDE, WIDE)), 64, 0.25, latency_ns=latency_ns,
        back_latency_ns=back_latency_ns, bytes_per_ns=bytes_per_ns,
    ).experts
    [copies] = {costs.narrow for costs in layers}
    assert isinstance(copies, NarrowCopies)
    assert copies.first == 64
    assert [costs._replace(narrow=None) for costs in layers] == [WIDE, WIDE]
    return copies.costs


def test_a_quarter_of_the_bytes_takes_a_quarter_of_the_links_time() -> None:
    assert narrow() == WIDE._replace(copy_ns=252, writeback_ns=100, expert_bytes=1000)


def test_the_links_latency_stays() -> None:
    assert narrow(latency_ns=10).copy_ns == 10 + 250
    assert narrow(latency_ns=5000).copy_ns == 1010
    assert (narrow(back_latency_ns=40).copy_ns, narrow(back_latency_ns=40).writeback_ns) == (252, 40 + 90)
    assert narrow(back_latency_ns=5000).writeback_ns == 400


def test_the_gpu_saves_reading_where_it_is_bound_by_that() -> None:
    """3000 bytes less at 50 a ns are 60 ns: all of them for one or two tokens, 30 of them for three, none for four."""
    assert narrow(bytes_per_ns=50).gpu_ns == (0, 40, 40, 100, 300)
    assert narrow(bytes_per_ns=1).gpu_ns[1] == 1  # reading alone cannot take longer than all of it


def test_an_expert_is_known_by_its_number() -> None:
    costs = WIDE._replace(narrow=NarrowCopies(8, narrow()))
    assert (costs.of(7), costs.of(8)) == (costs, narrow())
    assert WIDE.of(8) == WIDE


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "mixtral-8x7b"])
def test_on_a_roofline_one_token_costs_what_an_expert_of_so_few_bytes_costs(model: str) -> None:
    shape, hardware = load_model(model), load_hardware("rtx3090-ddr4")
    machine = {"latency_ns": hardware.link.h2d_latency_ns, "bytes_per_ns": hardware.gpu.read_bytes_per_s / 1e9}
    wide = roofline(shape, hardware, 4)
    copies = with_narrow_copies(wide, shape.experts, 0.25, **machine).experts[0].narrow  # type: ignore[arg-type]
    assert copies is not None
    size = wide.experts[0].expert_bytes // 4
    assert copies.costs.expert_bytes == size
    link = hardware.link
    assert copies.costs.copy_ns == pytest.approx(link.h2d_latency_ns + size / link.expert_bytes_per_s * 1e9, abs=2)
    saved_ns = 3 * size / hardware.gpu.read_bytes_per_s * 1e9
    assert wide.experts[0].gpu_ns[1] - copies.costs.gpu_ns[1] == pytest.approx(saved_ns, abs=2)


def test_a_scenario_has_narrow_copies_where_its_policy_needs_them() -> None:
    prepared = prepare(Scenario(generated_tokens=2))
    assert prepared.played_costs is prepared.costs
    hobbit = prepared.with_policy("hobbit", {"narrow_share": 0.5})
    size, copies = hobbit.costs.experts[0].expert_bytes, hobbit.played_costs.experts[0].narrow
    assert copies is not None
    assert (copies.first, copies.costs.expert_bytes) == (hobbit.shape.experts, size // 2)
    assert [costs.narrow is not None for costs in hobbit.session().costs] == [True] * hobbit.shape.moe_layers


def test_copies_on_the_link_have_the_size_of_their_width() -> None:
    run = simulate(Scenario(policy="hobbit", generated_tokens=3, prompt_tokens=8, cached_share=0.2))
    copies = run.spans[run.spans.kind.isin(["demand", "prefetch"])]
    narrow, size = copies.expert >= 64, copies.bytes.max()
    assert set(copies.bytes[narrow]) == {size // 4}
    assert set(copies.bytes[~narrow]) == {size}
    share = run.to_dict()["narrowed_weight_share"]
    assert share is not None
    assert 0 < share < 0.4
