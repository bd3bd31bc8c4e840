"""The setup for measuring a model: its kernels, some of its experts, and the machine.

Everything runs through the executor's own ``LayerExecution`` and ``Copying``, with scripted decisions instead of a
session's. Experts are used in turn, from more memory than caches hold.

The GPU is busy while the host launches. ``torch.cuda._sleep`` counts cycles of the GPU's processors: 6 million are 3 ms
at 1.98 GHz, and 17 ms at the 345 MHz of an idle GPU. So the GPU's clocks are raised first, and then a short sleep is
measured (as in torch's own tests: ``get_cycles_per_ms`` in torch/testing/_internal/common_utils.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from policies.mechanism.session import Session
from policies.mechanism.views import Copy, ExpertId, Plan, Routing
from realrun.execution.copying import CopyFuture, Copying
from realrun.execution.layer_execution import LayerExecution, LayerSizes, RoutedInput
from realrun.execution.recorder import MachineRecorder, Timed
from realrun.execution.routed_tokens import RoutedTokens, routed
from realrun.experts.ffn import ExpertShape, SwiGlu, weighted_ffn
from realrun.experts.store import ExpertStore, GpuSlots, random_store
from realrun.machine.cuda_memory import upload
from realrun.machine.host_memory import check_host_memory
from realrun.machine.lanes import Completion, Machine, Work, took_ns
from realrun.machine.thread_lane import low_jitter
from realrun.replay.attention import attention_params_of
from realrun.replay.model import RecordedModel, ReplayModel, model_on
from realrun.replay.replay import WEIGHTS_DTYPE
from sim.runs.spans import Span
from traces.models.shape import ModelShape

# Sizes in kB, such as "32768K": Documentation/ABI/testing/sysfs-devices-system-cpu of Linux
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Other weights that are read between two uses of a layer's, in sizes of the cache. Chosen above 1, since caches do not
# evict strictly in order.
TIMES_CACHE = 4
COVER_NS = 3_000_000  # longer than anything measured takes to launch
WARM_NS = 1_000_000_000  # of work, after which the clocks are high
AT_ONCE = 16  # pieces of that work in the queue, so that it is never empty for long
TRIED_CYCLES, TRIES = 1_000_000, 10  # as in get_cycles_per_ms


class GpuCover:
    """A sleep of ``COVER_NS`` on the GPU lane, at the clock rate after a second of ``load()``."""

    def __init__(self, machine: Machine, load: Callable[[], Work]) -> None:
        self._machine = machine
        until_ns = machine.now_ns() + WARM_NS
        while machine.now_ns() < until_ns:
            [*_, last] = [machine.gpu.submit(load()) for _ in range(AT_ONCE)]
            last.wait()
        tried_ns = median(took_ns(self._sleep(TRIED_CYCLES)) for _ in range(TRIES))
        self._cycles = round(TRIED_CYCLES * COVER_NS / tried_ns)

    def __call__(self) -> Completion:
        """Launch it, and return its completion."""
        return self._sleep(self._cycles)

    def _sleep(self, cycles: int) -> Completion:
        return self._machine.gpu.submit(lambda: torch.cuda._sleep(cycles))  # type: ignore[no-untyped-call]


def cache_bytes(device: torch.device) -> int:
    """The second-level cache of a GPU; for host lanes, the processor's largest cache. 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in CPU_CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)


def layers_beyond(cache: int, shape: ModelShape, dtype: torch.dtype) -> int:
    """The number of layers whose attention weights are ``TIMES_CACHE`` times a ``cache``, in bytes."""
    return -(-TIMES_CACHE * cache // (attention_params_of(shape) * dtype.itemsize))


class CopyScript:
    """The part of a session that the copy thread uses, with scripted copies in place of decisions.

    ``cost``: of the experts of every layer; the copy thread expects a copy to take its ``copy_ns``.
    """

    def __init__(self, layers: int, expert_bytes: int) -> None:
        self.queue: deque[Copy] = deque()
        self.cost = SimpleNamespace(expert_bytes=expert_bytes, copy_ns=1)
        self.costs = [self.cost] * layers
        self.policy = SimpleNamespace(writes_back="never")

    def next_copy(self) -> Copy | None:
        return self.queue.popleft() if self.queue else None

    def copied(self, copy: Copy) -> bool:
        """As in ``Session``; False, since the slot is free again."""
        return False

    def staged(self, layer: int) -> set[int]:
        """As in ``Session``; always empty."""
        return set()


class AllThere:
    """GPU slots that always hold every expert: a copy writes the same weights again."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena

    def buffer(self, expert_id: ExpertId) -> Tensor:
        return self._arena[expert_id.layer, expert_id.expert]

    def begin(self, copy: Copy) -> Tensor:
        return self.buffer(copy.key)

    def release(self, expert_id: ExpertId) -> None:
        """As in ``GpuSlots``; nothing to do."""


LAYERS = 4  # with weights of their own, at least
EXPERTS_BYTES = 1_000_000_000  # of all experts together
EXPERTS_AT_ONCE = 3  # in a plan, at least: a first one and others


@dataclass(frozen=True)
class Points:
    """The sizes that are measured: sequences per batch, lengths of their contexts, and lengths of prompts."""

    batches: tuple[int, ...] = (1, 4)
    contexts: tuple[int, ...] = (16, 128, 512)
    prompts: tuple[int, ...] = (8, 32, 128)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Numbers of tokens of a step or an expert: powers of 2 up to the largest prefill."""
        most = max(self.batches) * max(self.prompts)
        return tuple(sorted({*(1 << i for i in range(most.bit_length())), *self.batches, most}))


class Lab:
    """One model on one machine, ready to be measured."""

    def __init__(
        self, machine: Machine, shape: ModelShape, points: Points, model: ReplayModel | None = None,
        kernel: SwiGlu | None = None,
    ) -> None:
        """Raises RefusedError for weights without kernels, and if memory does not hold them."""
        dtype, self.layout, own_kernel = ExpertShape.of(shape)
        self.machine, self.points = machine, points
        enough = -(-EXPERTS_BYTES // (shape.experts * self.layout.size_bytes))
        self.layers = min(shape.moe_layers, max(LAYERS, enough))  # whose experts have weights
        layers = min(shape.moe_layers, max(self.layers, layers_beyond(cache_bytes(machine.device), shape, dtype)))
        self.shape = replace(shape, moe_layers=layers, dense_layers=min(shape.dense_layers, 2), expert_bytes=())
        self.at_once = min(max(shape.top_k, EXPERTS_AT_ONCE), shape.experts)
        enough = -(-EXPERTS_BYTES // (self.layers * self.layout.size_bytes))
        self.experts = min(shape.experts, max(2 * max(shape.top_k, EXPERTS_AT_ONCE), enough))  # with weights, by layer
        self.store = self._random_store()
        self.arena = machine.gpu_tensor((self.layers, self.experts, self.layout.size_bytes), torch.uint8)
        self.arena.copy_(self.memory)
        self.model = model or model_on(
            machine, self.shape, dtype=dtype, batch=max(points.batches),
            context=max(*points.contexts, *points.prompts), estimator=True,
        )
        self.kernel = kernel or own_kernel
        self.recorder, self.script = MachineRecorder(), CopyScript(self.layers, self.layout.size_bytes)
        slots = cast(GpuSlots, AllThere(self.arena))
        self._slots, most = slots, max(points.tokens)
        self._sizes = LayerSizes(most, self.at_once, shape.hidden, dtype, WEIGHTS_DTYPE)
        self.copying: Copying
        self.parts: LayerExecution
        self._cover: Callable[[], Completion]
        self.hidden = machine.gpu_tensor((most, shape.hidden), dtype)
        self.hidden.copy_(torch.randn(most, shape.hidden))
        self.on_host = machine.host_tensor((most, shape.hidden), dtype)
        self.on_host.copy_(self.hidden)
        self.chosen_on_host = machine.host_tensor((most, shape.top_k), torch.int64)
        self.scratch = machine.host_tensor((self.layout.size_bytes,), torch.uint8)
        self._turn, self._copied, self._draw = count(), count(), np.random.default_rng(0)

    # --- inputs of probes ---------------------------------------------------------------------------------------------

    def next_layer(self) -> int:
        """The next layer, in turn."""
        return next(self._turn) % self.shape.moe_layers

    def next_experts(self, many: int) -> tuple[int, list[int]]:
        """The next layer with weights, and those of its experts that have not been used for longest."""
        turn = next(self._turn)
        first = turn // self.layers * many
        return turn % self.layers, [(first + i) % self.experts for i in range(many)]

    def alike(self, experts: Sequence[int], tokens: int) -> RoutedTokens:
        """``tokens`` tokens with the same experts."""
        return routed(np.tile(np.array(experts), (tokens, 1)), torch.full((tokens, len(experts)), 0.25))

    def drawn(self, tokens: int) -> tuple[np.ndarray[Any, Any], Tensor]:
        """Random ids and weights [tokens, k], with different experts for every token, as from a router."""
        shape = self.shape
        ids = self._draw.random((tokens, shape.experts)).argsort(1)[:, : shape.top_k]
        return ids, torch.full((tokens, shape.top_k), 0.25)

    def start(self, tokens: RoutedTokens, layer: int, gpu: Iterable[int] = (), cpu: Iterable[int] = ()) -> int:
        """Start a plan on hidden states that are ready; returns the host's time for it, ns."""
        gpu, cpu = tuple(gpu), tuple(cpu)
        hidden, weights = self.hidden[: tokens.tokens], upload(tokens.weights, self.machine.device)
        plan = Plan(layer, Routing((), ()), gpu, cpu, (), (), (), (), (), (), (), 0)
        began_ns = self.machine.now_ns()
        self.parts.start(plan, tokens, RoutedInput(lambda: hidden, weights, Timed(began_ns, began_ns, began_ns)), {})
        return self.machine.now_ns() - began_ns

    def combine(self, tokens: int) -> None:
        """Launch the layer's sum, whose result is discarded."""
        hidden, model, top_k = self.hidden[:tokens], self.model, self.at_once
        shared = hidden if self.shape.shared_width else None
        self.parts.combine(lambda parts: model.combine(parts.flatten(0, 1), top_k, shared, hidden), lambda _: None)

    def spans(self) -> list[Span]:
        """Wait for the end of the work, and return the spans since the last call."""
        self.parts.wait()
        self.recorder.flush()
        rows, self.recorder.rows = self.recorder.rows, []
        return [Span(*row) for row in rows]

    def cover(self) -> Completion:
        """Keep the GPU busy, so that what is launched next runs without gaps, and with weights that are not in caches.
        """
        return self._cover()

    def expert_work(self, memory: Tensor) -> Work:
        """One expert of one token in ``memory`` [layers, experts, bytes], as ``LayerExecution`` runs it."""
        layer, [expert] = self.next_experts(1)
        on_gpu = memory is self.arena
        hidden, choices = (self.hidden, slice(0, 1)) if on_gpu else (self.on_host, torch.zeros(1, dtype=torch.int64))
        views, weights = self.layout.views(memory[layer, expert]), torch.full((1,), 0.25, device=memory.device)
        results = torch.empty(1, self.shape.hidden, device=memory.device, dtype=WEIGHTS_DTYPE)

        def work() -> None:
            weighted_ffn(self.kernel, views, hidden, choices, weights, 1, results)

        return work

    def ask_for(self, many: int) -> list[CopyFuture]:
        """Queue ``many`` copies, as a plan does, and return their futures. At most as many as there are experts."""
        ids = [ExpertId(*divmod(next(self._copied) % (self.layers * self.experts), self.experts)) for _ in range(many)]
        with self.copying.lock:
            size = self.layout.size_bytes
            self.script.queue.extend(Copy(expert_id, "demand", "staging", (), size) for expert_id in ids)
            futures = self.copying.expect(ids)
            self.copying.lock.notify_all()
        return [futures[expert_id] for expert_id in ids]

    @contextmanager
    def open(self) -> Iterator[None]:
        """In the block, copies are served, and the interpreter and the host thread are as in a run. Can be repeated."""
        self.copying = Copying(cast(Session, self.script), self.machine, self.store, self._slots, self.recorder)
        self.parts = LayerExecution(
            self.machine, self.copying, self.store, self._slots, [self.kernel] * self.layers, self.recorder, self._sizes
        )
        with low_jitter(), self.machine.hosting():
            self.copying.start()
            try:
                self._record()
                self._cover = self._cover_now()
                yield
            finally:
                self.copying.stop()

    def _record(self) -> None:
        """Record every graph that a probe replays, so that probes do not record; launches have one token."""
        if isinstance(self.model, RecordedModel):
            for batch in {1, *self.points.batches}:
                for context in {1, *self.points.contexts}:
                    self.machine.gpu.submit(partial(self.model.record_step, batch, context)).wait()

    def _cover_now(self) -> Callable[[], Completion]:
        """A sleep or, on host lanes, an expert."""
        machine = self.machine
        if machine.kind == "cuda":
            return GpuCover(machine, lambda: self.expert_work(self.arena))
        return lambda: machine.gpu.submit(self.expert_work(self.arena))

    def _random_store(self) -> ExpertStore:
        machine, size = self.machine, self.layout.size_bytes * self.layers * self.experts
        check_host_memory(size * (2 if machine.device.type == "cpu" else 1))
        self.memory = machine.host_tensor((self.layers, self.experts, self.layout.size_bytes), torch.uint8)
        slabs = iter(self.memory)
        return random_store(self.layout, self.layers, self.experts, lambda size: next(slabs).view(-1))
