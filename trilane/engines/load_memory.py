"""What llama.cpp allocates when it loads a model: weights, KV cache and compute buffers, on the GPU and on the host.

Source: ggml-org/llama.cpp build 11549, src/llama-kv-cache*.cpp. Buffers of eight families were asked of that build
itself (docs/validation/load-memory.md): the formulas are read from its graphs, not fitted.

KV cache. A layer that attends to everything has a cell for each token of the context, in whole 256. A layer with a
window has cells for the window and for one piece of a prompt, in whole 256, but no more than the others.

The table of embeddings stays on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from traces.models.attention import Attention
from traces.models.shape import ModelShape
from trilane.engines.compute_buffer import ComputeBuffer, LoadSetting, values_width, widest_values


@dataclass(frozen=True)
class LoadMemory:
    """Bytes. Without a GPU everything is in the host's memory, and named here as if that were the GPU's."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    host_weights_bytes: int  # table of embeddings, experts
    host_compute_bytes: int  # inputs

    @property
    def gpu_bytes(self) -> int:
        """All on the GPU."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


def load_memory(shape: ModelShape, setting: LoadSetting) -> LoadMemory:
    """The memory of a model with this setting; ``shape`` has the format of its cache."""
    experts = sum(shape.expert_bytes_by_layer[: setting.cpu_layers]) * shape.experts
    table = shape.embedding_bytes
    host = table + experts if setting.gpu else 0
    twice = table if setting.gpu and shape.tied_embeddings else 0
    buffer = ComputeBuffer(shape, setting)
    return LoadMemory(
        weights_bytes=shape.non_expert_bytes + shape.routed_bytes - host + twice,
        kv_bytes=kv_cache_bytes(shape, setting),
        compute_bytes=buffer.size,
        host_weights_bytes=host,
        host_compute_bytes=buffer.inputs if setting.gpu else 0,
    )


def kv_cache_bytes(shape: ModelShape, setting: LoadSetting) -> int:
    """Bytes of keys, values and states of all sequences."""
    element_bytes, one = shape.cache_bits / 8, 0.0
    for kind, layers in shape.attention_counts:
        elements = setting.cells_of(kind) * _cached_width(shape, kind, setting)
        one += layers * (elements * element_bytes + kind.state_bytes)
    return setting.sequences * round(one)


def _cached_width(shape: ModelShape, kind: Attention, setting: LoadSetting) -> int:
    """Elements of a token's keys and values. Without flash attention all layers' values are as wide as the widest."""
    own = values_width(kind)
    return kind.kv_width if setting.flash_attention or not own else kind.kv_width - own + widest_values(shape)
