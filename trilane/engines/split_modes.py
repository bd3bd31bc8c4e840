"""How an engine can divide a model over several GPUs (``-sm``), and why it cannot do so otherwise.

What ``-sm tensor`` takes is in docs/multi-gpu.md of ggml-org/llama.cpp; models of ``-sm graph`` are those of the pull
requests of ikawrakow/ik_llama.cpp that added them: 1022, 1051, 1116, 1118, 1121, 1388, 1821, 1835, 1922.
"""

from __future__ import annotations

from sim.costs.engine import FittedEngine
from sim.costs.software import SplitMode
from traces.models.catalogue import architecture_of
from traces.models.shape import ModelShape

_NOT_TENSOR = {
    "deepseek2", "glm-dsa", "kimi-linear", "minimax-m2", "nemotron_h_moe", "olmoe", "deepseek32", "deepseek4",
    "glm4moelite", "glm5next", "qwen4exp", "bailing-hybrid",
}
_GRAPH = {
    "qwen3moe", "qwen3next", "qwen35moe", "glm4moe", "gpt-oss", "ernie4_5-moe", "hunyuan-moe", "deepseek2", "glm-dsa",
    "minimax-m2", "gemma4",
}
_PLAIN_BITS = 16
PROPORTIONS: tuple[SplitMode, ...] = ("tensor", "graph")  # modes whose -ts is not in layers


def split_modes(engine: FittedEngine, shape: ModelShape) -> tuple[SplitMode, ...]:
    """Modes in which an engine divides this model, with its KV cache."""
    return tuple(mode for mode in engine.split_modes if not why_not(mode, engine, shape))


def why_not(mode: SplitMode, engine: FittedEngine, shape: ModelShape) -> str:
    """Why an engine cannot divide a model so; nothing where it can."""
    if mode not in engine.split_modes:
        return f"{engine.name} has {', '.join(engine.split_modes)}"
    architecture = architecture_of(shape)
    if mode == "graph" and architecture not in _GRAPH:
        return f"{engine.name} divides {shape.base_name} by layers alone, as far as is known"
    if mode != "tensor":
        return ""
    if architecture in _NOT_TENSOR:
        return f"{engine.name} has not implemented it for {shape.base_name}"
    return "expected a KV cache in f16" if shape.cache_bits < _PLAIN_BITS else ""
