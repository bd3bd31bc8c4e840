"""Policies that change the routing, or defer experts: what they keep of the model, and reports of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from policies.parts.routers import combine_weights, routing_of_tokens
from policies.protocols import Needs
from policies.registry import SYSTEMS
from realrun.execution.routed_tokens import own_routing, scale_of, scaled_by, weighed_like
from realrun.generation.generate import generate_hosted
from realrun.machine.host_lanes import HostLanes
from realrun.smoke.generation_checks import output_of_executor, output_of_library
from tests.kit.depth import thinned
from tests.kit.generating import (
    MINI_VECTORS,
    PROMPTS,
    assert_says_the_same,
    every_slot,
    expected,
    hosted,
    library,
    request,
)
from traces.capture.layers import find_moe_layers

CHANGING = [name for name, entry in SYSTEMS.items() if entry.needs.changes_routing and entry.needs.narrow_share is None]
LEARNT = {"calibration": "mini-moe-calibration", "vectors": MINI_VECTORS}


@thinned(2)
@pytest.mark.parametrize("policy", CHANGING)
def test_it_generates_and_says_how_far_it_strays(policy: str, inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe")
    asked = request(policy, every_slot(model) // 4, **LEARNT)  # type: ignore[arg-type]
    assert torch.isfinite(output_of_executor(model, asked, inline_lanes).logits).all()
    run = generate_hosted(model, asked, inline_lanes).run
    assert "changes routing" in run.labels
    assert run.routing_errors is not None
    assert list(run.routing_errors.phase.unique()) == ["prefill", "decode"]
    assert 0 < run.to_dict()["approximated_weight_share"] < 1


@pytest.mark.parametrize(("policy", "parameters", "share"), [
    ("smoe", {"alpha": 0.0}, 0.25),
    ("smoe", {}, 1.0),
    ("best-approx", {}, 1.0),
    ("adapmoe", {"drop_below": 0.0}, 0.25),
])
def test_it_says_the_same_where_it_keeps_the_routing(
    policy: str, parameters: dict[str, object], share: float, inline_lanes: HostLanes
) -> None:
    model = hosted("mini-moe")
    asked = request(policy, round(share * every_slot(model)), parameters=parameters, **LEARNT)  # type: ignore[arg-type]
    assert_says_the_same(model, asked, inline_lanes, expected("mini-moe"))


def test_dropped_experts_leave_fewer_choices_a_token(inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe")
    asked = request("adapmoe", 32, parameters={"drop_below": 0.45}, **LEARNT)  # type: ignore[arg-type]
    shares = generate_hosted(model, asked, inline_lanes).run.to_dict()
    assert shares["dropped_weight_share"] > 0.1
    assert shares["substituted_weight_share"] == 0


# --- weights ----------------------------------------------------------------------------------------------------------

SCORES = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.3, 0.2]], dtype=torch.float16)
IDS = torch.tensor([[3, 1], [2, 0]])
SEEN = Needs(scores=True, tokens=True)


def of_model(factor: float, norm_topk: bool) -> torch.Tensor:
    """Weights of a router that multiplies its scores, or its shares, by a factor."""
    chosen = SCORES.float().gather(1, IDS)
    return factor * (chosen / chosen.sum(1, keepdim=True) if norm_topk else chosen)


@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_a_substitute_gets_the_weight_that_the_model_would_give_it(factor: float, norm_topk: bool) -> None:
    own = own_routing(IDS, of_model(factor, norm_topk), SCORES, SEEN)
    scores = SCORES.tolist()
    made_up = [[1, 2], [2, 0]]  # 2 runs instead of 3 for the first token; the second keeps its experts
    shares = [combine_weights(row, ids, norm_topk) for row, ids in zip(scores, made_up, strict=True)]
    first, second = weighed_like(own, norm_topk)(routing_of_tokens(made_up, shares)).token_weights
    chosen = [scores[0][1], scores[0][2]]
    wanted = [factor * score / (sum(chosen) if norm_topk else 1) for score in chosen]
    assert first == pytest.approx(wanted, rel=1e-3)
    assert second == of_model(factor, norm_topk)[1].tolist()  # bit by bit


def test_weights_made_from_the_routers_weights_have_the_models_scale_already() -> None:
    own = own_routing(IDS, of_model(2.5, True), None, Needs(tokens=True))
    dropped = routing_of_tokens([[1], [2, 0]], [[2.5], [1.3, 1.2]])
    assert weighed_like(own, True)(dropped).token_weights[0] == [2.5]


def test_committed_routing_has_the_scale_that_its_layer_was_seen_to_have() -> None:
    assert hosted("deepseek_v3", (("num_experts_per_tok", 4),)).facts.scales == pytest.approx([2.5] * 3)
    committed = routing_of_tokens([[1, 2]], [[0.75, 0.25]])
    assert scaled_by(2.5)(committed).token_weights == [[1.875, 0.625]]
    assert scale_of([1.0, 0.5], [0.4, 0.2, 0.4], [0, 1], norm_topk=False) == pytest.approx(2.5)


MODEL = "mini-moe"  # 8 layers of 16 experts, top 2
GENERATED = 4


def ffn(experts: Any, expert: int, x: Tensor) -> Tensor:
    """One expert [H] -> [H]."""
    gate, up = functional.linear(x, experts.gate_up_proj[expert]).chunk(2)
    return functional.linear(functional.silu(gate) * up, experts.down_proj[expert])


class DeferringLoop:
    """The routed experts of every layer, token by token. In decode, experts from ``resident`` on that are not among the
    first ``immediate`` of any token are added to the next layer's output; the last layer has none."""

    def __init__(self, experts: Sequence[Any], resident: int, immediate: int) -> None:
        self.experts, self.resident, self.immediate = experts, resident, immediate
        self.late = torch.zeros(())

    def __call__(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        before, now, late = self.late, torch.zeros_like(hidden), torch.zeros_like(hidden)
        joins = self._deferred(layer, ids, weights)
        for token, x in enumerate(hidden):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                (late if expert in joins else now)[token] += weight * ffn(self.experts[layer], expert, x)
        self.late = late
        return now + before if layer else now

    def _deferred(self, layer: int, ids: Tensor, weights: Tensor) -> set[int]:
        if layer == len(self.experts) - 1 or len(ids) > len(PROMPTS):
            return set()
        ranked = ids.gather(1, weights.half().argsort(dim=1, descending=True, stable=True))
        first = set(ranked[:, : self.immediate].flatten().tolist())
        return {expert for expert in ids.flatten().tolist() if expert >= self.resident} - first


@pytest.mark.parametrize(("deferred", "resident"), [(1, 0), (1, 4), (2, 0), (0, 4)])
def test_deferred_experts_are_added_to_the_next_layers_output(
    deferred: int, resident: int, inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = hosted(MODEL), library(MODEL)
    parameters = {"deferred": deferred, "strategy": "uniform"}
    slots = resident * model.shape.moe_layers
    said = output_of_executor(
        model, request("kt-deferral", slots, parameters=parameters, generated=GENERATED), inline_lanes
    )
    exact = expected(MODEL, generated=GENERATED).logits
    layers = [layer.experts for layer in find_moe_layers(plain)]
    loop = DeferringLoop(layers, resident, model.shape.top_k - deferred)
    for number, experts in enumerate(layers):
        monkeypatch.setattr(experts, "forward", partial(loop, number))
    wanted = output_of_library(plain, torch.tensor(PROMPTS), GENERATED)
    assert said.tokens.tolist() == wanted.tokens.tolist()
    torch.testing.assert_close(said.logits, wanted.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(said.logits[0], exact[0], rtol=0, atol=1e-5)  # the prompt's
    assert bool((said.logits[1] - exact[1]).abs().max() > 1e-3) == bool(deferred)
