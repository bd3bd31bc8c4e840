"""The routed experts of one layer at a time, on real lanes (twin of ``sim.timeline.layer_parts``).

Partial results are rows of [N * k, H], one for each choice of each token, so that their sum does not depend on where
and in which order experts ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from policies.mechanism.views import Commitment, ExpertCosts, ExpertId, Plan
from realrun.execution.copying import CopyFuture, Copying
from realrun.execution.layer_state import ActiveLayer, CpuShare, LayerSizes, RoutedInput, Rows, addresses_of
from realrun.execution.recorder import MachineRecorder, Timed
from realrun.execution.routed_tokens import RoutedTokens
from realrun.experts.ffn import Choices, addressed, compute_into, weighted_ffn
from realrun.experts.gpu_slots import GpuSlots
from realrun.experts.store import ExpertStore
from realrun.machine.cuda_memory import upload
from realrun.machine.lanes import Completion, Machine, Submitted

Finish = Callable[[Tensor], Tensor]  # partial results [N, k, H] -> output of the layer


class LayerExecution:
    """Plays plans, one layer at a time. ``kernels``: one for each layer, see ``realrun.experts.ffn``.

    There are two host buffers of each kind, used in turn by layer. A layer's activations are also read by its deferred
    experts and by those that are computed ahead for the next layer; the results of both are rows of the next layer's
    buffer. Two buffers are enough, since a layer starts only after the layer before it has ended, when the buffers of
    the one before that are free.
    """

    def __init__(
        self, machine: Machine, copying: Copying, store: ExpertStore, slots: GpuSlots, kernels: Sequence[Any],
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
        self._ahead = CpuShare()  # of the next layer
        self._now: ActiveLayer

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
        self._now = ActiveLayer(plan, tokens, inputs, futures, staged, share, on_gpu, pending, since_ns)
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
        now = self._now
        parts = self._parts[: now.tokens.tokens * now.tokens.top_k]
        known = torch.zeros_like(parts)
        for expert in now.plan.gpu:
            if expert not in now.pending:
                choices = now.on_gpu[expert]
                known[choices] = parts[choices]
        return known.view(now.tokens.tokens, now.tokens.top_k, -1)

    def precompute(self, commit: Commitment, tokens: RoutedTokens) -> None:
        """Let the CPU compute experts of the next layer, on this layer's activations."""
        self._on_cpu(commit.precompute, tokens, "precompute", self._now.plan.layer + 1, self._ahead)

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
        now, layer = self._now, self._now.plan.layer
        now.since_ns = self._machine.now_ns()
        for expert in now.pending:
            self._compute(expert, (now.futures[ExpertId(layer, expert)],))
        streamed = [now.futures[ExpertId(layer, e)] for e in now.plan.streamed]
        rows = [now.cpu.rows[ExpertId(layer, e)] for e in (*now.plan.precomputed, *now.plan.immediate)]
        late = [row for expert_id, row in now.cpu.rows.items() if expert_id.layer < layer]
        source, after = self._source([*rows, *late])
        parts = self._parts[: now.tokens.tokens * now.tokens.top_k]
        shape = (now.tokens.tokens, now.tokens.top_k, -1)
        own, added = (addresses_of(some, self._machine.device) for some in (rows, late))

        def add_up() -> None:
            if own is not None:
                parts[own.choices] = source[own.places]
            if added is not None:
                parts[added.choices] += source[added.places]
            keep(finish(parts.view(shape)))

        completion = self._machine.gpu.submit(add_up, (*after, *streamed))
        self._recorder.add("gpu", completion, "combine", layer, -1, now.tokens.tokens)
        self._launched(-1, completion)
        return completion

    def wait(self) -> None:
        """Block until the layer has ended and the session has been notified of its copies."""
        if self._now.last is not None:
            self._now.last.wait()
        for completion in self._now.waits:
            completion.wait()
        for future in self._now.futures.values():
            future.wait_known()

    def _compute(self, expert: int, after: Sequence[Completion]) -> None:
        """Launch one expert on the GPU, which reads the slot that the expert is in when it runs."""
        now, parts = self._now, self._parts
        layer, inputs, choices, top_k = now.plan.layer, now.inputs, now.on_gpu[expert], now.tokens.top_k
        expert_id, kernel, layout = ExpertId(layer, expert), self._kernels[layer], self._store.layouts[layer]
        rows = len(now.tokens.choices[expert])

        def work() -> None:
            weights = layout.views(self._slots.buffer(expert_id))
            compute_into(parts, kernel, weights, inputs.hidden(), choices, inputs.weights, top_k)

        done = (lambda: self._copying.used(expert_id)) if expert in now.staged else None
        completion = self._machine.gpu.submit(work, after, done)
        self._recorder.add("gpu", completion, "expert", layer, expert, rows, self._copying.expert_bytes(layer))
        self._launched(expert, completion)
        if done is not None:
            now.waits.append(completion)

    def _on_cpu(
        self, experts: Iterable[int], tokens: RoutedTokens, kind: str, layer: int, share: CpuShare
    ) -> None:
        """Submit experts of ``layer`` to the CPU, on the activations of the present layer.

        ``share``: of the present layer, or that of the next one, ``_ahead``, which adds the results."""
        sent, present = self._send_activations(), self._now.plan.layer
        target, results = layer if layer != present else -1, self._results[(present + (share is self._ahead)) % 2]
        for expert in experts:
            rows = share.take(ExpertId(layer, expert), tokens.choices[expert])
            out = results[rows.begin : rows.begin + len(rows.choices)]
            rows.completion = self._machine.cpu.submit(self._cpu_work(layer, expert, rows, tokens, out), (sent,))
            size = self._copying.expert_bytes(layer)
            self._recorder.add("cpu", rows.completion, kind, present, expert, len(rows.choices), size, target)

    def _cpu_work(
        self, layer: int, expert: int, rows: Rows, tokens: RoutedTokens, results: Tensor
    ) -> Callable[[], None]:
        kernel, weights = self._kernels[layer], self._store.layouts[layer].views(self._store.buffer(layer, expert))
        hidden = self._sent[self._now.plan.layer % 2]

        def work() -> None:
            rows.began_ns = self._machine.now_ns()
            weighted_ffn(kernel, weights, hidden, rows.choices, tokens.weights, tokens.top_k, results)
            rows.has_ended = True

        return work

    def _send_activations(self) -> Completion:
        """Copy this layer's hidden states to the host, once."""
        now = self._now
        if now.activations is None:
            count, hidden, layer = now.tokens.tokens, now.inputs.hidden, now.plan.layer
            sent = self._sent[layer % 2][:count]
            now.activations = self._machine.d2h.submit(
                lambda: sent.copy_(hidden(), non_blocking=True), (now.inputs.ready,)
            )
            self._recorder.add("d2h", now.activations, "activations", layer, -1, count, sent.nbytes)
            now.waits.append(now.activations)
        return now.activations

    def _source(self, rows: Sequence[Rows]) -> tuple[Tensor, Sequence[Completion]]:
        """The tensor from which the GPU reads the CPU's results, and what it has to wait for."""
        now, layer = self._now, self._now.plan.layer
        results, completions = self._results[layer % 2], [row.completion for row in rows]
        if not rows:
            return self._arrived, ()
        if self._in_place:
            return self._in_place[layer % 2], completions
        began_ns = self._machine.now_ns()
        for completion in completions:
            completion.wait()
        now.since_ns += self._machine.now_ns() - began_ns
        end = max(row.begin + len(row.choices) for row in rows)
        future = self._copying.send_result(lambda: self._arrived[:end].copy_(results[:end], non_blocking=True))
        self._recorder.add("h2d", future, "result", layer, -1, now.tokens.tokens, results[:end].nbytes)
        return self._arrived, (future,)

    def _launched(self, expert: int, completion: Submitted) -> None:
        """Record the host's time since its last launch, without the time in which it was blocked."""
        now = self._now
        since, now.since_ns = now.since_ns + completion.blocked_ns, self._machine.now_ns()
        self._recorder.add("host", Timed(since, since, now.since_ns), "launch", now.plan.layer, expert)
        now.last = completion


def _upload(tokens: RoutedTokens, device: torch.device) -> Mapping[int, Choices]:
    """The choices of every expert as row indices on the GPU; all lists in one transfer, which may be none."""
    on_host = {expert: addressed(choices) for expert, choices in tokens.choices.items()}
    lists = {expert: choices for expert, choices in on_host.items() if isinstance(choices, Tensor)}
    if device.type == "cpu" or not lists:
        return on_host
    on_gpu = torch.split(upload(torch.cat(list(lists.values())), device), list(map(len, lists.values())))
    return on_host | dict(zip(lists, on_gpu, strict=True))
