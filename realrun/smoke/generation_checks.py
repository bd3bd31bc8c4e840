"""Checks of the results under each policy: a bundled model against the unmodified one on the CPU, in float32."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from policies.registry import SYSTEMS
from realrun.errors import RefusedError
from realrun.generation.generate import GenerateRequest, generate_hosted
from realrun.generation.hosted_model import HostedModel, load_model, look_at
from realrun.machine.lanes import Machine
from realrun.smoke import Check, SkippedError, checked, expect
from sim.runs.scenario import Scenario
from traces.capture.load import load
from traces.capture.passes import Batch, Pick, Sampler
from traces.capture.passes import generate as library_passes
from traces.file import FOLDER

GREEDY = Sampler(0, 0.0)


class ModelOutput(NamedTuple):
    """The output of a model: ``tokens`` [B, steps], chosen from ``logits`` [steps, B, V]."""

    tokens: Tensor
    logits: Tensor


def output_of_library(model: Any, prompts: Tensor, generated_tokens: int, implementation: str = "eager") -> ModelOutput:
    """The library's own greedy run over ``prompts`` [B, P], with one of its experts implementations."""
    model.set_experts_implementation(implementation)
    pick, batch = _Listener(GREEDY), Batch(tuple(range(len(prompts))), prompts)
    with torch.inference_mode():
        deque(library_passes(model, batch, generated_tokens, pick), maxlen=0)
    return pick.output()


def output_of_executor(
    model: HostedModel, request: GenerateRequest, machine: Machine, pick: Pick = GREEDY
) -> ModelOutput:
    """Our own run, with tokens chosen by ``pick``."""
    listener = _Listener(pick)
    generate_hosted(model, request, machine, listener)
    return listener.output()


class _Listener:
    """Records the logits and choices of a ``pick``."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick
        self._said: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Tensor, sequences: Sequence[int], step: int) -> Tensor:
        kept, chosen = logits.detach().cpu().clone(), self._pick(logits, sequences, step)
        self._said.append((chosen.cpu(), kept))
        return chosen

    def output(self) -> ModelOutput:
        tokens, logits = zip(*self._said, strict=True)
        return ModelOutput(torch.cat(tokens, 1), torch.stack(logits))


MODEL, VECTORS, CALIBRATION = FOLDER / "mini-moe", FOLDER / "mini-moe-vectors.safetensors", "mini-moe-calibration"
PROMPTS = ((5, 17, 33, 60, 9, 41, 77, 12), (3, 8, 21, 90, 55, 14, 2, 30))
GENERATED = 1  # a prefill and one decode step
CACHED_SHARE = 0.25  # enough for hits, misses, copies and CPU experts
ON_TWO = ("on-demand", "fiddler", "hybrimoe")  # layers divided between two GPUs, if there are two
TOLERANCE = 1e-5  # relative to the largest logit, or to 1 if all are smaller: law 11


def generation_checks(machine: Machine, policies: Sequence[str] = tuple(SYSTEMS)) -> Iterator[Check]:
    """Yield a check for every policy that can generate, when it is done. ``machine``: as for ``generate``."""
    made: list[tuple[HostedModel, ModelOutput]] = []
    yield checked("mini-moe: loaded, and run by the library on the CPU", lambda: _make(machine, made))
    if not made:
        return
    [(model, truth)] = made
    for policy in policies:
        needs = SYSTEMS[policy].needs
        if needs.live:
            check = _runs if needs.changes_routing else _is_exact
            yield checked(f"mini-moe under {policy}", partial(check, policy, model, machine, truth))
    for policy in (name for name in policies if name in ON_TWO):
        yield checked(f"mini-moe on two GPUs under {policy}", partial(_is_exact_on_two, policy, model, machine, truth))


def _make(machine: Machine, into: list[tuple[HostedModel, ModelOutput]]) -> str:
    allocate = lambda size: machine.host_tensor((size,), torch.uint8)  # noqa: E731
    model = look_at(*load_model(MODEL, "float32", machine.device, allocate))
    unmodified = load(MODEL, "float32").model._apply(torch.clone)  # weights mapped from the file are not aligned
    truth = output_of_library(unmodified, torch.tensor(PROMPTS), GENERATED)
    into.append((model, truth))
    return f"{model.shape.moe_layers} layers of {model.shape.experts} experts, {model.store.size_bytes / 1e6:.1f} MB"


def _is_exact_on_two(policy: str, model: HostedModel, machine: Machine, truth: ModelOutput) -> str:
    try:
        machine.card(1)
    except RefusedError as error:
        raise SkippedError(str(error)) from error
    return _is_exact(policy, model, machine, truth, gpus=2)


def _is_exact(policy: str, model: HostedModel, machine: Machine, truth: ModelOutput, gpus: int = 1) -> str:
    ours = _output(policy, model, machine, gpus)
    difference, limit = _difference(ours, truth), TOLERANCE * max(1.0, float(truth.logits.abs().max()))
    tokens, expected = ours.tokens.tolist(), truth.tokens.tolist()
    expect(tokens == expected, f"expected the tokens {expected}, got {tokens}; logits differ by {difference:.1e}")
    expect(difference <= limit, f"expected logits within {limit:.1e}, they differ by {difference:.1e}")
    return f"same tokens, logits within {difference:.1e}"


def _runs(policy: str, model: HostedModel, machine: Machine, truth: ModelOutput) -> str:
    """Check a policy that changes the routing, for which there is no expected result."""
    ours = _output(policy, model, machine)
    expect(bool(ours.logits.isfinite().all()), "expected finite logits")
    return f"runs; changes the routing, and logits by up to {_difference(ours, truth):.1g}"


def _output(policy: str, model: HostedModel, machine: Machine, gpus: int = 1) -> ModelOutput:
    request = GenerateRequest(
        model=MODEL, prompts=PROMPTS, generated_tokens=GENERATED, vectors=VECTORS,
        scenario=Scenario(policy=policy, calibration=CALIBRATION, cached_share=CACHED_SHARE, gpus=gpus),
    )
    with _float32_alone():
        return output_of_executor(model, request, machine)


def _difference(ours: ModelOutput, truth: ModelOutput) -> float:
    return float((ours.logits.double() - truth.logits.double()).abs().max())


@contextmanager
def _float32_alone() -> Iterator[None]:
    """Compute in the block without TF32 in products, and attention by plain arithmetic."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
