"""Who is asked, unless the question names others: one of each kind that keeps the routing, and the clairvoyant run."""

from __future__ import annotations

from policies.registry import system
from sim.fit.asked import Asked
from sim.fit.fits import all_on_gpu

RESIDENT = "llama.cpp"  # where every expert is on the GPU there is nothing to decide, and no staging
LLAMA_CPP = "llama.cpp@impl"
CLAIRVOYANT_POLICY = "oracle"
KEEPING = (  # one of each kind: others (fiddler, on-demand, hybrimoe) are near these, or are played more slowly
    LLAMA_CPP,
    "ktransformers",
    "mixtral-offloading@impl",
    "dali",
    "best-exact",
)


def candidates(asked: Asked) -> tuple[str, ...]:
    """The policies to play; beside those that the question names, llama.cpp and the clairvoyant run.

    Raises ChoiceError for a name that is none.
    """
    question = asked.question
    chosen = KEEPING if question.policies is None else question.policies
    for name in chosen:
        system(name)
    if all_on_gpu(asked.setting.shape, asked.setting.hardware, question):
        return (RESIDENT,)
    return tuple(dict.fromkeys((*chosen, LLAMA_CPP, CLAIRVOYANT_POLICY)))
