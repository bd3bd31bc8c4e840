"""Values of a GGUF file's metadata by key, checked; keys begin with the architecture, such as qwen3moe.expert_count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from traces.models.gguf_reader import Value
from traces.models.shape import ShapeError
from trilane.common.quoting import quoted

_MOST = 10**9
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class GgufKeys:
    """The keys of one model; ``where``, its file, begins every message."""

    metadata: Mapping[str, Value]
    where: str

    @property
    def architecture(self) -> str:
        """As llama.cpp names it."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def layers(self) -> int:
        """Layers, without those that predict several tokens at once."""
        count = self.count("block_count") - self.count("nextn_predict_layers", default=0)
        if not 1 <= count <= _MOST_LAYERS:
            raise ShapeError(f"{self.where}: block_count: expected 1 to {_MOST_LAYERS} layers, got {count:,}")
        return count

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def count(self, key: str, layer: int = 0, default: int | None = None, least: int = 0) -> int:
        """The whole number at ``key``; of a list, that of ``layer``. Raises ShapeError for another value, or none."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else None
        if type(value) is not int or not least <= value <= _MOST:
            raise ShapeError(
                f"{self.where}: expected a whole number from {least} at the key {quoted(name)}, got {quoted(value)}; "
                f"this is no model with experts, or of a family that is not known: give its config.json instead"
            )
        return value

    def flag(self, key: str, layer: int = 0, default: bool = False) -> bool:
        """The truth value at ``key``; of a list, that of ``layer``."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else default
        return bool(value)

    def is_list(self, key: str) -> bool:
        """Whether there is a value for each layer."""
        return isinstance(self.metadata.get(f"{self.architecture}.{key}"), tuple)
