"""The vocabulary of runs as data: devices, links, lanes, kinds of spans, kinds of forecasts, labels.

Figures and pages make colours, marks and sentences of these names; nothing else compares such words.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from policies.protocols import Needs, PolicyKind

# --- lanes ------------------------------------------------------------------------------------------------------------


class Device(StrEnum):
    """A processor; each device is a lane."""

    HOST = "host"  # the thread that plans and launches kernels
    GPU = "gpu"
    CPU = "cpu"  # the cores that compute experts


class Link(StrEnum):
    """One direction of the connection between two memories; each link is a lane."""

    H2D = "h2d"
    D2H = "d2h"
    DISK = "disk"  # into the host's memory, of machines whose host has no room for all experts


LANES = tuple(lane.value for lane in (*Device, Link.H2D, Link.D2H))  # of every run
MOST_GPUS = 4
CARD_LANES = (Device.GPU.value, Link.H2D.value, Link.D2H.value)  # of each GPU: of GPU 1 gpu1, h2d1, d2h1
FURTHER_LANES = (  # of some runs; peer1: to GPU 1 from the one before
    Link.DISK.value, *(f"{lane}{number}" for number in range(1, MOST_GPUS) for lane in (*CARD_LANES, "peer"))
)
GPU_LANES = (Device.GPU.value, *(lane for lane in FURTHER_LANES if lane.startswith(Device.GPU)))


def lanes_with(present: Collection[str]) -> tuple[str, ...]:
    """The lanes of a run with spans on those that are ``present``."""
    return (*LANES, *(lane for lane in FURTHER_LANES if lane in present))


# --- spans ------------------------------------------------------------------------------------------------------------


SPAN_KINDS = (  # docs/design.md, Time model, says when each starts
    "launch", "program", "plan", "foresee", "observe", "wait", "draft", "attention", "gate", "shared", "expert",
    "combine", "speculate", "precompute", "deferred", "demand", "prefetch", "swap", "writeback", "activations",
    "gate_up", "fetch", "partial_sum", "hand_over", "result", "routing", "place", "evict", "release", "withdraw",
    "read", "read_ahead", "keep", "drop",
)
COPIES = ("demand", "swap", "prefetch")  # of experts, to the GPU
READS = ("read", "read_ahead")  # of experts, from the disk
INSTANT = ("place", "evict", "release", "withdraw", "keep", "drop")  # of no length

# --- forecasts --------------------------------------------------------------------------------------------------------

FROM_GATE_INPUT = ("gate", "residual", "quasi_hidden", "estimator")  # kinds that cost the GPU one more gate
FROM_EXPERTS = ("partial",)  # kinds that cost it the next attention and gate, after the experts that are on the GPU

# --- labels -----------------------------------------------------------------------------------------------------------


class Label(StrEnum):
    """A fact that a reader of a run must know; other labels are free text."""

    CLAIRVOYANT = "clairvoyant"
    CHANGES_ROUTING = "changes routing"
    SYNTHETIC_TRACE = "synthetic trace"
    SYNTHETIC_PROMPTS = "synthetic prompts"
    CHOSEN_SCORES = "scores of the chosen experts alone"
    SHORT_PROMPT = "short prompt"  # not played at its length: no time to first token
    SPECULATIVE = "speculative decoding"  # a step makes more than one token


_OF_KIND = {PolicyKind.CLAIRVOYANT: Label.CLAIRVOYANT, PolicyKind.CHANGES: Label.CHANGES_ROUTING}


def labels_of_needs(needs: Needs) -> tuple[Label, ...]:
    """The labels that follow from what a policy needs and does."""
    marks = ((needs.future, Label.CLAIRVOYANT), (needs.changes_routing, Label.CHANGES_ROUTING))
    return tuple(label for holds, label in marks if holds)


def kind_of(labels: Collection[str]) -> PolicyKind:
    """The kind of policy that labels tell of."""
    return next((kind for kind, label in _OF_KIND.items() if label in labels), PolicyKind.KEEPS)
