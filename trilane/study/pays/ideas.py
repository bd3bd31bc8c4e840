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
from trilane.study.sweep.axes import policy_in

PolicyValue = str | Mapping[str, Mapping[str, Any]]  # a name, or a name and parameters, as a sweep takes them


class Candidate(NamedTuple):
    """A policy, and the engine that it is played on."""

    policy: PolicyValue
    engine: str = "llama.cpp"

    @property
    def policy_name(self) -> str:
        """Without its parameters."""
        return policy_in(self.policy)[0]


class PaysError(TrilaneError):
    """A question that no map answers; the message says why."""


@dataclass(frozen=True)
class Idea:
    """An idea, and what it is compared with.

    ``subject`` and ``over``: in words, with it and without. ``without`` and ``using``: of these the fastest counts.
    ``x`` and ``y``: the two numbers that decide. By their axes, ``off`` has values that stand for not having the idea,
    and ``times`` what the idea multiplies. ``worth``: the gain from which on it pays; of what must be bought, some gain
    is no reason yet. ``alternative``: another policy with the same idea, for comparison on the machine itself.
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
    alternative: Candidate | None = None

    @property
    def is_policy(self) -> bool:
        """Whether the policy itself is what the idea brings."""
        return self.without != self.using

    @property
    def of_parts(self) -> bool:
        """Whether both sides are compositions of parts, one of which is the idea."""
        return self.is_policy and self.without[0].policy_name == self.using[0].policy_name

    def place_without(self, x: float, y: float) -> tuple[float, float]:
        """The values of the axes, at a place of the map, that are played without the idea."""
        return self.off.get(self.x.axis, x), self.off.get(self.y.axis, y)

    def place_using(self, x: float, y: float) -> tuple[float, float]:
        """Those that are played with it."""
        return x * self.times.get(self.x.axis, 1), y * self.times.get(self.y.axis, 1)

    def own(self, prepared: Prepared, x: float | None, y: float | None) -> tuple[float, float]:
        """The machine's values: those that are given, otherwise its own. Raises PaysError for one out of bounds."""
        return _value(self.x, prepared, x), _value(self.y, prepared, y)


def _value(dimension: Dimension, prepared: Prepared, given: float | None) -> float:
    """As a whole number where the own is one."""
    own, (low, high) = dimension.own(prepared), dimension.bounds(prepared)
    value, whole = own if given is None else given, isinstance(own, int)
    if not low <= value <= high or (whole and value != int(value)):
        raise PaysError(
            f"pays: {dimension.label}: expected a {'whole ' * whole}number from {low:g} to {high:g}, got {value:g}"
        )
    return int(value) if whole else value


_SPLIT = Candidate("llama.cpp")
_CACHE = Candidate({"llama-cache-lru": {"start": "popular"}}, "llama.cpp-uploads")  # it has answered before
_DEFERRAL = Candidate("kt-deferral", "ktransformers")
_BOUGHT = 0.05  # (ours): below it, a purchase is hard to tell from the error of the simulation
_MIX = {"placement": "popular"}
_ENGINES = {"llama.cpp": "llama.cpp", "llama.cpp@impl": "llama.cpp", "llama.cpp@cache": "llama.cpp-cache"}
_OWN_CACHE = Candidate("llama.cpp@cache", _ENGINES["llama.cpp@cache"])

IDEAS: Mapping[str, Idea] = {
    "cache": Idea(
        "a cache of experts on the GPU", "whole layers on the GPU", without=(_SPLIT,), using=(_CACHE,),
        x=SHARE, y=UPLOAD, alternative=_OWN_CACHE,
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
        "speculative decoding with a draft layer", "one token a step", without=(_SPLIT,), using=(_SPLIT,),
        x=ACCEPTANCE, y=DRAFTS, off={"draft_acceptance": 0.0, "draft_tokens": 0},
    ),
    "link": Idea(
        "a link of twice the bandwidth", "the link as it is", without=(_SPLIT, _CACHE), using=(_SPLIT, _CACHE),
        x=SHARE, y=LINK, times={"pcie_gbps": 2.0}, worth=_BOUGHT,
    ),
    "memory": Idea(
        "a GPU with a quarter more memory", "the memory as it is", without=(_SPLIT, _CACHE), using=(_SPLIT, _CACHE),
        x=MEMORY, y=DRAM, times={"gpu_memory_gb": 1.25}, worth=_BOUGHT,
    ),
}


def idea_named(name: str) -> Idea:
    """Raises PaysError for an unknown idea."""
    if name not in IDEAS:
        raise PaysError(unknown("idea", name, IDEAS))
    return IDEAS[name]


def candidate_of(policy: str, idea: Idea) -> Candidate:
    """A policy that is played in place of the idea's own, on its own engine, or on that of the idea's."""
    return Candidate(policy, _ENGINES.get(policy, idea.using[-1].engine))
