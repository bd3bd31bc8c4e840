"""Hooks on the modules of a model, for the time of a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self


class Hooks(ABC):
    """Base of what watches a model through hooks. Use as a context manager: on exit, they are removed."""

    _handles: tuple[Any, ...] = ()

    @abstractmethod
    def _register(self) -> Iterator[Any]:
        """Put the hooks on; yields their handles."""

    def __enter__(self) -> Self:
        self._handles = tuple(self._register())
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()
