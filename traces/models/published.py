"""Published figures on the routing of large models, shown next to the statistics of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trilane.common.yaml_files import read_yaml

_FILE = Path(__file__).with_name("published.yaml")
_TEXTS = {"quantity", "model", "source", "note"}


class PublishedError(ValueError):
    """A published figure that is not stated as it must be."""


@dataclass(frozen=True)
class Published:
    """One figure: a number, or the two ends of a range."""

    quantity: str
    value: tuple[float, ...]
    model: str
    source: str
    note: str

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Published:
        """Raises PublishedError for a key, a type or a value that is not expected."""
        texts = {key: text for key, text in entry.items() if key != "value"}
        if set(texts) != _TEXTS or not all(isinstance(text, str) and text for text in texts.values()):
            raise PublishedError(f"expected a value and the texts {', '.join(sorted(_TEXTS))}, got {entry}")
        value = entry.get("value")
        ends = value if isinstance(value, list) else [value]
        if not all(type(end) in (int, float) for end in ends) or len(ends) not in (1, 2) or ends != sorted(set(ends)):
            raise PublishedError(f"expected a number as value, or a range [low, high], got {entry}")
        return cls(value=tuple(map(float, ends)), **texts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``from_dict`` is the inverse."""
        value = self.value[0] if len(self.value) == 1 else list(self.value)
        return {**self.__dict__, "value": value}


@cache
def published_figures() -> tuple[Published, ...]:
    """All of ``published.yaml``, in its order."""
    return tuple(Published.from_dict(entry) for entry in read_yaml(_FILE))
