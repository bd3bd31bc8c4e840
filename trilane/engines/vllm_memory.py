"""Memory and splits of a model in vLLM.

Weights, keys and values, and what is computed have a share of the card's memory, ``--gpu-memory-utilization``, of which
the program's own context and CUDA graphs take a part; keys and values get what is left (vllm-project/vllm
vllm/v1/worker/gpu_worker.py, determine_available_memory). The table of embeddings is on the card, and logits are those
of the last tokens alone. Of one memory the system's own part is kept, if that is more.

With ``--cpu-offload-gb`` experts stay in pinned memory of the host, where the GPU's kernels read those that a step
chooses over the link (vllm/model_executor/offloader/uva.py): the splits count layers as those of other engines do, from
the first on, and nothing is computed on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trilane.common.units import GIB, MIB
from trilane.engines.load_memory import Copied, LoadMemory, LoadSetting, load_memory
from trilane.engines.memory import SplitMemory, Splitter
from trilane.engines.split_speed import ExpertCache, StaticSplit

UTILIZATION = 0.9  # --gpu-memory-utilization, by default (vllm/config/cache.py; newer versions 0.92)
PROGRAM_BYTES = 1024 * MIB  # estimate: CUDA's context 0.4, NCCL and graphs of small batches 0.6 GiB
LARGE_BYTES, LARGE_PIECES = 70 * GIB, 8192  # --max-num-batched-tokens there (vllm/engine/arg_utils.py)
_NO_HITS = ExpertCache(hit_rate=0.0, held=0.0)


@dataclass(frozen=True)
class VllmSplitter(Splitter):
    """Splits of a model in vLLM on one card."""

    @property
    def piece_tokens(self) -> int:
        large = self.hardware.gpu.memory_bytes >= LARGE_BYTES and "A100" not in self.hardware.gpu.name
        own = LARGE_PIECES if large else self.engine.prompt.piece_tokens.value
        return self.question.ubatch or own

    def _memory_of(self, cpu_layers: int, gpu_experts: int, copied: Copied) -> SplitMemory:
        memory = super()._memory_of(cpu_layers, gpu_experts, copied)
        if memory.one_memory:
            return memory
        table = memory.host_table_bytes
        return replace(memory, every_token_bytes=memory.every_token_bytes + table, host_table_bytes=0)

    @property
    def _reserve_bytes(self) -> int:
        gpu = self.hardware.gpu
        unused = round((1 - UTILIZATION) * gpu.memory_bytes)
        return max(unused, gpu.reserve_bytes if self.hardware.one_memory else 0) + PROGRAM_BYTES

    def _loaded(self, cpu_layers: int, copied: Copied) -> LoadMemory:
        if (cpu_layers, copied) not in self._known:
            setting = LoadSetting(
                context_tokens=self.question.batch * self.question.tokens, sequences=self.question.batch,
                ubatch_tokens=self.piece_tokens, copied="nothing", output=False,
            )
            self._known[cpu_layers, copied] = load_memory(self.shape, setting)
        return self._known[cpu_layers, copied]

    def _split(self, cpu_layers: int, gpu_experts: int) -> StaticSplit:
        cache = _NO_HITS if cpu_layers else None
        return StaticSplit(cpu_layers, gpu_experts, self.question.threads, self.piece_tokens, cache=cache)
