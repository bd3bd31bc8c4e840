"""Memory of a static split: what an engine puts on the GPU, and the fewest layers whose experts it must leave out.

``load_memory`` says what an engine allocates. llama.cpp copies one matrix of a layer's experts to the GPU at a time,
others a layer: 4,353 MiB were logged where a layer's experts take 4,228 (GLM-5 in ik_llama.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.common.units import in_gb
from trilane.engines.compute_buffer import Copied, LoadSetting
from trilane.engines.load_memory import LoadMemory, load_memory
from trilane.engines.memory_needed import HOST_RESERVE_BYTES, host_memory_of, short_host
from trilane.engines.question import FitError, Question
from trilane.engines.split_speed import StaticSplit


@dataclass(frozen=True)
class SplitMemory:
    """GPU memory divided, and what the host holds, in bytes."""

    gpu_bytes: int
    every_token_bytes: int  # weights that every token needs
    kv_bytes: int
    compute_bytes: int
    reserve_bytes: int
    experts_bytes: int  # of experts on the GPU
    host_bytes: int  # of all others
    host_table_bytes: int  # of embeddings, where a GPU computes
    host_compute_bytes: int  # inputs, where a GPU computes

    @property
    def missing_bytes(self) -> int:
        """What the GPU lacks; at most 0 where all of it fits."""
        held = self.every_token_bytes + self.kv_bytes + self.compute_bytes + self.reserve_bytes + self.experts_bytes
        return held - self.gpu_bytes


@dataclass(frozen=True)
class Splitter:
    """The splits of a model in one engine."""

    question: Question
    shape: ModelShape
    hardware: Hardware
    engine: FittedEngine
    _known: dict[int, LoadMemory] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def piece_tokens(self) -> int:
        """Prompt tokens that are computed at once."""
        return self.question.ubatch or self.engine.prompt.piece_tokens.value

    def best(self) -> StaticSplit:
        """The split with as many experts on the GPU as there is room for, or with the layers that the question names.

        Raises FitError where there is none, saying by how many GB.
        """
        choices = self._splits()
        split = next((split for split in choices if self.memory(split).missing_bytes <= 0), None)
        if split is None:
            raise FitError(self._too_large(choices[-1]))
        host, needed = host_memory_of(self.question, self.hardware), self.memory(split).host_bytes + HOST_RESERVE_BYTES
        if host is not None and needed > host:
            raise FitError(f"{self.engine.name}: {short_host(needed, host)}")
        return split

    def memory(self, split: StaticSplit) -> SplitMemory:
        """What a split takes."""
        shape, all_on_gpu, own = self.shape, self._loaded(0), self._loaded(split.cpu_layers)
        host = sum(shape.expert_bytes_by_layer[: split.cpu_layers]) * (shape.experts - split.gpu_experts)
        return SplitMemory(
            gpu_bytes=self.hardware.gpu.memory_bytes,
            every_token_bytes=all_on_gpu.weights_bytes - shape.routed_bytes,
            kv_bytes=all_on_gpu.kv_bytes,
            compute_bytes=own.compute_bytes,
            reserve_bytes=self.hardware.gpu.reserve_bytes,
            experts_bytes=shape.routed_bytes - host,
            host_bytes=host,
            host_table_bytes=all_on_gpu.host_weights_bytes,
            host_compute_bytes=own.host_compute_bytes,
        )

    def _loaded(self, cpu_layers: int) -> LoadMemory:
        """What is allocated with the experts of so many layers on the host."""
        if cpu_layers not in self._known:
            setting = LoadSetting(
                context_tokens=self.question.batch * self.question.tokens, sequences=self.question.batch,
                ubatch_tokens=self.piece_tokens, cpu_layers=cpu_layers, gpu=not self.hardware.cpu_only,
                copied=self._copied,
            )
            self._known[cpu_layers] = load_memory(self.shape, setting)
        return self._known[cpu_layers]

    def _splits(self) -> list[StaticSplit]:
        """Those to choose from, most experts on the GPU first."""
        layers, given = self.shape.moe_layers, self.question.n_cpu_moe
        if given is not None:
            return [self._split(sum(block < given for block in self.shape.expert_blocks))]
        if self.hardware.one_memory:
            return [self._split(0)]
        if self.engine.splits == "experts":
            some = [self._split(layers, experts) for experts in range(self.shape.experts - 1, -1, -1)]
            return [self._split(0), *some]
        return [self._split(count) for count in range(layers + 1)]

    def _split(self, cpu_layers: int, gpu_experts: int = 0) -> StaticSplit:
        """Weights are put in the CPU's order of rows where it computes everything, and the engine can."""
        repacked = self.hardware.cpu_only and self.engine.prompt.repacked_thread_flops_per_s is not None
        return StaticSplit(cpu_layers, gpu_experts, self.question.threads, self.piece_tokens, repacked)

    @property
    def _copied(self) -> Copied:
        """What is copied to the GPU for prompts, at once, of experts on the host."""
        if self.engine.prompt.experts.value == "computed":
            return "nothing"
        return self.engine.copies_at_once

    def _too_large(self, split: StaticSplit) -> str:
        memory = self.memory(split)
        where = f"with the experts of {split.cpu_layers} layers on the CPU " if split.cpu_layers else ""
        return (
            f"{self.engine.name} {where}needs {in_gb(memory.gpu_bytes + memory.missing_bytes)} GB of GPU memory "
            f"(weights that every token needs {in_gb(memory.every_token_bytes)}, KV cache {in_gb(memory.kv_bytes)}, "
            f"compute buffers {in_gb(memory.compute_bytes)}, reserve {in_gb(memory.reserve_bytes)}, experts "
            f"{in_gb(memory.experts_bytes)}), and there are {in_gb(memory.gpu_bytes)}: "
            f"{in_gb(memory.missing_bytes)} GB are missing"
        )
