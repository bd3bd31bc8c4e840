"""What may make a real machine slower than its parts promise: their own notes, and what this answer asks of them."""

from __future__ import annotations

from collections.abc import Sequence

from sim.fit.asked import Asked
from sim.fit.fits import all_on_gpu
from sim.fit.limits import WORTH_NAMING, Gain
from sim.fit.played import Answer
from sim.memory import GB

UBATCH = 512  # prompt tokens that llama.cpp computes at once unless told otherwise


def traps_of(asked: Asked, best: Answer, gains: Sequence[Gain]) -> tuple[str, ...]:
    """One sentence a trap. ``gains``: what better parts would give."""
    return (*asked.setting.hardware.notes, *_pinning(asked, best, gains), *_pieces(asked))


def _pieces(asked: Asked) -> list[str]:
    """What a prompt in pieces costs."""
    tokens = asked.question.context * asked.question.batch
    pieces = -(-tokens // UBATCH)
    if pieces == 1 or all_on_gpu(asked.setting.shape, asked.setting.hardware, asked.question):
        return []
    return [
        f"The first token is that of a prompt computed in one piece (llama.cpp: -b {tokens} -ub {tokens}, and memory "
        f"for it). In pieces of {UBATCH}, its default, experts that are not on the GPU are brought {pieces} times"
    ]


def _pinning(asked: Asked, best: Answer, gains: Sequence[Gain]) -> list[str]:
    """What it takes that copies are fast, where they matter."""
    link, measured = asked.setting.hardware.link, asked.setting.hardware.profile is not None
    matters = any(gain.part == "PCIe" and gain.tpot >= WORTH_NAMING for gain in gains)
    if link.copies != "pinned" or measured or not matters:
        return []
    return [
        f"{best.policy} copies experts out of {best.host_bytes / GB:.1f} GB of pinned memory. Where so much cannot be "
        f"pinned (Windows, WSL2, containers), copies reach {link.pageable_fraction:.0%} of the rate counted here"
    ]
