"""Machines of Strata's requests, by the titles of their parts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from sim.machine.assembly import assembled_name
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import is_unified, part, taken
from sim.machine.plausibility import HardwareError
from trilane.common.units import GIB
from trilane.engines.strata.requests import StrataRequest
from trilane.engines.tune.machine_found import usual_ram

_RAM = re.compile(r"(lp)?ddr\dx?-\d+", re.IGNORECASE)
_CHANNELS = re.compile(r"(\d+) channels")
_SOCKETS = re.compile(r"2 ?x (.*)")
_SERVERS = re.compile("epyc|xeon", re.IGNORECASE)
_SERVER, _SLOWEST = "server", "ddr4-2133"
_NEAR = 0.1  # of a card's memory: what a driver keeps
GB_PER_S = 1e9


def machines_of(request: StrataRequest) -> tuple[Hardware, ...]:
    """The machine with each of its cards, which are alike, or whose titles are joined by " + ".

    Raises HardwareError for another number of titles, and what ``machine_of`` raises.
    """
    titles = request.gpu.split(" + ")
    if len(titles) == 1:
        return (machine_of(request),) * request.n_gpus
    if len(titles) != request.n_gpus:
        raise HardwareError(f"expected {request.n_gpus} GPUs, got {request.gpu!r}")
    return tuple(machine_of(replace(request, gpu=title, gpu_vram_gb=None)) for title in titles)


def machine_of(request: StrataRequest) -> Hardware:
    """The machine of a request, with the link's rate that the engine read at its start.

    A CPU that is not named, or not known, is a usual one with a core for each of the pool's threads; memory that is not
    named, a usual one of the CPU; DDR3 is taken as the slowest DDR4. A card with other memory than its kind has is that
    kind otherwise. Raises HardwareError for a GPU that is not named, or not known.
    """
    if not request.gpu.strip():
        raise HardwareError("no GPU is named")
    vram = None if request.gpu_vram_gb is None else round(request.gpu_vram_gb * GIB)
    slots = re.findall(r"(?:(\S+) at )?PCIe ([345])\.0 x(\d+)", request.note)
    pcie = next((f"{number}x{lanes}" for card, number, lanes in slots if card in ("", request.gpu.split()[-1])), None)
    hardware = load_hardware(_assembled(request.gpu, vram, request.cpu, request.ram, request.workers, pcie))
    if vram is not None and abs(vram / hardware.gpu.memory_bytes - 1) > _NEAR and not hardware.one_memory:
        hardware = hardware.with_numbers({"gpu.memory_bytes": vram})
    if request.pcie_gb_s is None or hardware.one_memory:
        return hardware
    return hardware.with_numbers({"link.h2d_bytes_per_s": request.pcie_gb_s * GB_PER_S})


@cache
def _assembled(gpu: str, vram: int | None, cpu: str, ram: str, workers: int | None, pcie: str | None) -> str:
    card = _card(gpu, vram)
    if is_unified(card):
        return assembled_name(card)
    sockets, title = (2, match[1]) if (match := _SOCKETS.fullmatch(cpu)) else (None, cpu)
    name = _cpu(re.sub(r"\(.*\)", "", title).strip())
    named = _RAM.search(ram)
    channels = int(match[1]) if (match := _CHANNELS.search(ram)) else None
    cores = workers + 1 if workers and (name is None or part("cpu", name).most_cores) else None
    memory = named[0].lower() if named else usual_ram(name)
    memory = _SLOWEST if memory.startswith("ddr3") else memory
    name = _SERVER if name is None and _SERVERS.search(title) else name
    return assembled_name(card, memory, name, cores=cores, sockets=sockets, channels=channels, pcie=pcie)


def _card(gpu: str, vram: int | None) -> str:
    """Name of the card's part; of one with other memory than its kind has, that kind's. Raises HardwareError."""
    try:
        return taken("gpu", gpu, vram).name
    except HardwareError:
        return taken("gpu", re.sub(r" \d+ ?GB", "", gpu)).name


def _cpu(title: str) -> str | None:
    """Name of the CPU's part; None for one that is not in the catalogue."""
    try:
        return taken("cpu", title).name if title else None
    except HardwareError:
        return None
