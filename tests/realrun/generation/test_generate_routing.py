"""Policies that change the routing: what they keep of the model, and what is said of what they do not."""

from __future__ import annotations

import pytest
import torch

from policies.parts.routers import combine_weights, routing_of_tokens
from policies.protocols import Needs
from policies.registry import SYSTEMS
from realrun.generation.generate import generate_hosted
from realrun.generation.model_routing import own_routing, scale_of, scaled_by, weighed_like
from realrun.machine.host_lanes import HostLanes
from realrun.smoke.generation_checks import output_of_executor
from tests.kit.depth import thinned
from tests.kit.generating import MINI_VECTORS, assert_says_the_same, every_slot, expected, hosted, request

CHANGING = [
    name for name, entry in SYSTEMS.items() if entry.needs.changes_routing and entry.needs.narrow_share is None
]
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


@pytest.mark.parametrize(
    ("policy", "parameters", "share"),
    [
        ("smoe", {"alpha": 0.0}, 0.25),
        ("smoe", {}, 1.0),
        ("best-approx", {}, 1.0),
        ("adapmoe", {"drop_below": 0.0}, 0.25),
    ],
)
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
    """What a router gives that multiplies its scores, or its shares, by a factor."""
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
