"""Sizes of the host's memory: those that there are, up to what the board's slots, or a chip with one memory, take."""

from __future__ import annotations

from sim.machine.parts import is_unified, part
from trilane.common.units import GIB
from trilane.engines.memory import host_memory_of
from trilane.engines.question import Question

RAM_SIZES_GIB = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # as machines have them


def larger_ram_gib(question: Question) -> list[int]:
    """Sizes beyond the machine's own, in GiB, up to ``most_ram_gib``; none where its own is not known."""
    there, most = host_memory_of(question, question.load_machine()), most_ram_gib(question)
    return [size for size in RAM_SIZES_GIB if there is not None and there < size * GIB and size <= (most or size)]


def most_ram_gib(question: Question) -> int | None:
    """Memory that the largest modules of all channels have together, or with which a chip is sold; None where neither
    is known."""
    if is_unified(question.gpu):
        return part("gpu", question.gpu or "").memory_bytes.value // GIB
    channels = channels_of(question)
    if channels is None or (modules := part("memory", question.ram or "").modules) is None:
        return None
    return channels * modules.slots.value * modules.gib.value[-1] * (question.sockets or 1)


def channels_of(question: Question) -> int | None:
    """Memory channels of the CPU, or those that such modules usually have; None where no memory is named."""
    if question.ram is None:
        return None
    own = part("memory", question.ram).channels
    cpu = None if question.cpu is None else part("cpu", question.cpu)
    return (own if cpu is None or cpu.channels is None else cpu.channels).value
