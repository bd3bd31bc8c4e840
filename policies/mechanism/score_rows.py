"""Router scores in the forms that policies read: lists for each token, an array to sum over, or the mean of the best.

A prompt has thousands of scores in each layer; to convert them to floats takes longer than most policies' decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

_AT_ONCE = 1 << 18  # scores, about as many as the processor's cache holds

Floats = NDArray[np.float64]


class ScoreRows(Sequence[Sequence[float]]):
    """[tokens][experts]; equal to the lists of the same numbers."""

    def __init__(self, scores: NDArray[Any], step: StepScores | None = None, layer: int = 0) -> None:
        self._scores, self._step, self._layer = scores, step, layer

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
        return _floats(self._scores, dtype)

    def mean_top(self, keep: int) -> Floats:
        """See ``mean_top``: of a layer [experts], taken from its step if it belongs to one."""
        return mean_top(np.asarray(self), keep) if self._step is None else self._step.mean_top(self._layer, keep)


class StepScores:
    """The scores of a step [tokens][layers][experts], which gives them to policies layer by layer."""

    def __init__(self, scores: NDArray[Any]) -> None:
        self._scores = scores
        self._at_once = max(_AT_ONCE // (scores.shape[0] * scores.shape[2]), 1)  # layers
        self._means: dict[tuple[int, int], Floats] = {}  # by number of block and ``keep``

    def rows(self, layer: int) -> ScoreRows:
        """The scores of one layer."""
        return ScoreRows(self._scores[:, layer], self, layer)

    def mean_top(self, layer: int, keep: int) -> Floats:
        """``mean_top`` of a layer, computed for as many layers at once as fit into the processor's cache."""
        block, place = divmod(layer, self._at_once)
        means = self._means.get((block, keep))
        if means is None:
            begin = block * self._at_once
            scores = _floats(self._scores[:, begin : begin + self._at_once])
            means = self._means[block, keep] = mean_top(scores, keep)
        mean: Floats = means[place]
        return mean


def mean_top(scores: Floats, keep: int) -> Floats:
    """The mean over tokens, the first axis, of scores of which each row along the last axis keeps its ``keep`` largest
    ones: the others are 0."""
    rows = top(scores.reshape(-1, scores.shape[-1]), keep).reshape(scores.shape)
    return np.asarray(rows.sum(axis=0) / len(rows))


def top(rows: Floats, keep: int) -> Floats:
    """The rows [rows, entries] with all but the ``keep`` largest entries of each set to 0; of equal entries the first
    stay."""
    if keep >= rows.shape[1]:
        return rows
    single = rows.astype(np.float32)  # four times as fast, and in the same order but for equal ones
    kept = single >= np.partition(single, -keep, axis=1)[:, -keep, None]
    if np.count_nonzero(kept) > keep * len(rows):  # in some rows more than one entry is the last
        crowded = np.flatnonzero(np.count_nonzero(kept, axis=1) > keep)
        kept[crowded[:, None], np.argsort(-rows[crowded], axis=1, kind="stable")[:, keep:]] = False
    return np.where(kept, rows, 0.0)


def _floats(scores: NDArray[Any], dtype: DTypeLike | None = None) -> NDArray[Any]:
    """A copy as floats, as lists hold them, or as ``dtype``."""
    if scores.dtype == np.float16:
        return np.asarray(_of_halves()[scores.view(np.uint16)], dtype)
    return np.array(scores, np.float64 if dtype is None else dtype)


@cache
def _of_halves() -> Floats:
    """The numbers of all 16-bit patterns: to look them up is five times as fast as numpy's conversion."""
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
