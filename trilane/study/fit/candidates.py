"""Who is asked, unless the question names others: one of each kind that keeps the routing, and the clairvoyant run."""

from __future__ import annotations

from policies.registry import system
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape
from trilane.study import CLAIRVOYANT_POLICY
from trilane.study.fit.memory_needed import all_on_gpu
from trilane.study.fit.question import Question

RESIDENT = "llama.cpp"  # where every expert is on the GPU there is nothing to decide, and no staging
LLAMA_CPP = "llama.cpp@impl"
KEEPING = (  # one of each kind: others (fiddler, on-demand, hybrimoe) are near these, or are played more slowly
    LLAMA_CPP,
    "ktransformers",
    "mixtral-offloading@impl",
    "dali",
    "best-exact",
)


def candidates(question: Question, shape: ModelShape, hardware: Hardware) -> tuple[str, ...]:
    """The policies to play; beside those to choose from, llama.cpp and the clairvoyant run.

    Raises ChoiceError for a name that is none.
    """
    named = _named(question)
    return (RESIDENT,) if all_on_gpu(shape, hardware, question) else named


def may_be_recommended(question: Question, policy: str) -> bool:
    """Was the policy asked for, or does it only stand beside those that were?"""
    return question.policies is None or policy in (*question.policies, RESIDENT)


def forecasts_read(question: Question) -> tuple[str, ...]:
    """The forecasts of which some candidate may read one, such as ``gate@1``. Raises ChoiceError."""
    keys = {key for name in _named(question) for key in system(name).needs.forecasts}
    return tuple(f"{kind}@{lookahead}" for kind, lookahead in sorted(keys) if kind != "oracle")


def _named(question: Question) -> tuple[str, ...]:
    chosen = KEEPING if question.policies is None else question.policies
    for name in chosen:
        system(name)
    return tuple(dict.fromkeys((*chosen, LLAMA_CPP, CLAIRVOYANT_POLICY)))
