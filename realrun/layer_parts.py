"""The routed experts of the layer at work, on real lanes: who computes which rows, what they wait for, and their sum
(twin of ``sim.layer_parts``).

Partial results are rows of [N * k, H]: one for each choice of each token, whoever computes it, so that their sum does
not depend on where and in which order experts ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.views import Commitment, ExpertId, Plan
from realrun.copying import Arrival, Copying
from realrun.expert_ffn import expert_ffn
from realrun.expert_store import ExpertStore
from realrun.gpu_slots import GpuSlots
from realrun.lanes import Machine, Mark
from realrun.recorder import Recorder, Timed
from realrun.routed_tokens import RoutedTokens
from realrun.upload import upload

Finish = Callable[[Tensor], Tensor]  # partial results [N, k, H] -> what the layer gives


@dataclass(frozen=True)
class Rows:
    """What the CPU has been given of a layer: slots, and where their results lie in the layer's host buffer."""

    slots: Tensor
    begin: int
    mark: Mark


@dataclass(frozen=True)
class Asked:
    """A layer's input on the GPU: ``hidden()`` [N, H], there when ``ready`` has ended, and ``weights`` [N * k]."""

    hidden: Callable[[], Tensor]
    weights: Tensor
    ready: Mark


class LayerParts:
    """Plays plans, one layer at a time. ``kernels``: of each layer, what its experts compute besides their weights."""

    def __init__(
        self, machine: Machine, copying: Copying, store: ExpertStore, slots: GpuSlots, kernels: Sequence[Any],
        recorder: Recorder, max_tokens: int, top_k: int, hidden: int, dtype: torch.dtype, sum_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._machine, self._copying, self._store, self._slots = machine, copying, store, slots
        self._kernels, self._recorder = kernels, recorder
        self._parts = machine.gpu_tensor((max_tokens * top_k, hidden), sum_dtype)
        self._sent = [machine.host_tensor((max_tokens, hidden), dtype) for _ in range(2)]  # activations, by layer % 2
        self._results = [machine.host_tensor((max_tokens * top_k, hidden), sum_dtype) for _ in range(2)]
        self._arrived = machine.gpu_tensor((max_tokens * top_k, hidden), sum_dtype)  # results that came over the link
        self._ahead: dict[tuple[int, int], Rows] = {}  # (layer, expert) that the CPU computes, or has computed, ahead
        self._filled = [0, 0]  # rows of each result buffer that are taken

    def start(self, plan: Plan, tokens: RoutedTokens, asked: Asked, arrivals: Mapping[ExpertId, Arrival]) -> None:
        """Put a plan into effect: GPU experts that are here, and the CPU's share."""
        self._since_ns = self._machine.now_ns()
        self._plan, self._tokens, self._asked, self._arrivals = plan, tokens, asked, arrivals
        self._layer = plan.layer
        self._activations: Mark | None = None
        self._waits: list[Mark] = []  # what the layer's end must not miss: GPU work with its `done`, activations
        self._on_gpu = _upload(tokens, self._machine.device)
        if not tokens.complete:
            count = tokens.tokens * tokens.top_k
            self._machine.gpu.submit(lambda: self._parts[:count].zero_())
        self._pending = [e for e in plan.gpu if ExpertId(plan.layer, e) in arrivals]
        for expert in plan.gpu:
            if expert not in self._pending:
                self._compute(expert, ())
        self._with_cpu = [self._ahead[plan.layer, e] for e in plan.precomputed]
        self._ahead = {}
        if plan.cpu:
            self._with_cpu += self._on_cpu(plan.cpu, tokens, "expert", plan.layer)

    def so_far(self) -> Tensor:
        """Work for the GPU: partial results [N, k, H] of the experts that were there, zero for all others."""
        parts = self._parts[: self._tokens.tokens * self._tokens.top_k]
        known = torch.zeros_like(parts)
        for expert in self._plan.gpu:
            if expert not in self._pending:
                slots = self._on_gpu[expert]
                known[slots] = parts[slots]
        return known.view(self._tokens.tokens, self._tokens.top_k, -1)

    def precompute(self, commit: Commitment, tokens: RoutedTokens) -> None:
        """The CPU begins on experts of the next layer, with this layer's activations."""
        layer = self._layer + 1
        rows = self._on_cpu(commit.precompute, tokens, "precompute", layer)
        self._ahead = {(layer, e): row for e, row in zip(commit.precompute, rows, strict=True)}

    def combine(self, finish: Finish, keep: Callable[[Tensor], None]) -> Mark:
        """Launch what waits for copies, then the sum: ``keep`` gets what ``finish`` makes of the partial results."""
        self._since_ns = self._machine.now_ns()
        for expert in self._pending:
            self._compute(expert, (self._arrivals[ExpertId(self._layer, expert)],))
        streamed = [self._arrivals[ExpertId(self._layer, e)] for e in self._plan.streamed]
        rows, parts = self._with_cpu, self._parts[: self._tokens.tokens * self._tokens.top_k]
        source, after = self._source(rows)
        slots = upload(torch.cat([row.slots for row in rows]), self._machine.device) if rows else None
        places = upload(_places(rows), self._machine.device) if rows else None
        shape = (self._tokens.tokens, self._tokens.top_k, -1)

        def add_up() -> None:
            if slots is not None and places is not None:
                parts[slots] = source[places]
            keep(finish(parts.view(shape)))

        mark = self._machine.gpu.submit(add_up, (*after, *streamed))
        self._recorder.add("gpu", mark, "combine", self._layer, -1, self._tokens.tokens)
        self._launched(-1)
        self._waits.append(mark)
        self._filled[self._layer % 2] = 0
        return mark

    def wait(self) -> None:
        """Block until the layer has ended and the session knows all that came of it."""
        for mark in self._waits:
            mark.wait()
        for arrival in self._arrivals.values():
            arrival.wait_known()

    def _compute(self, expert: int, after: Sequence[Mark]) -> None:
        """One expert on the GPU, from whichever slot it is in when it runs."""
        id, asked, parts = ExpertId(self._layer, expert), self._asked, self._parts
        kernel, layout = self._kernels[id.layer], self._store.layouts[id.layer]
        slots, top_k = self._on_gpu[expert], self._tokens.top_k

        def work() -> None:
            weights = layout.views(self._slots.buffer(id))
            part = expert_ffn(kernel, weights, asked.hidden()[slots // top_k])
            parts[slots] = part * asked.weights[slots].unsqueeze(-1)

        mark = self._machine.gpu.submit(work, after, lambda: self._copying.used(id))
        self._recorder.add("gpu", mark, "expert", id.layer, expert, len(slots), self._bytes(id.layer))
        self._launched(expert)
        self._waits.append(mark)

    def _on_cpu(self, experts: Iterable[int], tokens: RoutedTokens, kind: str, layer: int) -> list[Rows]:
        """Give the CPU experts of ``layer``, one after another, on the activations of the layer at work."""
        sent, given = self._send_activations(), []
        for expert in experts:
            slots = tokens.slots[expert]
            begin = self._filled[layer % 2]
            self._filled[layer % 2] += len(slots)
            mark = self._machine.cpu.submit(self._cpu_work(layer, expert, slots, begin, tokens), (sent,))
            target = layer if layer != self._layer else -1
            self._recorder.add(
                "cpu", mark, kind, self._layer, expert, len(slots), self._bytes(layer), target_layer=target
            )
            given.append(Rows(slots, begin, mark))
        return given

    def _cpu_work(self, layer: int, expert: int, slots: Tensor, begin: int, tokens: RoutedTokens) -> Callable[[], None]:
        kernel, weights = self._kernels[layer], self._store.layouts[layer].views(self._store.buffer(layer, expert))
        hidden, results = self._sent[self._layer % 2], self._results[layer % 2][begin : begin + len(slots)]

        def work() -> None:
            part = expert_ffn(kernel, weights, hidden[slots // tokens.top_k])
            torch.mul(part, tokens.weights[slots].unsqueeze(-1), out=results)

        return work

    def _send_activations(self) -> Mark:
        """The CPU gets this layer's hidden states, once."""
        if self._activations is None:
            count, hidden = self._tokens.tokens, self._asked.hidden
            sent = self._sent[self._layer % 2][:count]
            ready = (self._asked.ready,)
            self._activations = self._machine.d2h.submit(lambda: sent.copy_(hidden(), non_blocking=True), ready)
            size = sent.numel() * sent.element_size()
            self._recorder.add("d2h", self._activations, "activations", self._layer, -1, count, size)
            self._waits.append(self._activations)
        return self._activations

    def _source(self, rows: Sequence[Rows]) -> tuple[Tensor, Sequence[Mark]]:
        """Where the GPU finds the CPU's results, and when."""
        results, marks = self._results[self._layer % 2], [row.mark for row in rows]
        if not rows or self._machine.result_path == "direct":
            return self._machine.readable(results), marks
        for mark in marks:
            mark.wait()
        end = max(row.begin + len(row.slots) for row in rows)
        arrival = self._copying.send_result(lambda: self._arrived[:end].copy_(results[:end], non_blocking=True))
        size = results[:end].numel() * results.element_size()
        self._recorder.add("h2d", arrival, "result", self._layer, -1, self._tokens.tokens, size)
        return self._arrived, (arrival,)

    def _launched(self, expert: int) -> None:
        """The host has done what it takes to launch this, since it launched what was before."""
        since, self._since_ns = self._since_ns, self._machine.now_ns()
        self._recorder.add("host", Timed(since, since, self._since_ns), "launch", self._layer, expert)

    def _bytes(self, layer: int) -> int:
        return self._copying.expert_bytes(layer)


def _upload(tokens: RoutedTokens, device: torch.device) -> Mapping[int, Tensor]:
    """The slots of every expert on the GPU, in one transfer."""
    if device.type == "cpu":
        return tokens.slots
    slots = upload(torch.cat(list(tokens.slots.values())), device)
    return dict(zip(tokens.slots, torch.split(slots, [len(each) for each in tokens.slots.values()]), strict=True))


def _places(rows: Sequence[Rows]) -> Tensor:
    """Where the results of all rows lie in the host buffer."""
    return torch.cat([torch.arange(row.begin, row.begin + len(row.slots)) for row in rows])
