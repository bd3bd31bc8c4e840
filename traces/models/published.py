"""Published figures on the routing of large models, shown next to the statistics of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from trilane.common.hints import ASCENDING, NOT_EMPTY
from trilane.common.schema import SchemaError
from trilane.common.yaml_files import read_bundled

_FILE = Path(__file__).with_name("published.yaml")
_Text = Annotated[str, NOT_EMPTY]


@dataclass(frozen=True)
class Published:
    """One figure: a number, or the two ends of a range."""

    quantity: _Text
    value: float | Annotated[tuple[float, float], ASCENDING]
    model: _Text
    source: _Text
    note: _Text

    @property
    def ends(self) -> tuple[float, ...]:
        """The number, or both ends of the range."""
        return self.value if isinstance(self.value, tuple) else (self.value,)


@cache
def published_figures() -> tuple[Published, ...]:
    """All of ``published.yaml``, in its order. Raises SchemaError for a faulty file."""
    found: tuple[Published, ...] = read_bundled(tuple[Published, ...], _FILE, SchemaError)
    return found
