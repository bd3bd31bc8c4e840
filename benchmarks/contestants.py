"""Who generates in ``beside_accelerate``: accelerate and ours, each timed by the same clock on the same lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accelerate_offload import Split, load, send_over_link, split
from benchmarks.offload_model import Learnt, Tokens
from realrun.generation.generate import GenerateRequest, generate_hosted
from realrun.generation.hosted_model import HostedModel
from realrun.machine.host_lanes import HostLanes
from realrun.machine.lanes import Machine
from sim.runs.scenario import Scenario
from traces.capture.passes import Batch
from traces.capture.passes import generate as library_passes


@dataclass(frozen=True)
class Turn:
    """One generation: tokens, times of its decode steps, and what it had on the GPU and moved there."""

    tokens: Tokens
    steps_ms: tuple[float, ...]
    experts_here: int  # that the GPU's memory held from one use to the next
    hit_rate: float | None  # of the experts routed to in decode steps, those that were there
    link_bytes: float | None  # a token


@dataclass
class Contestant:
    """Somebody who generates; ``turns`` are those that count."""

    who: str
    generate: Callable[[], Turn]
    turns: list[Turn] = field(default_factory=list)

    @property
    def steps_ms(self) -> list[float]:
        """The decode steps of all turns."""
        return [ms for turn in self.turns for ms in turn.steps_ms]


class Clock:
    """Takes the likeliest token, and notes when the host knows it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._known_ns: list[int] = []

    def __call__(self, logits: Tensor, _sequences: Sequence[int], _step: int) -> Tensor:
        """The next token [1, 1] for logits [1, V]."""
        chosen = logits.argmax(-1, keepdim=True)
        self.tokens.append(int(chosen))
        self._known_ns.append(time.perf_counter_ns())
        return chosen

    @property
    def steps_ms(self) -> tuple[float, ...]:
        """From each token to the next; the first one is the prompt's."""
        return tuple((end - begin) / 1e6 for begin, end in zip(self._known_ns, self._known_ns[1:], strict=False))


def with_accelerate(
    folder: Path, scratch: Path, limit_bytes: int, prompt: Tokens, generated: int, lanes: Machine
) -> list[Contestant]:
    """Accelerate's offload, the one that all are compared with; without a GPU also as it is there, without any link."""
    if not isinstance(lanes, HostLanes):
        there = split(folder, limit_bytes, 0, "cpu")
        model = load(folder, there.places, scratch)
        return [Contestant("accelerate", partial(by_library, model, there, prompt, generated, lanes))]
    there = split(folder, limit_bytes, "cpu", "disk")
    linked, plain = (load(folder, there.places, scratch / name) for name in ("linked", "plain"))
    send_over_link(linked, lanes)
    return [
        Contestant("accelerate", partial(by_library, linked, there, prompt, generated, lanes)),
        Contestant(
            "accelerate to disk, no link",
            partial(by_library, plain, there, prompt, generated, lanes, linked=False),
        ),
    ]


def by_library(
    model: Any, there: Split, prompt: Tokens, generated: int, lanes: Machine, *, linked: bool = True
) -> Turn:
    """The library's own passes over a model that accelerate has put its hooks on."""
    clock = Clock()
    with torch.inference_mode(), lanes.hosting():
        for _ in library_passes(model, Batch((0,), torch.tensor([prompt])), generated, clock):  # type: ignore[arg-type]
            pass
    experts = there.layers_here * model.config.num_experts
    share = there.layers_here / there.layers
    return Turn(tuple(clock.tokens), clock.steps_ms, experts, share, there.moved_bytes if linked else None)


def with_ours(
    policies: Sequence[str], model: HostedModel, prompt: Tokens, generated: int, lanes: Machine, base: Scenario,
    learnt: Learnt,
) -> list[Contestant]:
    """Ours, once for every policy; ``base``: the memory, and what planners believe in."""
    scenarios = [base.with_(policy=policy, calibration=str(learnt.trace)) for policy in policies]
    return [
        Contestant(f"ours, {each.policy}", partial(by_ours, model, prompt, generated, lanes, each, learnt.vectors))
        for each in scenarios
    ]


def by_ours(
    model: HostedModel, prompt: Tokens, generated: int, lanes: Machine, scenario: Scenario, vectors: Path
) -> Turn:
    """Ours, under the policy of ``scenario``."""
    clock = Clock()
    asked = GenerateRequest(
        model="in memory", prompts=[prompt], scenario=scenario, generated_tokens=generated, vectors=vectors
    )
    run = generate_hosted(model, asked, lanes, clock).run
    return Turn(
        tuple(clock.tokens), clock.steps_ms, run.memory["cache_slots"], run.metrics.decode_resident_hit_rate,
        run.metrics.pcie_bytes_per_token,
    )
