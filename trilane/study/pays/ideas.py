"""The ideas that ``trilane pays`` judges: what each changes, and the two numbers that decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sim.runs.prepare import Prepared
from trilane.common.errors import TrilaneError
from trilane.common.names import unknown
from trilane.study.pays.dimensions import (
    ACCEPTANCE,
    DEFERRED,
    DRAFTS,
    DRAM,
    LINK,
    MEMORY,
    RECALL,
    SHARE,
    UPLOAD,
    Dimension,
)

PolicyValue = str | Mapping[str, Mapping[str, Any]]  # a name, or a name and parameters, as a sweep takes them


class Candidate(NamedTuple):
    """A policy, and the engine that it is played on."""

    policy: PolicyValue
    engine: str = "llama.cpp"


class PaysError(TrilaneError):
    """A question that no map answers; the message says why."""


@dataclass(frozen=True)
class Idea:
    """An idea, and what it is compared with.

    ``subject`` and ``over``: in words, with it and without. ``without`` and ``using``: of these the fastest counts.
    ``x`` and ``y``: the two numbers that decide. By their axes, ``off`` has values that stand for not having the idea,
    and ``times`` what the idea multiplies. ``worth``: the gain from which on it pays; of what must be bought, some gain
    is no reason yet.
    """

    subject: str
    over: str
    without: tuple[Candidate, ...]
    using: tuple[Candidate, ...]
    x: Dimension
    y: Dimension
    off: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    worth: float = 0.0

    def place_without(self, x: float, y: float) -> tuple[float, float]:
        """The values of the axes, at a place of the map, that are played without the idea."""
        return self.off.get(self.x.axis, x), self.off.get(self.y.axis, y)

    def place_using(self, x: float, y: float) -> tuple[float, float]:
        """Those that are played with it."""
        return x * self.times.get(self.x.axis, 1), y * self.times.get(self.y.axis, 1)

    def own(self, prepared: Prepared, x: float | None, y: float | None) -> tuple[float, float]:
        """The machine's values: those that are given, otherwise its own."""
        return _given(x, self.x.own(prepared)), _given(y, self.y.own(prepared))


def _given(value: float | None, own: float) -> float:
    """A value, as a whole number where the own is one."""
    return own if value is None else int(value) if isinstance(own, int) else value


_SPLIT = Candidate("llama.cpp")
_CACHE = Candidate({"llama-cache-lru": {"start": "popular"}}, "llama.cpp-uploads")  # it has answered before
_DEFERRAL = Candidate("kt-deferral", "ktransformers")
_MIX = {"placement": "popular"}
_ENGINES = {"llama.cpp": "llama.cpp", "llama.cpp@impl": "llama.cpp", "llama.cpp@cache": "llama.cpp-cache"}

IDEAS: Mapping[str, Idea] = {
    "cache": Idea(
        "a cache of experts on the GPU", "whole layers on the GPU", without=(_SPLIT,), using=(_CACHE,),
        x=SHARE, y=UPLOAD,
    ),
    "prefetch": Idea(
        "prefetching the next layer's experts", "the same without prefetches",
        without=(Candidate({"mix": {**_MIX, "prefetch": "none"}}, "ideal"),),
        using=(Candidate({"mix": {**_MIX, "prefetch": "forecast"}}, "ideal"),), x=RECALL, y=UPLOAD,
    ),
    "deferral": Idea(
        "deferring experts of low weight to the next layer", "all of a layer's experts awaited",
        without=(_DEFERRAL,), using=(_DEFERRAL,), x=DEFERRED, y=DRAM, off={"parameters.deferred": 0},
    ),
    "speculation": Idea(
        "speculative decoding with a layer that drafts", "one token a step", without=(_SPLIT,), using=(_SPLIT,),
        x=ACCEPTANCE, y=DRAFTS, off={"draft_acceptance": 0.0, "draft_tokens": 0},
    ),
    "link": Idea(
        "a link of twice the bandwidth", "the link as it is", without=(_SPLIT, _CACHE), using=(_SPLIT, _CACHE),
        x=SHARE, y=LINK, times={"pcie_gbps": 2.0}, worth=0.05,
    ),
    "memory": Idea(
        "a GPU with a quarter more memory", "the memory as it is", without=(_SPLIT, _CACHE), using=(_SPLIT, _CACHE),
        x=MEMORY, y=DRAM, times={"gpu_memory_gb": 1.25}, worth=0.05,
    ),
}  # fmt: skip


def idea_named(name: str) -> Idea:
    """Raises PaysError for an unknown idea."""
    if name not in IDEAS:
        raise PaysError(unknown("idea", name, IDEAS))
    return IDEAS[name]


def candidate_of(policy: str, idea: Idea) -> Candidate:
    """A policy that is played in place of the idea's own, on its own engine, or on that of the idea's."""
    return Candidate(policy, _ENGINES.get(policy, idea.using[-1].engine))
