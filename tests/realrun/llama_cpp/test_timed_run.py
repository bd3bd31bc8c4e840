"""Filling the cache of a benchmark: every token computed, or copies of the first ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from realrun.llama_cpp.bench import BenchPoint, time_points
from realrun.llama_cpp.timed_run import LlamaBenchContext


class Cache(LlamaBenchContext):
    """A context that notes what it is asked for."""

    def __init__(self, tokens: int = 0, *, repeats: bool) -> None:
        self.tokens, self.repeats = tokens, repeats
        self.asked: list[str] = []
        self.model = cast("Any", SimpleNamespace(vocabulary=10))

    def decode(self, tokens: Any, **_: bool) -> None:
        self._note("computed", len(tokens))
        self.tokens += len(tokens)

    def repeat(self, tokens: int) -> None:
        self._note("copied", tokens)
        self.tokens += tokens

    def keep(self, tokens: int) -> None:
        self._note("kept", tokens)
        self.tokens = tokens

    def use_threads(self, threads: int) -> None: ...

    def _note(self, what: str, tokens: int) -> None:
        self.asked.append(f"{what} {tokens}")


def filled(*, copies: bool, tokens: int, before: int = 0) -> list[str]:
    cache = Cache(before, repeats=copies)
    cache.fill(tokens)
    assert cache.tokens == tokens
    return cache.asked


def test_every_token_is_computed_in_pieces() -> None:
    assert filled(copies=False, tokens=1300) == ["computed 512", "computed 512", "computed 276"]
    assert filled(copies=False, tokens=1300, before=1200) == ["computed 100"]


def test_copies_double_the_cache_and_a_token_moves_their_keys() -> None:
    assert filled(copies=True, tokens=1300) == [
        "computed 512", "copied 512", "computed 1", "kept 1024", "copied 276", "computed 1", "kept 1300"
    ]


@pytest.mark.parametrize(("before", "asked"), [(0, ["computed 300"]), (100, ["computed 200"])])
def test_few_tokens_are_computed_all_the_same(before: int, asked: list[str]) -> None:
    assert filled(copies=True, tokens=300, before=before) == asked


def test_points_fill_the_cache_further_and_cut_it() -> None:
    cache = Cache(repeats=True)
    time_points(cache, [(BenchPoint(1, depth, 128), 1) for depth in (0, 600, 600, 100)])
    assert cache.asked == [
        "computed 128", "kept 0", "computed 512", "copied 88", "computed 1", "kept 600", "computed 128", "kept 600",
        "computed 128", "kept 600", "kept 100", "computed 128", "kept 100",
    ]
