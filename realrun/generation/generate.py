"""Generate with a model of the Hugging Face library whose routed experts are placed by a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.protocols import Needs
from policies.registry import system
from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import LayerSizes
from realrun.experts.expert_file import ExpertFile
from realrun.experts.file_of_run import file_for, held_experts
from realrun.experts.store import GpuSlots, check_one_width, slots_needed
from realrun.generation.hosted_model import HostedModel, computed_in_place, load_model, look_at, routed_through
from realrun.generation.live_layers import LiveForecasts, LiveLayers, LiveRecorder, MadeForecasts, PartialStates
from realrun.machine.lanes import Machine
from realrun.machine.machines import machine_for
from sim.runs.calibration import check_other_prompts
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.vocabulary import FROM_EXPERTS
from traces.capture import forecasts as capture_forecasts
from traces.capture.forecasts import check_vectors, checked_stream
from traces.capture.passes import Batch, HookedModel, Pass, Pick, Sampler, place_rows, routing_rows, score_rows
from traces.capture.passes import generate as library_passes
from traces.capture.record import LayerRecord
from traces.capture.router_forecast import GATE_INPUT, parse_forecasts
from traces.capture.settings import CaptureError, CaptureSettings
from traces.capture.vectors import Vectors, read_vectors
from traces.file import write_trace
from traces.layout import BY_TOKEN, DECODE, PREFILL, ForecastKey, tensor_specs
from traces.models.shape import ModelShape
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
        if (scenario.gpus or 1) > 1:
            raise RefusedError("generate: expected gpus 1; several GPUs are replayed or simulated")
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
    """The results: ``tokens`` [B][1 + generated], the run, the session with the log of its calls, and the trace."""

    tokens: tuple[tuple[int, ...], ...]
    run: Run
    session: LoggedSession
    trace: Trace
    tokenizer: Any

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
    return prepared.with_trace(blank_trace(model.shape, sequences, *lengths, prepared.needs)).checked()


def vectors_for(request: GenerateRequest, model: HostedModel, needs: Needs) -> Vectors | None:
    """The vectors for forecasts. Raises RefusedError if they are missing, or of another model."""
    kinds = sorted({kind for kind, _ in needs.forecasts} - {*GATE_INPUT, *FROM_EXPERTS, BY_TOKEN})
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


def executor_for(
    prepared: Prepared, session: LoggedSession, model: HostedModel, machine: Machine, step_tokens: int,
    file: ExpertFile | None = None,
) -> Executor:
    """An executor with slots, buffers and kernels for steps of up to ``step_tokens``. ``file``: of the experts, where
    the host holds a part of them."""
    policy, layers, layout = prepared.composition, model.loaded.layers, model.store.layouts[0]
    [slots_on_gpu] = slots_needed(prepared)
    arena = machine.gpu_tensor((slots_on_gpu, layout.size_bytes), torch.uint8)
    slots = GpuSlots(arena, policy.demand_slots, policy.prefetch_slots)
    sizes = LayerSizes(
        step_tokens, model.shape.top_k, layers[0].hidden, model.loaded.model.dtype, model.sum_dtype
    )
    store = model.store if file is None else held_experts(
        file, prepared, lambda size: machine.host_tensor((size,), torch.uint8)
    )
    return Executor(session, machine, store, slots, [layer.experts for layer in layers], sizes)


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
        file = stack.enter_context(file_for(request.experts_folder, prepared, model.store.slabs))
        executor = executor_for(prepared, session, model, machine, prompts.numel(), file)
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


Rows = dict[str, NDArray[Any]]


def blank_trace(
    shape: ModelShape, sequences: Sequence[int], prompt_tokens: int, generated_tokens: int, needs: Needs
) -> Trace:
    """The trace of a generation before it begins: rows in order, without routing.

    It defines the steps, and has the columns for a policy with these ``needs``.
    """
    count = min(2 * shape.top_k, shape.experts)
    keys = {ForecastKey(*pair): (count, needs.tokens) for pair in needs.forecasts}
    batch, tokens = len(sequences), len(sequences) * (prompt_tokens + generated_tokens)
    tensors: Rows = {
        name: np.zeros((tokens, *spec.row_shape), spec.dtype)
        for name, spec in tensor_specs(shape, scores=True, forecasts=keys).items()
    }
    steps = [Pass(tuple(sequences), torch.zeros(batch, prompt_tokens), 0, PREFILL)]
    for start in range(prompt_tokens, prompt_tokens + generated_tokens):
        steps.append(Pass(tuple(sequences), torch.zeros(batch, 1), start, DECODE))
    return Trace.trusted(shape, tensors | _joined([place_rows(step) for step in steps]), {}, "")


class GeneratedTrace:
    """Collects the records of passes on their device, and makes a trace of them when the run is over."""

    def __init__(self, rule: str, needs: Needs, count: int) -> None:
        self._rule, self._needs, self._count = rule, needs, count
        self._passes: list[tuple[Pass, list[LayerRecord], list[MadeForecasts]]] = []

    def add(self, done: Pass, records: Sequence[LayerRecord], made: list[MadeForecasts]) -> None:
        """Add one forward pass."""
        nothing = torch.empty(0)
        self._passes.append((done, [replace(record, gate_input=nothing) for record in records], made))

    def trace(self, shape: ModelShape, provenance: Mapping[str, Any]) -> Trace:
        """The trace of all passes. Raises TraceError for records that a trace cannot hold."""
        rows = [
            {
                **place_rows(done), **routing_rows(records), "scores": score_rows(records, self._rule),
                **self._forecast_rows(made, len(records), done.tokens.numel()),
            }
            for done, records, made in self._passes
        ]
        return Trace.from_tensors(shape, _joined(rows), provenance, where="generated trace")

    def _forecast_rows(self, made: list[MadeForecasts], layers: int, tokens: int) -> Rows:
        rows: Rows = {}
        for key in (ForecastKey(*pair) for pair in self._needs.forecasts):
            ids = np.full((tokens, layers, self._count), -1, np.int16)
            scores = np.zeros(ids.shape, np.float16)
            for layer in range(layers - key.lookahead):
                ids[:, layer], scores[:, layer] = made[layer][key]
            rows[key.ids_name] = ids
            if self._needs.tokens:
                rows[key.scores_name] = scores
        return rows


def _joined(rows: Sequence[Rows]) -> Rows:
    return {name: np.concatenate([of_pass[name] for of_pass in rows]) for name in rows[0]}
