"""Laws of links: a map for every one of them, and a baseline that gains no more from a link than the link does."""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest

from sim.machine.dials import turned
from sim.machine.hardware import load_hardware
from sim.runs.prepare import Prepared
from sim.simulate import simulate
from tests.kit.questions import small_question
from trilane.engines.question import Question
from trilane.study.pays.gain_map import gain_map
from trilane.study.pays.ideas import IDEAS, Candidate, PaysQuestion, prepared_with_idea
from trilane.study.sweep.axes import vary

LINKS = [f"{generation}x{lanes}" for generation in (3, 4, 5) for lanes in (1, 2, 4, 8, 16)]
OF_LINKS = [name for name, idea in IDEAS.items() if idea.varies_link]


@pytest.mark.parametrize(("idea", "link"), list(product(OF_LINKS, LINKS)))
def test_every_row_of_every_link_is_a_machine_that_may_be(idea: str, link: str) -> None:
    name = f"rtx-5090+ddr5-5600+pcie-{link}"
    hardware, asked = load_hardware(name), IDEAS[idea]
    prepared: Any = SimpleNamespace(hardware=hardware)
    own = asked.y.own(prepared)
    _, ys = asked.values(prepared, (0.5, own))
    assert own in ys
    assert len(ys) >= 3
    for y in ys:
        for _, played in (asked.place_without(0.5, y), asked.place_using(0.5, y)):
            load_hardware(name, turned(hardware, "pcie_gbps", played))


@pytest.mark.parametrize("link", ["3x1", "3x4", "3x8", "3x16"])
def test_a_cache_has_a_map_on_slow_links_too(link: str) -> None:
    found = gain_map(small_question("cache", pcie=link))
    assert all(cell.gains for row in found.rows for cell in row)
    assert found.links[found.here[1]] == f"3.0 {link[1:]}"


# --- the baseline of prefetching --------------------------------------------------------------------------------------

PREFETCH = PaysQuestion(
    "prefetch", Question("qwen3-30b-a3b", "rtx-4060-laptop", "ddr5-5600", "ryzen-9-7945hx"), draws=1
)
GB_PER_S = (8.8, 11.0, 11.9, 12.1, 12.2, 12.5, 13.2, 15.0, 18.0, 24.0, 25.2)  # its own: 12.5
ROUNDING = 0.03  # choices are whole experts


def fastest(prepared: Prepared, candidates: tuple[Candidate, ...], gb_per_s: float) -> float:
    """Tokens a second of the fastest candidate with this link."""
    scenario = vary(prepared.scenario, "pcie_gbps", gb_per_s)
    runs = [simulate(vary(scenario, "policy", candidate.policy)) for candidate in candidates]
    return max(run.metrics.throughput_tokens_per_s or 0.0 for run in runs)


def gains_within_those_of_the_link(speeds: dict[float, float]) -> bool:
    """True if a faster link is no loss, and makes nothing faster by more than it is faster itself."""
    return all(
        1 - ROUNDING <= speeds[faster] / speeds[slower] <= faster / slower * (1 + ROUNDING)
        for slower, faster in pairwise(speeds)
    )


def test_the_baseline_of_prefetching_gains_no_more_from_a_link_than_the_link_does() -> None:
    prepared = prepared_with_idea(PREFETCH)
    assert gains_within_those_of_the_link({y: fastest(prepared, PREFETCH.without, y) for y in GB_PER_S})


@pytest.mark.parametrize(("weight", "links"), [(1.0, GB_PER_S[-2:]), (0.5, (12.1, 12.2))])
def test_one_weight_of_loads_breaks_that_law(weight: float, links: tuple[float, float]) -> None:
    """A link a little faster makes all loads begin at once, and prefetching seems to pay below that."""
    prepared = prepared_with_idea(PREFETCH)
    [alone] = [one for one in PREFETCH.without if dict(one.policy)["mix"]["copy_weight"] == weight]
    assert not gains_within_those_of_the_link({y: fastest(prepared, (alone,), y) for y in links})


def test_the_baseline_of_prefetching_is_never_slower_than_loading_nothing() -> None:
    prepared = prepared_with_idea(PREFETCH)
    [alone] = [one for one in PREFETCH.without if dict(one.policy)["mix"]["copy_weight"] == 1]  # loads from 25 GB/s on
    nothing = fastest(prepared, (alone,), GB_PER_S[0])
    assert all(fastest(prepared, PREFETCH.without, y) >= nothing for y in GB_PER_S)
