"""Laws of a model that runs under a simulated policy: what keeps the routing changes nothing, and what changes it does
what the executor does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from policies.registry import SYSTEMS
from realrun.generation.generate import GenerateRequest
from realrun.machine.host_lanes import HostLanes
from realrun.quality import played_model
from realrun.quality.differences import differences
from realrun.quality.layer_sum import LayerSums, narrowed
from realrun.quality.played_model import GivenText, Said, said_exactly
from realrun.quality.turns import Turns
from realrun.smoke.generation_checks import output_of_executor
from sim.runs.scenario import Scenario
from tests.kit.depth import thinned
from tests.kit.generating import MINI_VECTORS, following, hosted
from trilane.study.quality.fronts import changing
from trilane.study.quality.measure import QualitySetting, Row, measure

TEXTS = (
    GivenText((5, 17, 33, 60, 9, 41, 77, 12, 301, 7, 1200, 44), 6),
    GivenText((3, 8, 21, 90, 55, 14, 2, 30, 9, 9, 8, 7), 6),
)
ROUNDING_NATS = 1e-9
KEEPING = [n for n, s in SYSTEMS.items() if s.needs.live and not s.needs.changes_routing]


def setting(cached_share: float = 0.5) -> QualitySetting:
    """Mini-moe with the sizes of a large model, on an RTX 3090 with some of its experts."""
    scenario = Scenario(cached_share=cached_share, calibration="mini-moe-calibration")
    return QualitySetting(hosted("mini-moe"), TEXTS, scenario, "qwen3-30b-a3b", str(MINI_VECTORS))


def kl(rows: list[Row]) -> float:
    return float(np.mean([row["kl"] for row in rows]))


# --- the law: what does not change the routing costs nothing ----------------------------------------------------------


@thinned(4)
@pytest.mark.parametrize("policy", KEEPING)
def test_a_policy_that_keeps_the_routing_has_no_divergence(policy: str) -> None:
    assert max(max(row["kl"]) for row in measure(setting(), [policy])) <= ROUNDING_NATS


@pytest.mark.parametrize(
    ("choice", "cached_share"),
    [("smoe", 1.0), ("cache-prior{bonus: 0}", 0.5), ("adapmoe{drop_below: 0.0}", 0.5), ("best-approx", 1.0)],
)
def test_a_run_whose_routing_was_not_changed_has_no_divergence(choice: str, cached_share: float) -> None:
    rows = measure(setting(cached_share), [choice])
    assert all(row[name] == 0 for row in rows for name in row if name.endswith("_weight_share"))
    assert kl(rows) <= ROUNDING_NATS


@thinned(2)
@pytest.mark.parametrize("policy", changing())
def test_a_run_with_moved_weight_diverges(policy: str) -> None:
    rows = measure(setting(), [policy])
    moved = sum(row[name] for row in rows for name in row if name.endswith("_weight_share"))
    assert (kl(rows) > ROUNDING_NATS) == (moved > 0)


# --- broken twins, which the law must catch ---------------------------------------------------------------------------


def forgets_an_expert(sums: LayerSums, layer: int, experts: list[int], *rest: object) -> torch.Tensor:
    return plain_sum(sums, layer, list(experts)[:-1], *rest)  # type: ignore[arg-type]


def adds_twice(sums: LayerSums, *rest: object) -> torch.Tensor:
    return 2 * plain_sum(sums, *rest)  # type: ignore[arg-type]


plain_sum = LayerSums._sum


@pytest.mark.parametrize("broken", [forgets_an_expert, adds_twice])
def test_broken_twin_of_the_sum_is_caught(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerSums, "_sum", broken)
    assert kl(measure(setting(), ["on-demand"])) > 1e-3


def test_broken_twin_that_reads_another_text_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(TEXTS[0], tokens=TEXTS[0].tokens[::-1])
    monkeypatch.setattr(played_model.PlayedModel, "on", lambda self, _text: played_model.PlayedText(self, other))
    assert kl(measure(setting(), ["on-demand"])) > 1e-3


# --- the same as on real lanes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["router-pf", "quasi-pf", "est-pf", "cache-prior"])
def test_policies_without_influence_of_time_say_what_they_say_in_the_executor(
    policy: str, inline_lanes: HostLanes
) -> None:
    text, model = TEXTS[0], hosted("mini-moe")
    given = torch.tensor([[*text.tokens[text.prompt_tokens :], 0]])
    scenario = Scenario(policy=policy, cached_share=0.5, calibration="mini-moe-calibration", hardware="rtx3090-ddr4")
    request = GenerateRequest(
        "mini-moe", [text.tokens[: text.prompt_tokens]], scenario, generated_tokens=text.given_tokens,
        vectors=MINI_VECTORS,
    )
    executed = output_of_executor(model, request, inline_lanes, following(given)).logits[:, 0]
    exact = said_exactly(model, text)
    found = differences(exact, Said(executed, exact.ids), text)
    [row, _] = measure(setting(), [policy])
    np.testing.assert_allclose(row["kl"], found.kl, atol=1e-6)


# --- narrow copies ----------------------------------------------------------------------------------------------------


def test_narrow_copies_of_more_bits_are_nearer() -> None:
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    errors = [float((narrowed(weights, bits) - weights).norm()) for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 * float(weights.norm())


def test_hobbit_with_more_bits_diverges_less() -> None:
    half, quarter, eighth = (
        kl(measure(setting(), [f"hobbit{{narrow_above: 0, skip_above: 1, narrow_share: {share}}}"]))
        for share in (0.5, 0.25, 0.125)
    )
    assert half < quarter < eighth


# --- turns ------------------------------------------------------------------------------------------------------------


def test_an_error_of_the_work_is_raised_where_it_is_resumed() -> None:
    def work() -> None:
        turns.pause()
        raise ValueError("no such layer")

    turns: Turns[int] = Turns(work)
    turns.resume()
    with pytest.raises(ValueError, match="no such layer"):
        turns.resume(1)
    turns.close()


def test_closing_ends_the_work_where_it_is() -> None:
    heard: list[int | None] = []

    def work() -> None:
        while True:
            heard.append(turns.pause())

    turns: Turns[int] = Turns(work)
    turns.resume()
    turns.resume(3)
    turns.close()
    assert heard == [3]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
