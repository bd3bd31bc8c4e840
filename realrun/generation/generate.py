"""Generate with a model of the Hugging Face library whose routed experts are placed by a policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor

from realrun.execution.call_log import LoggedSession
from realrun.execution.executor import Executor
from realrun.generation.generated_trace import GeneratedTrace
from realrun.generation.hf_experts import routed_through
from realrun.generation.hosted_model import HostedModel, load_model, look_at
from realrun.generation.live_forecasts import LiveRecorder
from realrun.generation.live_layers import LiveLayers
from realrun.generation.preparation import (
    Generated,
    GenerateRequest,
    executor_for,
    forecasts_for,
    prepared_for,
    tokens_of,
)
from realrun.machine.lanes import Machine
from realrun.machine.machines import machine_for
from sim.runs.calibration import check_other_prompts
from sim.runs.prepare import Prepared
from sim.runs.run import Run
from traces.capture.passes import Batch, Pick, Sampler
from traces.capture.passes import generate as library_passes
from traces.file import write_trace


def generate(request: GenerateRequest, machine: Machine | None = None) -> Generated:
    """Load the model and generate. ``machine``: by default host lanes on which the calling thread plays the GPU.

    Raises RefusedError before the run if model, policy and machine do not fit together, what ``simulate`` raises for
    its scenario, and LaneError during the run; after it, ScenarioError if a prompt is one of the calibration's.
    """
    request.check()
    if machine is None:
        with closing(machine_for("host-lanes", inline=True)) as lanes:
            return generate(request, lanes)
    loaded, store = load_model(
        request.model, request.dtype, machine.device, lambda size: machine.host_tensor((size,), torch.uint8)
    )
    return generate_hosted(look_at(loaded, store), request, machine)


def generate_hosted(
    model: HostedModel, request: GenerateRequest, machine: Machine, pick: Pick | None = None
) -> Generated:
    """Generate with a loaded model, which can be used again. ``pick`` chooses tokens instead of the sampler."""
    request.check()
    prompts = tokens_of(request, model.loaded.tokenizer)
    prepared = prepared_for(request, model, prompts.shape[1])
    needs, layers = prepared.composition.needs, model.loaded.layers
    with ExitStack() as stack:
        recorder = LiveRecorder(layers)
        stack.enter_context(recorder)
        forecasts = forecasts_for(request, model, needs, recorder, stack)
        session = prepared.session_of(LoggedSession)
        executor = executor_for(prepared, session, model, machine, prompts.numel())
        live = LiveLayers(executor, recorder, forecasts, model.facts)
        kept = GeneratedTrace(model.facts.rule, needs, forecasts.count)
        stack.enter_context(routed_through(layers, live))
        with executor.running():
            picked = pick or Sampler(request.scenario.seed, request.temperature)
            outputs = _passes(model.loaded.model, prompts, request.generated_tokens, live, kept, picked)
    return _generated(request, model, prepared, session, executor, kept, outputs)


def _passes(
    model: Any, prompts: Tensor, new_tokens: int, layers: LiveLayers, kept: GeneratedTrace, pick: Pick
) -> list[Tensor]:
    """Run the prompts, then one token of each sequence at a time; the tokens chosen after every pass, [B, 1]."""
    sequences, outputs = tuple(range(len(prompts))), list[Tensor]()

    def picked(logits: Tensor, sequences: Sequence[int], step: int) -> Tensor:
        chosen = pick(logits, sequences, step)
        outputs.append(layers.end_pass(chosen))
        if step < new_tokens:
            layers.begin_step(step + 1, "decode", sequences, chosen)
        return chosen

    layers.begin_step(0, "prefill", sequences, prompts.to(model.device))
    for done in library_passes(model, Batch(sequences, prompts), new_tokens, picked):
        kept.add(done, layers.records(), layers.made)
    return outputs


def _generated(
    request: GenerateRequest, model: HostedModel, prepared: Prepared, session: LoggedSession, executor: Executor,
    kept: GeneratedTrace, outputs: list[Tensor],
) -> Generated:
    """The results; writes the trace if the request names a file."""
    trace = kept.trace(model.shape, _provenance(request, model))
    check_other_prompts(prepared.scenario, trace)
    if request.trace is not None:
        write_trace(trace, request.trace)
    traced = prepared.with_trace(trace)
    errors = session.routing_errors(traced.demand)
    run = Run.of(traced, executor.recorder.rows, errors, f"generated on {executor.machine.kind}")
    tokens = tuple(tuple(row) for row in torch.cat(outputs, 1).tolist())
    return Generated(tokens, run, session, trace, model.loaded.tokenizer)


def _provenance(request: GenerateRequest, model: HostedModel) -> dict[str, Any]:
    scenario = request.scenario
    return {
        "source": "generate",
        **model.loaded.describe(),
        "policy": scenario.policy,
        "seed": scenario.seed,
        "sampling": f"temperature {request.temperature}" if request.temperature else "greedy",
        "generated_tokens": request.generated_tokens,
        "scores": f"{model.facts.rule} of the router's output" + ("" if model.probe.certain else " (assumed)"),
    }
