"""The answer to "what will this model do on that machine?": what fits, which policy, what times, what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sim.fit.asked import resolved
from sim.fit.contest import play_all
from sim.fit.limits import Gain, gains_of, limit_of, yardstick
from sim.fit.llama_cpp_setting import LlamaCppSetting, llama_cpp_setting
from sim.fit.memory_needed import Memory, check_fits, memory_of
from sim.fit.played import Answer, answer_of, bounds_beside
from sim.fit.question import Question
from sim.fit.routing import routing_for
from sim.fit.traps import traps_of
from sim.fit.trust import Support, supports_of
from sim.machine.hardware import load_hardware
from sim.uncollected import uncollected
from traces.catalogue import load_model

SHOWN = 4


@dataclass(frozen=True)
class Fit:
    """Everything on the page of ``trilane fit``. ``best`` is the least time until the last token of the answer."""

    question: Question
    model: str
    machine: str
    about: str
    routing: str
    runtime: str  # the question's, or "measured" on a profile's machine
    memory: Memory
    best: Answer
    bounds: Mapping[str, float]  # beside it: lower bound and null model, ms
    steps: int  # decode steps that were played; see sim.fit.answer_steps
    runners_up: tuple[Answer, ...]
    beside: tuple[Answer, ...]  # keep the routing, too, but were not asked for
    changing: tuple[Answer, ...]  # faster or not, they change the routing; their prompts are short
    clairvoyant: Answer | None
    refused: Mapping[str, str]
    gains: tuple[Gain, ...]
    limited_by: str
    llama_cpp: LlamaCppSetting | None
    supports: tuple[Support, ...]
    traps: tuple[str, ...]

    @property
    def offloads(self) -> bool:
        """Are there experts that the GPU has no room for?"""
        return not self.memory.all_fits

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "offloads": self.offloads}


def fit(question: Question) -> Fit:
    """Answer a question.

    Raises FitError for what cannot run, saying by how many GB, and what ``resolved`` raises for names that are none.
    """
    check_fits(load_model(question.shape), load_hardware(question.hardware), question)
    with uncollected():
        return _answered(question)


def _answered(question: Question) -> Fit:
    routing = routing_for(question)
    asked = resolved(question, routing)
    contest = play_all(asked)
    best, *others = [answer_of(asked, played) for played in contest.exact[:SHOWN]]
    gains = gains_of(asked, yardstick(asked, best.policy, best.tpot_ms))
    setting = asked.setting
    return Fit(
        question=question,
        model=setting.shape.name,
        machine=setting.hardware.name,
        about=setting.hardware.about,
        routing=routing.told,
        runtime=question.runtime if setting.hardware.profile is None else "measured",
        memory=memory_of(contest.exact[0].prepared.memory, setting.shape, best.host_bytes),
        best=best,
        bounds=bounds_beside(asked, contest.exact[0]),
        steps=asked.steps,
        runners_up=tuple(others),
        beside=tuple(answer_of(asked, played) for played in contest.beside),
        changing=tuple(answer_of(asked, played) for played in contest.changing),
        clairvoyant=next((answer_of(asked, played) for played in contest.clairvoyant), None),
        refused=contest.refused,
        gains=gains,
        limited_by=limit_of(gains),
        llama_cpp=llama_cpp_setting(asked, [*contest.exact, *contest.beside]),
        supports=supports_of(asked, gains),
        traps=traps_of(asked, best, gains),
    )
