"""What may make a real machine slower than its parts promise: their own notes, and what this answer asks of them."""

from __future__ import annotations

from collections.abc import Sequence

from sim.machine.parts import part
from sim.machine.units import GIB, in_gb
from trilane.study.fit.asked import Asked
from trilane.study.fit.memory_needed import HOST_RESERVE_BYTES, all_on_gpu, host_memory_of
from trilane.study.fit.policy_result import Answer
from trilane.study.fit.sensitivity import WORTH_NAMING, Gain

LARGEST_DIMM_GB = {"ddr4": 32, "ddr5": 64}  # unbuffered, of 2^30 bytes; vendors' catalogues, from memory
DIMMS = 2  # a channel, on a desktop's board
DESKTOP_CHANNELS = 2
UBATCH = 512  # prompt tokens that llama.cpp computes at once unless told otherwise


def traps_of(asked: Asked, best: Answer, gains: Sequence[Gain]) -> tuple[str, ...]:
    """One sentence a trap. ``gains``: what better parts would give."""
    return (*asked.setting.hardware.notes, *_pinning(asked, best, gains), *_room(asked, best), *_pieces(asked))


def _room(asked: Asked, best: Answer) -> list[str]:
    """More host memory than a desktop's platform takes, where nobody said how much there is."""
    question = asked.question
    if question.ram is None or host_memory_of(question, asked.setting.hardware) is not None:
        return []
    memory = part("memory", question.ram.lower())
    channels = round(asked.setting.hardware.cpu.dram_bytes_per_s / memory.transfers_per_s.value / 8)
    most = channels * DIMMS * LARGEST_DIMM_GB.get(memory.family, 0)
    need = best.host_bytes + HOST_RESERVE_BYTES
    if channels > DESKTOP_CHANNELS or not most or need <= most * GIB:
        return []
    return [
        f"The host must hold {in_gb(need)} GB, and {channels} channels of {memory.title} take about {most} GB "
        f"({DIMMS} modules each): name a server's CPU or channels, or the memory that there is (--ram-gb)"
    ]


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
    link, measured = asked.setting.hardware.link, asked.setting.hardware.measured
    matters = any(gain.part == "PCIe" and gain.tpot >= WORTH_NAMING for gain in gains)
    if link.copies != "pinned" or measured or not matters:
        return []
    return [
        f"{best.policy} copies experts out of {in_gb(best.host_bytes)} GB of pinned memory. Where so much cannot be "
        f"pinned (Windows, WSL2, containers), copies reach {link.pageable_fraction:.0%} of the rate counted here"
    ]
