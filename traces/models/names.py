"""Names of models in their parts: the model, a weight format after ``@``, and a number of layers after ``:``."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import NamedTuple

_LAST = re.compile(
    r"(?P<model>.+?\.(?:json|gguf)|[^@:]*)(?P<weights>@[^:]*)?(?P<layers>:.*)?", re.IGNORECASE | re.DOTALL
)


class ModelName(NamedTuple):
    """``phi-3.5-moe@q4_k_m:8`` in its parts; a part that is not there is None."""

    model: str  # in the catalogue, or a path
    weights: str | None = None
    layers: str | None = None

    def __str__(self) -> str:
        weights = "" if self.weights is None else f"@{self.weights}"
        return f"{self.model}{weights}" + ("" if self.layers is None else f":{self.layers}")


@cache
def parted(name: str) -> ModelName:
    """A name in its parts. In a path, the marks count after the last separator, and after .json or .gguf."""
    last = os.path.split(name)[1]
    parts = _LAST.fullmatch(last)
    if parts is None:  # nothing but the model
        return ModelName(name)
    weights, layers = (part and part[1:] for part in (parts["weights"], parts["layers"]))
    return ModelName(name[: len(name) - len(last)] + parts["model"], weights, layers)
