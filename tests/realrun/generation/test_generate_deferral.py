"""Expert deferral in a model that generates: logits are those of a plain loop over tokens and experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from realrun.machine.host_lanes import HostLanes
from realrun.smoke.generation_checks import output_of_executor, output_of_library
from tests.kit.generating import PROMPTS, expected, hosted, library, request
from traces.capture.layers import find_moe_layers

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
