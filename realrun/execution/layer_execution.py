"""The routed experts of one layer at a time, on real lanes (twin of ``sim.timeline.layer_parts``).

Partial results are rows of [N * k, H], one for each choice of each token, so that their sum does not depend on where
and in which order experts ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policies.mechanism.views import Commitment, ExpertCosts, ExpertId, Plan
from realrun.execution.copying import CopyFuture, Copying
from realrun.execution.reading import Reading
from realrun.execution.recorder import MachineRecorder, Timed
from realrun.execution.routed_tokens import RoutedTokens
from realrun.experts.ffn import Choices, addressed, compute_into, weighted_ffn
from realrun.experts.store import GpuSlots, HostExperts
from realrun.machine.cuda_memory import upload
from realrun.machine.lanes import Completion, Machine, Submitted


@dataclass
class Rows:
    """An expert on the CPU: its choices, and the place of its results in the layer's host buffer."""

    choices: Tensor
    begin: int
    completion: Completion = field(init=False)
    began_ns: int = 0  # 0: not yet
    has_ended: bool = False

    def left_ns(self, cost_ns: int, now_ns: int) -> int:
        """The rest of the work, which is expected to take ``cost_ns`` in all."""
        if self.has_ended:
            return 0
        return max(1, self.began_ns + cost_ns - now_ns) if self.began_ns else cost_ns


@dataclass
class CpuShare:
    """The CPU's share of one layer."""

    rows: dict[ExpertId, Rows] = field(default_factory=dict)  # also of experts that the layer before has deferred
    filled: int = 0  # used rows of the layer's result buffer

    def take(self, expert_id: ExpertId, choices: Tensor) -> Rows:
        """Reserve rows for another expert's results."""
        rows = self.rows[expert_id] = Rows(choices, self.filled)
        self.filled += len(choices)
        return rows


@dataclass(frozen=True)
class RoutedInput:
    """The input of a layer's routed experts on the GPU: ``hidden()`` [N, H], valid when ``ready`` has ended, and the
    router's ``weights`` [N * k]."""

    hidden: Callable[[], Tensor]
    weights: Tensor
    ready: Completion


@dataclass
class ActiveLayer:
    """The layer that is being executed. Every layer has a new one, so that nothing is left of the last."""

    plan: Plan
    tokens: RoutedTokens
    inputs: RoutedInput
    futures: Mapping[ExpertId, CopyFuture]
    staged: Set[int]  # experts whose slots may be free after they have been computed
    cpu: CpuShare  # includes what was computed ahead, and what the layer before has deferred
    on_gpu: Mapping[int, Choices]  # by expert
    pending: list[int]  # GPU experts that wait for copies
    since_ns: int  # when the host began to prepare its next launch
    activations: Completion | None = None  # of their copy to the host
    waits: list[Completion] = field(default_factory=list)  # also awaited at the end of the layer
    last: Completion | None = None  # of the GPU's work, which ends in order


class LayerSizes(NamedTuple):
    """The largest content of a layer's buffers: N = ``tokens`` with ``top_k`` choices each, hidden states [N, H] of
    ``dtype``, and weighted results of ``sum_dtype``. ``defers``: with results that the layer before has deferred."""

    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    sum_dtype: torch.dtype
    defers: bool = False


class Addresses(NamedTuple):
    """Results of CPU experts: their places in the host buffer, and the choices that they are of."""

    places: Choices
    choices: Tensor


def addresses_of(rows: Sequence[Rows], device: torch.device) -> Addresses | None:
    """Addresses of the results of ``rows``; None if there are none."""
    if not rows:
        return None
    return Addresses(places_of(rows, device), upload(torch.cat([row.choices for row in rows]), device))


def places_of(rows: Sequence[Rows], device: torch.device) -> Choices:
    """The places of the results of ``rows``, at least one, in the host buffer: a slice if they are adjacent."""
    ends = [row.begin + len(row.choices) for row in rows]
    if all(row.begin == end for row, end in zip(rows[1:], ends, strict=False)):
        return slice(rows[0].begin, ends[-1])
    places = [torch.arange(row.begin, end) for row, end in zip(rows, ends, strict=True)]
    return upload(torch.cat(places), device)


Finish = Callable[[Tensor], Tensor]  # partial results [N, k, H] -> output of the layer


class LayerExecution:
    """Plays plans, one layer at a time. ``kernels``: one for each layer, see ``realrun.experts.ffn``.

    There are two host buffers of each kind, used in turn by layer. A layer's activations are also read by its deferred
    experts and by those that are computed ahead for the next layer; the results of both are rows of the next layer's
    buffer. Two buffers are enough, since a layer starts only after the layer before it has ended, when the buffers of
    the one before that are free.
    """

    def __init__(
        self, machine: Machine, copying: Copying, store: HostExperts, slots: GpuSlots, kernels: Sequence[Any],
        recorder: MachineRecorder, sizes: LayerSizes,
    ) -> None:
        self._machine, self._copying, self._store, self._slots = machine, copying, store, slots
        self._kernels, self._recorder = kernels, recorder
        activations, results = (sizes.tokens, sizes.hidden), (sizes.tokens * sizes.top_k, sizes.hidden)
        on_cpu = (sizes.tokens * sizes.top_k * (2 if sizes.defers else 1), sizes.hidden)
        self._parts = machine.gpu_tensor(results, sizes.sum_dtype)
        self._sent = [machine.host_tensor(activations, sizes.dtype) for _ in range(2)]
        self._results = [machine.host_tensor(on_cpu, sizes.sum_dtype) for _ in range(2)]
        self._arrived = machine.gpu_tensor(on_cpu, sizes.sum_dtype)  # results that were copied over the link
        self._in_place = list(map(machine.readable, self._results)) if machine.result_path == "direct" else []
        self.reading: Reading | None = None  # where a disk holds the experts
        self._ahead = CpuShare()  # of the next layer
        self._state: ActiveLayer

    def start(
        self, plan: Plan, tokens: RoutedTokens, inputs: RoutedInput, futures: Mapping[ExpertId, CopyFuture],
        staged: Set[int] = frozenset(),
    ) -> None:
        """Start a plan: launch the GPU experts that are in their slots, and the CPU's share.

        ``staged``: experts of the layer that are, or will be, in staging slots.
        """
        since_ns = self._machine.now_ns()
        share, self._ahead = self._ahead, CpuShare()
        on_gpu = _upload(tokens, self._machine.device)
        pending = [e for e in plan.gpu if ExpertId(plan.layer, e) in futures]
        self._state = ActiveLayer(plan, tokens, inputs, futures, staged, share, on_gpu, pending, since_ns)
        if not tokens.complete or plan.deferred:
            count = tokens.tokens * tokens.top_k
            self._machine.gpu.submit(lambda: self._parts[:count].zero_())
        for expert in plan.gpu:
            if expert not in pending:
                self._compute(expert, ())
        if plan.cpu:
            self._on_cpu(plan.immediate, tokens, "expert", plan.layer, share)
            self._on_cpu(plan.deferred, tokens, "deferred", plan.layer, self._ahead)

    def so_far(self) -> Tensor:
        """Work for the GPU: partial results [N, k, H] of experts that did not wait for copies, zero for all others."""
        state = self._state
        parts = self._parts[: state.tokens.tokens * state.tokens.top_k]
        known = torch.zeros_like(parts)
        for expert in state.plan.gpu:
            if expert not in state.pending:
                choices = state.on_gpu[expert]
                known[choices] = parts[choices]
        return known.view(state.tokens.tokens, state.tokens.top_k, -1)

    def precompute(self, commit: Commitment, tokens: RoutedTokens) -> None:
        """Let the CPU compute experts of the next layer, on this layer's activations."""
        self._on_cpu(commit.precompute, tokens, "precompute", self._state.plan.layer + 1, self._ahead)

    def ahead_ns(self, costs: Sequence[ExpertCosts]) -> int:
        """The rest of experts that are computed ahead, or were deferred, ns, by the planner's ``costs`` by layer."""
        now_ns, left_ns, first = self._machine.now_ns(), 0, True
        for (layer, _), rows in self._ahead.rows.items():
            first_ns = costs[layer].first_cpu_ns if first else 0
            left_ns += rows.left_ns(costs[layer].cpu_ns[len(rows.choices)] + first_ns, now_ns)
            first = False
        return left_ns

    def combine(self, finish: Finish, keep: Callable[[Tensor], None]) -> Completion:
        """Launch experts that wait for copies, then the sum: ``keep(finish(partial results))``."""
        state, layer = self._state, self._state.plan.layer
        state.since_ns = self._machine.now_ns()
        for expert in state.pending:
            self._compute(expert, (state.futures[ExpertId(layer, expert)],))
        streamed = [state.futures[ExpertId(layer, e)] for e in state.plan.streamed]
        rows = [state.cpu.rows[ExpertId(layer, e)] for e in (*state.plan.precomputed, *state.plan.immediate)]
        late = [row for expert_id, row in state.cpu.rows.items() if expert_id.layer < layer]
        source, after = self._source([*rows, *late])
        parts = self._parts[: state.tokens.tokens * state.tokens.top_k]
        shape = (state.tokens.tokens, state.tokens.top_k, -1)
        own, added = (addresses_of(some, self._machine.device) for some in (rows, late))

        def add_up() -> None:
            if own is not None:
                parts[own.choices] = source[own.places]
            if added is not None:
                parts[added.choices] += source[added.places]
            keep(finish(parts.view(shape)))

        completion = self._machine.gpu.submit(add_up, (*after, *streamed))
        self._recorder.add("gpu", completion, "combine", layer, -1, state.tokens.tokens)
        self._launched(-1, completion)
        return completion

    def wait(self) -> None:
        """Block until the layer has ended and the session has been notified of its copies."""
        if self._state.last is not None:
            self._state.last.wait()
        for completion in self._state.waits:
            completion.wait()
        for future in self._state.futures.values():
            future.wait_known()

    def _compute(self, expert: int, after: Sequence[Completion]) -> None:
        """Launch one expert on the GPU, which reads the slot that the expert is in when it runs."""
        state, parts = self._state, self._parts
        layer, inputs, choices, top_k = state.plan.layer, state.inputs, state.on_gpu[expert], state.tokens.top_k
        expert_id, kernel, layout = ExpertId(layer, expert), self._kernels[layer], self._store.layouts[layer]
        rows = len(state.tokens.choices[expert])

        def work() -> None:
            weights = layout.views(self._slots.buffer(expert_id))
            compute_into(parts, kernel, weights, inputs.hidden(), choices, inputs.weights, top_k)

        done = (lambda: self._copying.used(expert_id)) if expert in state.staged else None
        completion = self._machine.gpu.submit(work, after, done)
        self._recorder.add("gpu", completion, "expert", layer, expert, rows, self._copying.expert_bytes(layer))
        self._launched(expert, completion)
        if done is not None:
            state.waits.append(completion)

    def _on_cpu(
        self, experts: Iterable[int], tokens: RoutedTokens, kind: str, layer: int, share: CpuShare
    ) -> None:
        """Submit experts of ``layer`` to the CPU, on the activations of the present layer: those that the host holds,
        then the others, each when it has been read.

        ``share``: of the present layer, or that of the next one, ``_ahead``, which adds the results."""
        sent, present = self._send_activations(), self._state.plan.layer
        target, results = layer if layer != present else -1, self._results[(present + (share is self._ahead)) % 2]
        ids, reading = [ExpertId(layer, expert) for expert in experts], self.reading
        late = {} if reading is None else reading.arrivals(ids)
        held = [expert_id for expert_id in ids if expert_id not in late]
        for expert_id in (*held, *late):
            expert = expert_id.expert
            rows = share.take(ExpertId(layer, expert), tokens.choices[expert])
            out = results[rows.begin : rows.begin + len(rows.choices)]
            rows.completion = self._machine.cpu.submit(
                self._cpu_work(layer, expert, rows, tokens, out, expert_id in late),
                (sent, late[expert_id]) if expert_id in late else (sent,),
                None if reading is None else self._end_of(reading, expert_id, held),
            )
            size = self._copying.expert_bytes(layer)
            self._recorder.add("cpu", rows.completion, kind, present, expert, len(rows.choices), size, target)

    def _end_of(
        self, reading: Reading, expert_id: ExpertId, held: Sequence[ExpertId]
    ) -> Callable[[], None] | None:
        """Release an expert of the host after the CPU has computed it; those that it held before, together."""
        if expert_id not in held:
            return lambda: reading.computed([expert_id])
        return (lambda: reading.computed(held)) if expert_id == held[-1] else None

    def _cpu_work(
        self, layer: int, expert: int, rows: Rows, tokens: RoutedTokens, results: Tensor, is_late: bool
    ) -> Callable[[], None]:
        kernel, layout = self._kernels[layer], self._store.layouts[layer]
        weights = None if is_late else layout.views(self._store.buffer(layer, expert))
        hidden = self._sent[self._state.plan.layer % 2]

        def work() -> None:
            rows.began_ns = self._machine.now_ns()
            now = weights or layout.views(self._store.buffer(layer, expert))
            weighted_ffn(kernel, now, hidden, rows.choices, tokens.weights, tokens.top_k, results)
            rows.has_ended = True

        return work

    def _send_activations(self) -> Completion:
        """Copy this layer's hidden states to the host, once."""
        state = self._state
        if state.activations is None:
            count, hidden, layer = state.tokens.tokens, state.inputs.hidden, state.plan.layer
            sent = self._sent[layer % 2][:count]
            state.activations = self._machine.d2h.submit(
                lambda: sent.copy_(hidden(), non_blocking=True), (state.inputs.ready,)
            )
            self._recorder.add("d2h", state.activations, "activations", layer, -1, count, sent.nbytes)
            state.waits.append(state.activations)
        return state.activations

    def _source(self, rows: Sequence[Rows]) -> tuple[Tensor, Sequence[Completion]]:
        """The tensor from which the GPU reads the CPU's results, and what it has to wait for."""
        state, layer = self._state, self._state.plan.layer
        results, completions = self._results[layer % 2], [row.completion for row in rows]
        if not rows:
            return self._arrived, ()
        if self._in_place:
            return self._in_place[layer % 2], completions
        began_ns = self._machine.now_ns()
        for completion in completions:
            completion.wait()
        state.since_ns += self._machine.now_ns() - began_ns
        end = max(row.begin + len(row.choices) for row in rows)
        future = self._copying.send_result(lambda: self._arrived[:end].copy_(results[:end], non_blocking=True))
        self._recorder.add("h2d", future, "result", layer, -1, state.tokens.tokens, results[:end].nbytes)
        return self._arrived, (future,)

    def _launched(self, expert: int, completion: Submitted) -> None:
        """Record the host's time since its last launch, without the time in which it was blocked."""
        state = self._state
        since, state.since_ns = state.since_ns + completion.blocked_ns, self._machine.now_ns()
        self._recorder.add("host", Timed(since, since, state.since_ns), "launch", state.plan.layer, expert)
        state.last = completion


def _upload(tokens: RoutedTokens, device: torch.device) -> Mapping[int, Choices]:
    """The choices of every expert as row indices on the GPU; all lists in one transfer, which may be none."""
    on_host = {expert: addressed(choices) for expert, choices in tokens.choices.items()}
    lists = {expert: choices for expert, choices in on_host.items() if isinstance(choices, Tensor)}
    if device.type == "cpu" or not lists:
        return on_host
    on_gpu = torch.split(upload(torch.cat(list(lists.values())), device), list(map(len, lists.values())))
    return on_host | dict(zip(lists, on_gpu, strict=True))
