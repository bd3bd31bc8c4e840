"""Values of a model's config.json by key, checked; families name the same thing differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traces.models.shape import ShapeError
from trilane.common.quoting import quoted

_NESTED = ("text_config", "llm_config", "language_config")  # the language model in that of a model that sees or hears
_MOST = 10**9


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of a configuration; ``where`` begins every message."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, values: object, where: str) -> ConfigKeys:
        """Those of the language model. Raises ShapeError for what is no mapping."""
        if not isinstance(values, Mapping):
            raise ShapeError(f"{where}: expected a JSON object with keys such as hidden_size, got {quoted(values)}")
        for key in _NESTED:
            if isinstance(inner := values.get(key), Mapping):
                outer = {name: value for name, value in values.items() if name not in _NESTED}
                return cls.of({**outer, **inner}, where)
        return cls(values, where)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The whole number at the first of ``keys`` that is there; a list is one number if all of it is equal.

        Raises ShapeError where there is none and no default, and for other values.
        """
        key = next((key for key in keys if key in self), None)
        if key is None and default is not None:
            return default
        if key is None:
            raise ShapeError(
                f"{self.where}: expected the key {' or '.join(keys)}; this is no configuration of a Mixture-of-Experts "
                f"model, or a family's that is not known: give the model's GGUF file, or an entry in models.yaml"
            )
        value = self.values[key]
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if type(value) is not int or not least <= value <= _MOST:
            raise ShapeError(f"{self.where}: {key}: expected a whole number of at least {least}, got {quoted(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The truth value at ``key``. Raises ShapeError for other values."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ShapeError(f"{self.where}: {key}: expected true or false, got {quoted(value)}")
        return value

    def text(self, key: str) -> str:
        """The text at ``key``, or an empty one."""
        return value if isinstance(value := self.values.get(key), str) else ""

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """A list of layers, or of a value for each; empty if it is not there. Raises ShapeError for other values."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise ShapeError(f"{self.where}: {key}: expected a list of whole numbers, got {quoted(value)}")
        return tuple(value)

    def per_layer(self, key: str, layers: int) -> tuple[str, ...]:
        """A text for each of ``layers``. Raises ShapeError for other values."""
        value = self.values[key]
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value) or len(value) != layers:
            raise ShapeError(f"{self.where}: {key}: expected a text for each of {layers} layers, got {quoted(value)}")
        return tuple(value)

    def nested(self, key: str) -> ConfigKeys:
        """The keys of the object at ``key``."""
        return ConfigKeys.of(self.values[key], f"{self.where}: {key}")
