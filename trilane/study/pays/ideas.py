"""The ideas that ``trilane pays`` judges: what each changes, and the two numbers that decide whether it pays;
and the question whether one pays for this model on that machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from policies.registry import system
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from traces.library import NO_FORECASTS, calibration_of
from traces.synthesis.named import nearest_routing
from trilane.common.errors import TrilaneError
from trilane.common.hints import between
from trilane.common.names import unknown
from trilane.common.schema import check
from trilane.common.units import in_gb
from trilane.engines.memory import need_of
from trilane.engines.question import Question
from trilane.engines.refusals import check_fits
from trilane.engines.routing import synthetic_names
from trilane.study.pays.dimensions import (
    ACCEPTANCE,
    DEFERRED,
    DRAFTS,
    DRAM,
    LINK,
    MEMORY,
    PCIE_SHARE,
    RECALL,
    SHARE,
    THREADS,
    UPLOAD,
    Bounds,
    Dimension,
    Values,
)
from trilane.study.question_scenario import scenario_of
from trilane.study.sweep.axes import PARAMETER, policy_in, takers, vary

# --- the ideas --------------------------------------------------------------------------------------------------------

PolicyValue = str | Mapping[str, Mapping[str, Any]]  # a name, or a name and parameters, as a sweep takes them


class Candidate(NamedTuple):
    """A policy, and the engine that it is played on."""

    policy: PolicyValue
    engine: str = "llama.cpp"

    @property
    def policy_name(self) -> str:
        """The policy's name, without its parameters."""
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
    ``part``: of ``engines.gains``, what is bought, for which an engine as it is has an answer in closed form. ``keys``:
    of the scenario, on both sides.
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
    part: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_policy(self) -> bool:
        """True if the policy itself is what the idea brings."""
        return self.without != self.using

    @property
    def of_parts(self) -> bool:
        """True if both sides are compositions of parts, one of which is the idea."""
        return self.is_policy and self.without[0].policy_name == self.using[0].policy_name

    @property
    def varies_link(self) -> bool:
        """True if the second number is the link's bandwidth."""
        return self.y.axis == LINK.axis

    def place_without(self, x: float, y: float) -> tuple[float, float]:
        """The values of the axes, at a place of the map, that are played without the idea."""
        return self.off.get(self.x.axis, x), self.off.get(self.y.axis, y)

    def place_using(self, x: float, y: float) -> tuple[float, float]:
        """The values of the axes that are played with it."""
        return x * self.times.get(self.x.axis, 1), y * self.times.get(self.y.axis, 1)

    def own(self, prepared: Prepared, x: float | None, y: float | None) -> tuple[float, float]:
        """The machine's values: those that are given, otherwise its own. Raises PaysError for one out of bounds."""
        return self._value(self.x, prepared, x), self._value(self.y, prepared, y)

    def values(self, prepared: Prepared, own: tuple[float, float]) -> tuple[Values, Values]:
        """The values of both axes, which the idea leaves within the bounds."""
        x, y = (
            each.values(prepared, value, self.times.get(each.axis, 1.0))
            for each, value in zip((self.x, self.y), own, strict=True)
        )
        return x, y

    def _value(self, dimension: Dimension, prepared: Prepared, given: float | None) -> float:
        low, high = dimension.bounds(prepared)
        return _value(dimension, prepared, given, (low, high / self.times.get(dimension.axis, 1.0)))


def _value(dimension: Dimension, prepared: Prepared, given: float | None, bounds: Bounds) -> float:
    """The given value, or else the machine's own; a whole number where the own is one. Raises PaysError."""
    own, (low, high) = dimension.own(prepared), bounds
    value, whole = own if given is None else given, isinstance(own, int)
    if not low <= value <= high or (whole and value != int(value)):
        raise PaysError(
            f"pays: {dimension.label}: expected a {'whole ' * whole}number from {low:g} to {high:g}, got {value:g}"
        )
    return int(value) if whole else value


_SPLIT = Candidate("llama.cpp")
WARM_CACHE = Candidate({"llama-cache-lru": {"start": "popular"}}, "llama.cpp-uploads")  # it has answered before
_DEFERRAL = Candidate("kt-deferral", "ktransformers")
_WINDOWS = Candidate("strata", "strata")
_BOUGHT = 0.05  # (ours): below it, a purchase is hard to tell from the error of the simulation
# Weights of a load's time, from loads for later tokens' sake to those for the layer at work alone (ours). With one,
# all loads begin at one rate of the link, where speed jumps (on an RTX 4060 laptop by 6 % with 0.5, by 16 % with 1);
# the fastest of several grows with the link. With prefetches others are less than 1 % faster than these two.
_COPY_WEIGHTS: Mapping[str, tuple[float, ...]] = {"none": (0.4, 0.5, 0.6, 0.7, 0.85, 1.0), "forecast": (0.5, 1.0)}
_ENGINES = {"llama.cpp": "llama.cpp", "llama.cpp@impl": "llama.cpp", "llama.cpp@cache": "llama.cpp-cache"}
_OWN_CACHE = Candidate("llama.cpp@cache", _ENGINES["llama.cpp@cache"])


def _loading(prefetch: str) -> tuple[Candidate, ...]:
    """Compositions that weigh loads differently, so that the faster one loads where that is worth it in the end."""
    common = {"placement": "popular", "prefetch": prefetch}
    weights = _COPY_WEIGHTS[prefetch]
    return tuple(Candidate({"mix": {**common, "copy_weight": weight}}, "graphs") for weight in weights)


IDEAS: Mapping[str, Idea] = {
    "cache": Idea(
        "a cache of experts on the GPU", "whole layers on the GPU", without=(_SPLIT,), using=(WARM_CACHE,),
        x=SHARE, y=UPLOAD, alternative=_OWN_CACHE,
    ),
    "prefetch": Idea(
        "prefetching the next layer's experts", "the same without prefetches",
        without=_loading("none"), using=_loading("forecast"), x=RECALL, y=UPLOAD, off={"noisy_forecast_recall": 0.0},
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
        "a link of twice the bandwidth", "the link as it is", without=(_SPLIT, WARM_CACHE), using=(_SPLIT, WARM_CACHE),
        x=SHARE, y=LINK, times={"pcie_gbps": 2.0}, worth=_BOUGHT,
    ),
    "memory": Idea(
        "a GPU with a quarter more memory", "the memory as it is", without=(_SPLIT, WARM_CACHE),
        using=(_SPLIT, WARM_CACHE), x=MEMORY, y=DRAM, times={"gpu_memory_gb": 1.25}, worth=_BOUGHT, part="GPU memory",
    ),
    "pcie-share": Idea(
        "copying a share of the missed experts", "all of them on the CPU", without=(_WINDOWS,), using=(_WINDOWS,),
        x=PCIE_SHARE, y=LINK, off={"parameters.pcie_share": 0.0},
    ),
    "workers": Idea(
        "twice as many threads for the CPU's experts", "the threads as they are", without=(_WINDOWS,),
        using=(_WINDOWS,), x=THREADS, y=DRAM, times={"threads": 2},
    ),
    "window": Idea(
        "windows with drafts", "one token a window", without=(_WINDOWS,), using=(_WINDOWS,), x=ACCEPTANCE, y=DRAFTS,
        off={"draft_acceptance": 0.0, "draft_tokens": 0}, keys={"rejected_drafts": "drawn"},
    ),
}


def idea_named(name: str) -> Idea:
    """The idea of this name. Raises PaysError for an unknown one."""
    if name not in IDEAS:
        raise PaysError(unknown("idea", name, IDEAS))
    return IDEAS[name]


def candidate_of(policy: str, idea: Idea) -> Candidate:
    """A policy that is played in place of the idea's own, on its own engine, or on that of the idea's."""
    return Candidate(policy, _ENGINES.get(policy, idea.using[-1].engine))


# --- the question about an idea ---------------------------------------------------------------------------------------


MOST_STEPS, FEWEST_STEPS = 48, 20  # decode steps that are played of an answer: fewer of models with more layers
USUAL_LAYERS = 48
PROMPT_ROWS = 32  # prompt tokens that are routed one by one, of each sequence
DRAWS = 3


@dataclass(frozen=True)
class PaysQuestion:
    """An idea (``pays.ideas``), and the model, the machine and the lengths of ``trilane fit``'s question.

    ``draws``: answers, other parts of the routing, over which a gain is a mean with a spread. ``policy``: one in place
    of the idea's own, on both sides unless it is what the idea brings. ``x`` and ``y``: the machine's values on the two
    axes; None: its own. Raises PaysError for an unknown idea and for a policy that cannot have it, ChoiceError for an
    unknown policy.
    """

    name: str
    fit: Question
    draws: Annotated[int, between(1, 100)] = DRAWS
    policy: str | None = None
    x: Annotated[float, between(0, 1e6)] | None = None
    y: Annotated[float, between(0, 1e6)] | None = None

    def __post_init__(self) -> None:
        check(self, PaysError)
        idea_named(self.name)
        if self.fit.disk is not None:
            raise PaysError(
                f"pays: disk {self.fit.disk}: maps are simulated without one; leave --disk out, or compare policies "
                f"above it: trilane compare --set disk={self.fit.disk} --set host_expert_gb=GB"
            )
        if self.policy is not None:
            self._check_policy(system(self.policy).name)

    def _check_policy(self, policy: str) -> None:
        if self.idea.of_parts:
            raise PaysError(
                f"pays: {self.name} compares two compositions of `mix`, and takes no other policy; `trilane ablate` "
                f"tells what the prefetcher of a policy brings"
            )
        for axis in (self.idea.x.axis, self.idea.y.axis):
            if axis.startswith(PARAMETER) and policy not in takers(axis):
                raise PaysError(
                    f"pays: {self.name} needs a policy with the parameter `{axis.removeprefix(PARAMETER)}`, such as "
                    f"{self.idea.using[-1].policy_name}; {policy} has none"
                )

    @property
    def idea(self) -> Idea:
        return idea_named(self.name)

    @property
    def without(self) -> tuple[Candidate, ...]:
        return self.idea.without if self.idea.is_policy else self._in_place_of(self.idea.without)

    @property
    def using(self) -> tuple[Candidate, ...]:
        return self._in_place_of(self.idea.using)

    @property
    def alternative(self) -> Candidate | None:
        """Another policy with the idea, which is played on the machine itself alone; none if the policy was named."""
        return self.idea.alternative if self.policy is None else None

    def _in_place_of(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        return candidates if self.policy is None else (candidate_of(self.policy, self.idea),)

    @property
    def steps(self) -> int:
        layers = self.fit.model_shape.moe_layers
        return max(MOST_STEPS * USUAL_LAYERS**2 // max(layers, USUAL_LAYERS) ** 2, FEWEST_STEPS)

    @property
    def recalls(self) -> tuple[float, ...]:
        """Recall of gates one to three layers ahead, of this model or the nearest that was measured."""
        known = nearest_routing(self.fit.model_shape).forecast_accuracy
        return tuple(known[name] for name in ("gate@1", "gate@2", "gate@3") if name in known)

    def scenario(self) -> Scenario:
        """With the last of the candidates, and the machine's own memory. A named trace leaves its forecasts out where
        their recall is varied. Raises TraceError."""
        trace, calibration = synthetic_names(
            self.fit.model, (self.fit.batch * self.draws, PROMPT_ROWS, self.steps), (), ()
        )
        if self.fit.trace is not None:
            calibration = calibration_of(self.fit.trace) or calibration
            trace = f"{self.fit.trace}{NO_FORECASTS if self.idea.x.axis == RECALL.axis else ''}"
        scenario = scenario_of(self.fit, trace, self.fit.calibration or calibration)
        asked = scenario.with_(
            sampled_steps=self.steps, sampled_prompt_tokens=PROMPT_ROWS, noisy_forecast_recall=self.recalls,
            **self.idea.keys,
        )
        policy, engine = self.using[-1]
        return vary(asked.with_(engine=engine), "policy", policy)


def prepared_with_idea(question: PaysQuestion) -> Prepared:
    """The question, prepared with the idea on the machine as it is.

    Raises FitError for a model that the machine cannot run, PaysError where nothing is offloaded, and what ``prepare``
    raises.
    """
    asked = question.fit
    shape, hardware = asked.model_shape, asked.load_machine()
    if hardware.one_memory:
        raise PaysError(f"pays: {hardware.name} has no GPU with memory of its own, so that nothing is offloaded")
    check_fits(shape, hardware, asked)
    if need_of(shape, hardware, asked.batch, asked.tokens).all_on_gpu:
        raise PaysError(
            f"pays: all experts of {shape.name}, {in_gb(shape.routed_bytes)} GB, fit the memory of the GPU, so that "
            f"nothing is offloaded; name a larger model or a smaller GPU"
        )
    return prepare(question.scenario()).checked()
