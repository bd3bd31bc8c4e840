"""*Learn*: ten words, and five questions, each with an address to try it at."""

from __future__ import annotations

from typing import NamedTuple

from trilane.page.questions import Query
from trilane.page.view import ViewPlan

WORDS = {
    "expert": "one of the many small networks of a layer; each token uses only a few of them",
    "router": "the part of a layer that chooses them (also: gate)",
    "engine": "the software that runs a model, such as llama.cpp",
    "policy": "the rules that decide where experts are kept and computed",
    "trace": "a record of the experts that a router chose for each token",
    "hit": "an expert that is on the GPU when it is chosen",
    "prefetch": "a copy for a later layer, started before its router has chosen",
    "lane": "a resource that does one piece of work at a time: host, GPU, CPU, each direction of the PCIe link, a "
    "disk",
    "timeline": "what the simulator makes: when each lane is busy, and with what",
    "closed form": "a formula that gives a speed without a timeline",
}


class TryIt(NamedTuple):
    """A question, the address of the view that answers it, and the answer."""

    question: str
    address: str
    answer: str


QUESTIONS = (
    TryIt(
        "What does a cache of experts save?",
        "#/timeline?setting=deepseek-v2-lite&share=60&policies=deepspeed,on-demand",
        "Play the step. Above, all experts of every layer are copied for every token, and the GPU is idle nearly all "
        "the time. Below, on-demand keeps what it has copied in a cache (the grid), until its room is needed: tokens "
        "use many of the experts of the tokens before, and only the missing ones are copied.",
    ),
    TryIt(
        "Why does copying on demand lose to copying ahead?",
        "#/timeline?setting=deepseek-v2-lite&share=60&policies=on-demand,mixtral-offloading",
        "Both have the same cache. On demand, the GPU is idle during each red copy. Below, the next layer's router is "
        "asked early: green copies run while the GPU works on this layer, and fewer red ones are left.",
    ),
    TryIt(
        "When is it faster to let the CPU compute an expert than to copy it?",
        "#/timeline?setting=deepseek-v2-lite&share=40&policies=on-demand,fiddler",
        "One token reads each expert once. A copy moves all of its weights over PCIe; the CPU reads the same weights "
        "from its own memory, which is often quicker, and sends back only a result. In a batch the CPU has more to "
        "compute for every weight, and the copy wins earlier.",
    ),
    TryIt(
        "What limits my machine: the GPU, its memory, or the RAM?",
        "#/machine?gpu=rtx-3060&cpu=ryzen-5-5600&ram=ddr4-3200&ram_gb=32",
        "The colour of a bar says it. Where experts have no room on the card, the speed follows the RAM's bandwidth "
        "and the size of the GPU's memory; where all of them fit, only the GPU's bandwidth counts.",
    ),
    TryIt(
        "Does more GPU memory help in steps or all along?",
        "#/what-if?gpu=rtx-3060&cpu=ryzen-5-5600&ram=ddr4-3200&ram_gb=32&model=qwen3-30b-a3b",
        "Drag the slider of the GPU's memory: every layer that fits takes its share of the CPU's work away, so the "
        "gain grows as the rest becomes small, and stops where all experts fit.",
    ),
)


def learn(query: Query) -> ViewPlan:
    """Words and questions."""
    return ViewPlan({"kind": "learn", "words": WORDS, "questions": [one._asdict() for one in QUESTIONS]})
