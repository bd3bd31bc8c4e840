"""Cost tables of an engine whose steps are windows (``sim.costs.window_work``), for the timeline: the numbers of the
closed form (``trilane.engines.strata.window``), with a pool of threads in two phases, copies that the GPU makes itself,
and one call for all experts of a layer that are there, and one for those that were copied.

Beyond ``MOST_ROWS`` rows, as in prompts, a further row of attention takes no fixed time, and an expert at least what
it takes in an engine of layers (``sim.costs.fitted_costs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostTable, DraftWork, StepCosts, StepModel
from sim.costs.engine import FittedEngine
from sim.costs.fitted_costs import fitted_costs
from sim.costs.processors import GpuProcessor
from sim.costs.window_work import WindowWork, index_width, kv_width, with_selected
from sim.machine.hardware import Hardware
from sim.machine.interpolation import time_ns
from traces.models.codings import codings_of
from traces.models.shape import ModelShape

MOST_ROWS = 8  # of a window
# Keys by which sparse attention selects: the mean of a block of 4 tokens, in 32 bits (src/kernels/cuda/qsa_select.cu).
_INDEX_BYTES, _STATED_TOKENS = 32 / 8 / 4, 1024
_STATED_ROOM, _STATED_CONTEXT = 8192, 131072  # of ``WindowWork.kv_missed``


def window_costs(
    shape: ModelShape, hardware: Hardware, engine: FittedEngine, work: WindowWork, max_tokens: int, threads: int | None
) -> CostTable:
    """The cost table for workloads 0..``max_tokens``. ``threads``: of the pool, that of the host among them."""
    layers = fitted_costs(
        with_selected(shape, work.selected_tokens.value), hardware, engine, max_tokens, threads=threads
    )
    steps = WindowSteps(shape, hardware, engine, work, layers.steps)
    costs = layers.map_experts(lambda expert: _expert(expert, hardware, work))
    draft_ns = time_ns(work.draft_ns.value + steps.gpu.read_ns(work.draft_bytes.value, 16))
    return replace(
        costs,
        steps=steps,
        sync_ns=time_ns(work.handshake_ns.value),
        kernel_copies=True,
        permille_before_barrier=round(1000 * work.gate_up_share.value),
        barrier_ns=round(work.barrier_ns.value),
        step_ns=time_ns(work.host_ns.value),
        draft=DraftWork(1, shape.top_k, draft_ns),
        kv_tokens=work.kv_tokens.value,
    )


def _expert(layers: ExpertCosts, hardware: Hardware, work: WindowWork) -> ExpertCosts:
    """An expert's costs in calls for several, from those in an engine of layers."""
    call_ns = layers.expert_bytes / (hardware.gpu.bandwidth_bytes_per_s * work.group_read_share.value) * 1e9
    rows = range(1, len(layers.gpu_ns))
    own_ns = [time_ns(call_ns * (1 + work.group_row_share.value * (min(row, MOST_ROWS) - 1))) for row in rows]
    many_ns = [ns if row > MOST_ROWS else 0 for row, ns in zip(rows, layers.gpu_ns[1:], strict=True)]
    return layers._replace(
        gpu_ns=(0, *accumulate(map(max, own_ns, many_ns), max)),
        first_gpu_ns=time_ns(work.group_ns.value),
        first_cpu_ns=time_ns(work.pool_ns.value),
        copy_ns=time_ns(layers.expert_bytes / (hardware.link.h2d_bytes_per_s * work.fetch_share.value) * 1e9),
    )


def selection_ns(shape: ModelShape, gpu: GpuProcessor, work: WindowWork, context: float) -> float:
    """Reading the keys of so many tokens, and selecting among them, in the mean over layers."""
    read_ns = gpu.read_ns(shape.mean_of_layers(index_width) * context * _INDEX_BYTES, 32)
    sparse = shape.mean_of_layers(lambda kind: float(index_width(kind) > 0))
    return read_ns + sparse * work.selection_ns.value * context / _STATED_TOKENS


def missed_kv(work: WindowWork, context: float) -> float:
    """Share of the selected tokens whose keys and values the GPU reads from the host."""
    room = work.kv_tokens.value
    if not 0 < room < context:
        return 0.0
    by_room: float = (_STATED_ROOM / room) ** work.kv_missed_by_room.value
    by_context: float = (context / _STATED_CONTEXT) ** work.kv_missed_by_context.value
    return min(work.kv_missed.value * by_room * by_context, 1.0)


def streamed_ns(shape: ModelShape, hardware: Hardware, work: WindowWork, rows: float, context: float) -> float:
    """Copies of keys and values from the host for so many new tokens, in the mean over layers: for a window, those that
    it selects and the GPU lacks, by a kernel; for a piece of a prompt, those of all earlier tokens."""
    if not work.kv_tokens.value:
        return 0.0
    token_ns = shape.mean_of_layers(kv_width) * shape.cache_bits / 8 / hardware.link.h2d_bytes_per_s * 1e9
    if rows > MOST_ROWS:
        return (context - rows) * token_ns
    resolve_ns = shape.mean_of_layers(lambda kind: float(kv_width(kind) > 0)) * work.kv_resolve_ns.value
    tokens = rows * min(work.selected_tokens.value, context) * missed_kv(work, context)
    return resolve_ns + tokens * token_ns / work.fetch_share.value


@dataclass(frozen=True)
class WindowSteps:
    """Step costs outside the routed experts: those of ``layers``, with the keys by which sparse attention selects, the
    fixed times of further rows, and the commit. Routing, activations and results are in the handshake and the pool."""

    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    work: WindowWork
    layers: StepModel

    @cached_property
    def gpu(self) -> GpuProcessor:
        return GpuProcessor(self.hardware.gpu, self.engine.gpu, codings_of(self.shape))

    @cached_property
    def _row_ns(self) -> float:
        fixed_ns = self.engine.gpu.layer_ns["state"].value
        return self.work.row_ns.value * self.gpu.attention_fixed_ns("state") / fixed_ns

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        """See ``CostTable.step``."""
        costs = self.layers.step(tokens, context)
        index_ns = selection_ns(self.shape, self.gpu, self.work, sum(context))
        rows = tokens / len(context)
        index_ns += sum(streamed_ns(self.shape, self.hardware, self.work, rows, length) for length in context)
        rows_ns = self._row_ns * (min(tokens, MOST_ROWS) - 1)
        return costs._replace(
            attention_ns=costs.attention_ns + time_ns(index_ns + rows_ns),
            head_ns=costs.head_ns + time_ns(self.work.commit_ns.value),
            routing_ns=0, activations_ns=0, result_ns=0,
        )
