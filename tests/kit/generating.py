"""Models to generate with, made once; what the unmodified ones say; and runs of ours beside them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from realrun.generation.generate import GenerateRequest
from realrun.generation.hosted_model import HostedModel, load_model, look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from realrun.smoke.generation_checks import ModelOutput, output_of_executor, output_of_library
from sim.runs.scenario import Scenario
from tests.kit.tiny_families import build
from traces.capture.load import load

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"
MINI = BUNDLED / "mini-moe"
MINI_VECTORS = BUNDLED / "mini-moe-vectors.safetensors"
PROMPTS = ((5, 17, 33, 60, 9, 41, 77, 12), (3, 8, 21, 90, 55, 14, 2, 30))
CPU = torch.device("cpu")

Changes: TypeAlias = tuple[tuple[str, Any], ...]  # to the settings of a tiny family


@lru_cache(maxsize=4)
def hosted(family: str, changes: Changes = (), dtype: torch.dtype = torch.float32) -> HostedModel:
    """A tiny model of a family, or "mini-moe", its experts in a store."""
    if family == "mini-moe":
        loaded, store = load_model(MINI, str(dtype).removeprefix("torch."), CPU, plain)
    else:
        tiny = build(family, **dict(changes))
        tiny.model.to(dtype)
        loaded, store = taken_apart(tiny, CPU, plain)
    gc.freeze()  # a run collects garbage before it begins: not again all that the libraries have made
    return look_at(loaded, store)


@lru_cache(maxsize=4)
def library(family: str, changes: Changes = (), dtype: torch.dtype = torch.float32) -> Any:
    """The model as the library has it. (Copied: what it maps from a file lies at odd addresses.)"""
    if family != "mini-moe":
        return build(family, **dict(changes)).model.to(dtype)
    loaded = load(MINI, str(dtype).removeprefix("torch."))
    return loaded.model._apply(torch.clone)


@lru_cache(maxsize=16)
def expected(
    family: str, changes: Changes = (), prompts: tuple[tuple[int, ...], ...] = PROMPTS, generated: int = 3
) -> ModelOutput:
    """Output of the unmodified model in float32."""
    return output_of_library(library(family, changes), torch.tensor(prompts), generated)


def request(
    policy: str, slots: int | None, *, parameters: Mapping[str, object] | None = None,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS, generated: int = 3, calibration: str | None = None, **more: Any,
) -> GenerateRequest:
    """A run of one policy with so many cache slots."""
    scenario = Scenario(policy=policy, parameters=dict(parameters or {}), calibration=calibration)
    return GenerateRequest(
        model="made already", prompts=prompts, scenario=scenario, generated_tokens=generated, cache_slots=slots, **more
    )


def assert_says_the_same(model: HostedModel, asked: GenerateRequest, lanes: HostLanes, as_this: ModelOutput) -> None:
    """Law 11: the same greedy tokens, logits within 1e-5."""
    said = output_of_executor(model, asked, lanes)
    assert said.tokens.tolist() == as_this.tokens.tolist()
    torch.testing.assert_close(said.logits, as_this.logits, rtol=0, atol=1e-5)


def every_slot(model: HostedModel) -> int:
    """So many slots that all experts fit."""
    return model.shape.moe_layers * model.shape.experts
