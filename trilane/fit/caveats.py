"""Caveats: what may make a real machine slower than its parts promise, from their notes and from the answer."""

from __future__ import annotations

from collections.abc import Sequence

from sim.machine.hardware import Hardware
from sim.machine.parts import part
from sim.runs.prepare import Prepared
from trilane.common.units import GIB, in_gb
from trilane.engines.gains import WORTH_NAMING, Gain
from trilane.engines.memory import HOST_RESERVE_BYTES, host_memory_of
from trilane.engines.question import Question
from trilane.fit.policy_result import PolicyResult
from trilane.fit.prepared_question import all_on_gpu

LARGEST_DIMM_GIB = {"ddr4": 32, "ddr5": 64}  # unbuffered modules; vendors' catalogues, from memory
DIMMS = 2  # a channel, on a desktop's board
DESKTOP_CHANNELS = 2
PIECE = 512  # prompt tokens that llama.cpp computes at once by default


def caveats_of(question: Question, prepared: Prepared, best: PolicyResult, gains: Sequence[Gain]) -> tuple[str, ...]:
    """One sentence per caveat. ``gains``: what better parts would give."""
    return (
        *prepared.hardware.notes, *_pinning(prepared.hardware, best, gains), *_room(question, prepared.hardware, best),
        *_pieces(prepared),
    )


def _room(question: Question, hardware: Hardware, best: PolicyResult) -> list[str]:
    """More host memory than a desktop's platform takes, where its size is not stated."""
    if question.ram is None or host_memory_of(question, hardware) is not None:
        return []
    memory = part("memory", question.ram.lower())
    channels = round(hardware.cpu.dram_bytes_per_s / memory.transfers_per_s.value / 8)
    most = channels * DIMMS * LARGEST_DIMM_GIB.get(memory.family, 0)
    need = best.host_bytes + HOST_RESERVE_BYTES
    if channels > DESKTOP_CHANNELS or not most or need <= most * GIB:
        return []
    return [
        f"The host must hold {in_gb(need)} GB, and {channels} channels of {memory.title} take about {most} GiB "
        f"({DIMMS} modules each): name a server's CPU or channels, or the memory that there is (--ram-gb)"
    ]


def _pieces(prepared: Prepared) -> list[str]:
    """The whole prompt at once, which is not how engines compute it."""
    tokens = (prepared.scenario.prompt_tokens or 0) * prepared.scenario.batch
    if tokens <= PIECE or all_on_gpu(prepared):
        return []
    return [
        f"Policies compute the prompt of {tokens:,} tokens in one piece, for whose buffers no memory is set aside. "
        f"In pieces, as engines do, experts that are not on the GPU are copied once for each piece"
    ]


def _pinning(hardware: Hardware, best: PolicyResult, gains: Sequence[Gain]) -> list[str]:
    """Pinned memory, without which copies are slow, where they matter."""
    link, measured = hardware.link, hardware.measured
    matters = any(gain.part == "PCIe" and gain.tpot >= WORTH_NAMING for gain in gains)
    if link.copies != "pinned" or measured or not matters:
        return []
    return [
        f"{best.policy} copies experts out of {in_gb(best.host_bytes)} GB of pinned memory. Where so much cannot be "
        f"pinned (Windows, WSL2, containers), copies reach {link.pageable_fraction:.0%} of the rate counted here"
    ]
