"""Router scores in the forms that policies read: lists for each token, or an array to sum over.

A prompt has thousands of scores in each layer; to convert them to floats takes longer than most policies' decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray


class ScoreRows(Sequence[Sequence[float]]):
    """[tokens][experts]; equal to the lists of the same numbers."""

    def __init__(self, scores: NDArray[Any]) -> None:
        self._scores = scores

    @cached_property
    def _lists(self) -> list[list[float]]:
        lists: list[list[float]] = self._scores.tolist()
        return lists

    def __len__(self) -> int:
        return len(self._scores)

    @overload
    def __getitem__(self, place: int) -> Sequence[float]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sequence[float]]: ...
    def __getitem__(self, place: int | slice) -> Sequence[float] | Sequence[Sequence[float]]:
        return self._lists[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._lists == list(other)

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if self._scores.dtype == np.float16:
            return np.asarray(_of_halves()[self._scores.view(np.uint16)], dtype)
        return np.array(self._scores, np.float64 if dtype is None else dtype)  # floats, as the lists hold


@cache
def _of_halves() -> NDArray[np.float64]:
    """The numbers of all 16-bit patterns: to look them up is five times as fast as numpy's conversion."""
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
