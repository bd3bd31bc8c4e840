"""Generate with a model of the Hugging Face library whose routed experts are placed by a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.protocols import Needs
from policies.registry import system
from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.cards import check_divided, rows_of, running
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import LayerSizes
from realrun.experts.expert_file import ExpertFile
from realrun.experts.file_of_run import file_for, held_experts
from realrun.experts.store import GpuSlots, check_one_width, slots_needed
from realrun.generation.divided_model import division_of, on_devices
from realrun.generation.generated_trace import GeneratedTrace, blank_trace
from realrun.generation.hosted_model import HostedModel, computed_in_place, load_model, look_at, routed_through
from realrun.generation.live_cards import LiveCards, live_layers
from realrun.generation.live_forecasts import LiveForecasts, LiveRecorder, PartialStates
from realrun.machine.lanes import Machine
from realrun.machine.machines import machine_for
from sim.runs.calibration import check_other_prompts
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.vocabulary import FROM_EXPERTS
from traces.capture import forecasts as capture_forecasts
from traces.capture.forecasts import check_vectors, checked_stream
from traces.capture.passes import Batch, HookedModel, Pick, Sampler
from traces.capture.passes import generate as library_passes
from traces.capture.router_forecast import GATE_INPUT, parse_forecasts
from traces.capture.settings import CaptureError, CaptureSettings
from traces.capture.vectors import Vectors, read_vectors
from traces.file import write_trace
from traces.layout import BY_TOKEN
from traces.trace import Trace


@dataclass(frozen=True)
class GenerateRequest:
    """The model, the prompts and the policy of a generation.

    ``prompts``: one batch; texts, cut after ``prompt_tokens``, or lists of tokens. All must have one length, since
    padding would change the choices of some routers. ``scenario``: its policy, parameters, hardware (with which
    policies plan), memory, calibration and seed are used; trace, model and lengths follow from the other fields. Every
    sequence gets 1 + ``generated_tokens`` tokens, the first from the prompt's pass; generation continues after an
    end-of-text token. ``cache_slots``: instead of a cached share. ``vectors``: the file for forecasts other than the
    gate's. ``trace``: the file to write the trace to. ``experts_folder``: on the disk, where the scenario's host holds
    a part of the experts.
    """

    model: str | Path
    prompts: Sequence[str] | Sequence[Sequence[int]]
    scenario: Scenario = field(default_factory=Scenario)
    prompt_tokens: int | None = None
    generated_tokens: int = 32
    cache_slots: int | None = None
    temperature: float = 0.0  # 0: the likeliest token
    dtype: str = "auto"
    vectors: str | Path | None = None
    trace: str | Path | None = None
    experts_folder: Path | None = None

    def check(self) -> None:
        """Raises RefusedError for requests that no model can fulfil."""
        scenario = self.scenario
        check_one_width(scenario.policy, system(scenario.policy).needs)
        if not system(scenario.policy).needs.live:
            later = "layers" if system(scenario.policy).needs.future else "tokens"
            raise RefusedError(
                f"policy {scenario.policy!r} needs the routing of later {later}, not known while a model runs: "
                "generate with another policy, and simulate this one on the resulting trace"
            )
        simulated = (
            "noisy_forecast_recall", "prefill_chunk_tokens", "sequences", "sampled_steps", "sampled_prompt_tokens"
        )
        for name in simulated:
            if getattr(scenario, name) is not None:
                raise RefusedError(f"generate: {name} is for simulations only; leave it out")
        if scenario.draft_tokens:
            raise RefusedError("generate: expected draft_tokens 0, no model drafts here; simulate or replay drafts")
        if self.generated_tokens < 0 or not self.prompts:
            raise RefusedError(
                f"generate: expected prompts and generated_tokens >= 0, got {len(self.prompts)} and "
                f"{self.generated_tokens}"
            )
        if self.cache_slots is not None and not (scenario.cached_share is None and scenario.gpu_memory_gb is None):
            raise RefusedError("generate: give one of cache_slots, cached_share and gpu_memory_gb")


@dataclass(frozen=True)
class Generated:
    """The results: ``tokens`` [B][1 + generated], the run, the session of each GPU with the log of its calls, and the
    trace."""

    tokens: tuple[tuple[int, ...], ...]
    run: Run
    sessions: tuple[LoggedSession, ...]
    trace: Trace
    tokenizer: Any

    @property
    def session(self) -> LoggedSession:
        """The session of the only GPU."""
        [session] = self.sessions
        return session

    @property
    def texts(self) -> list[str]:
        return [str(self.tokenizer.decode(tokens)) for tokens in self.tokens]


def tokens_of(request: GenerateRequest, tokenizer: Any) -> Tensor:
    """The prompts' tokens [B, P]. Raises RefusedError unless all have one length."""
    ids = [list(tokenizer(p)["input_ids"] if isinstance(p, str) else p) for p in request.prompts]
    ids = [tokens[: request.prompt_tokens] for tokens in ids]
    lengths = sorted(set(map(len, ids)))
    if len(lengths) > 1 or not lengths[0]:
        raise RefusedError(
            f"generate: expected prompts of one length, got {lengths} tokens; cut all to the shortest, "
            f"prompt_tokens={lengths[0]}, or generate for each length separately"
        )
    return torch.tensor(ids)


def scenario_of(request: GenerateRequest, model: HostedModel) -> Scenario:
    """The request as a scenario that can be simulated on the trace."""
    share = request.scenario.cached_share
    if request.cache_slots is not None:
        share = request.cache_slots / (model.shape.moe_layers * model.shape.experts)
    return request.scenario.with_(
        trace="generated" if request.trace is None else str(request.trace), model=None, batch=len(request.prompts),
        prompt_tokens=None, generated_tokens=request.generated_tokens or None, cached_share=share,
    )


def prepared_for(request: GenerateRequest, model: HostedModel, prompt_tokens: int) -> Prepared:
    """The prepared scenario, as for a simulation of the run. Raises what a simulation raises."""
    scenario, lengths = scenario_of(request, model), (prompt_tokens, request.generated_tokens)
    sequences = range(len(request.prompts))
    prepared = prepare(scenario, blank_trace(model.shape, sequences, *lengths, Needs()))
    check_divided(prepared)
    if prepared.gpus > 1 and prepared.needs.forecasts and request.trace is not None:
        raise RefusedError(
            f"policy {scenario.policy!r} on {prepared.gpus} GPUs: expected no trace to write, since no forecasts are "
            "made for layers of another GPU; leave it out (`--trace`), or generate on one GPU"
        )
    return prepared.with_trace(blank_trace(model.shape, sequences, *lengths, prepared.needs)).checked()


def kinds_from_vectors(needs: Needs) -> list[str]:
    """The kinds of a policy's forecasts that are made from vectors of a calibration."""
    return sorted({kind for kind, _ in needs.forecasts} - {*GATE_INPUT, *FROM_EXPERTS, BY_TOKEN})


def vectors_for(request: GenerateRequest, model: HostedModel, needs: Needs) -> Vectors | None:
    """The vectors for forecasts. Raises RefusedError if they are missing, or of another model."""
    kinds = kinds_from_vectors(needs)
    if not kinds:
        return None
    if request.vectors is None:
        raise RefusedError(
            f"policy {request.scenario.policy!r} needs forecasts of the kind {', '.join(kinds)}, which need vectors "
            "of a calibration: make a file of them with python -m tools.train_estimator (--tokens 0 unless it is for "
            "an estimator), or use a bundled one, and pass it: vectors=FILE, or --vectors FILE"
        )
    try:
        known = read_vectors(request.vectors)
        check_vectors(known, model.loaded)
    except CaptureError as error:
        raise RefusedError(str(error)) from error
    return known


def forecasts_for(
    request: GenerateRequest, model: HostedModel, needs: Needs, recorder: LiveRecorder, stack: ExitStack
) -> LiveForecasts:
    """The maker of the policy's forecasts, with hooks on the model until ``stack`` closes. Raises RefusedError."""
    known = vectors_for(request, model, needs)
    run, layers = HookedModel(model.loaded, CaptureSettings(temperature=0), recorder), model.loaded.layers
    try:
        keys = parse_forecasts([f"{kind}@{ahead}" for kind, ahead in needs.forecasts])
        early = tuple(key for key in keys if key.kind not in FROM_EXPERTS)
        partial = None
        with routed_through(layers, computed_in_place(layers, model.store)):
            forecaster, _ = capture_forecasts.prepare(run, model.probe, stack, early, None, known)
            if early != keys:
                stream = stack.enter_context(checked_stream(run, model.probe, "partial@1"))
                partial = stack.enter_context(PartialStates(stream))
    except CaptureError as error:
        raise RefusedError(f"policy {request.scenario.policy!r} cannot run on this model: {error}") from error
    return LiveForecasts(needs, forecaster, recorder, model.probe.records, partial, model.shape.top_k)


def sizes_of(model: HostedModel, step_tokens: int) -> LayerSizes:
    """The buffers for steps of up to ``step_tokens``."""
    hidden = model.loaded.layers[0].hidden
    return LayerSizes(step_tokens, model.shape.top_k, hidden, model.loaded.model.dtype, model.sum_dtype)


def executors_for(
    prepared: Prepared, sessions: Sequence[LoggedSession], model: HostedModel, machine: Machine, sizes: LayerSizes,
    file: ExpertFile | None,
) -> list[Executor]:
    """An executor for each GPU, with its slots, buffers and kernels. ``file``: of the experts, where the host holds a
    part of them."""
    policy, size_bytes, made = prepared.composition, model.store.layouts[0].size_bytes, []
    for number, (session, slots) in enumerate(zip(sessions, slots_needed(prepared), strict=True)):
        block, card = prepared.cards[number].block, machine.card(number)
        store = model.store.part(block) if file is None else held_experts(
            file, prepared, lambda size: machine.host_tensor((size,), torch.uint8)
        )
        arena = card.gpu_tensor((slots, size_bytes), torch.uint8)
        kernels = [layer.experts for layer in model.loaded.layers[block.first : block.end]]
        gpu_slots = GpuSlots(arena, policy.demand_slots, policy.prefetch_slots)
        made.append(Executor(session, card, store, gpu_slots, kernels, sizes))
    return made


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
    with ExitStack() as stack:
        recorder = stack.enter_context(LiveRecorder(model.loaded.layers))
        forecasts = forecasts_for(request, model, prepared.needs, recorder, stack)
        file = stack.enter_context(file_for(request.experts_folder, prepared, model.store.slabs))
        sizes, sessions = sizes_of(model, prompts.numel()), prepared.sessions_of(LoggedSession)
        executors = executors_for(prepared, sessions, model, machine, sizes, file)
        blocks = [card.block for card in prepared.cards]
        live = live_layers(executors, blocks, recorder, forecasts, model.facts, sizes)
        if prepared.gpus > 1:
            stack.enter_context(_divided(prepared.needs, model, live))
        kept = GeneratedTrace(model.facts.rule, prepared.needs, forecasts.count)
        stack.enter_context(routed_through(model.loaded.layers, live))
        with running(executors):
            picked = pick or Sampler(request.scenario.seed, request.temperature)
            outputs = _passes(model.loaded.model, prompts, request.generated_tokens, live, kept, picked)
    trace = _trace(request, prepared.scenario, model, kept)
    traced = prepared.with_trace(trace)
    errors, label = sessions[0].routing_errors(traced.demand), f"generated on {machine.kind}"
    run = Run.of(traced, rows_of(executors, blocks), errors, label)
    tokens = tuple(tuple(row) for row in torch.cat(outputs, 1).tolist())
    return Generated(tokens, run, tuple(sessions), trace, model.loaded.tokenizer)


@contextmanager
def _divided(needs: Needs, model: HostedModel, live: LiveCards) -> Iterator[None]:
    """The model's layers on their GPUs in the block. Raises RefusedError for a model that cannot be divided."""
    kinds = kinds_from_vectors(needs)
    if kinds and len(set(live.devices)) > 1:
        raise RefusedError(
            f"generate on several CUDA devices: expected no forecasts of the kind {', '.join(kinds)}, whose vectors "
            "are on one of them; choose another policy, one GPU, or host lanes"
        )
    division = division_of(model.loaded.model, model.loaded.layers, live.blocks)
    with on_devices(division, live.devices), live.handing_over(division):
        yield


def _passes(
    model: Any, prompts: Tensor, new_tokens: int, layers: LiveCards, kept: GeneratedTrace, pick: Pick
) -> list[Tensor]:
    """Run the prompts, then one token of each sequence at a time; the tokens chosen after every pass, [B, 1]."""
    sequences, outputs = tuple(range(len(prompts))), list[Tensor]()

    def picked(logits: Tensor, sequences: Sequence[int], step: int) -> Tensor:
        chosen = pick(logits, sequences, step)
        outputs.append(layers.end_pass(chosen))
        chosen = chosen.to(model.device)  # from the last GPU
        if step < new_tokens:
            layers.begin_step(step + 1, "decode", sequences, chosen)
        return chosen

    layers.begin_step(0, "prefill", sequences, prompts.to(model.device))
    for done in library_passes(model, Batch(sequences, prompts), new_tokens, picked):
        kept.add(done, layers.records(), layers.made)
    return outputs


def _trace(request: GenerateRequest, scenario: Scenario, model: HostedModel, kept: GeneratedTrace) -> Trace:
    """The trace, written if the request names a file. Raises ScenarioError for prompts of the calibration's."""
    trace = kept.trace(model.shape, _provenance(request, model))
    check_other_prompts(scenario, trace)
    if request.trace is not None:
        write_trace(trace, request.trace)
    return trace


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
