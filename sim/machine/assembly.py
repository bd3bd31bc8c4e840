"""Machines put together from parts, for questions about hardware that nobody has a preset or a profile of."""

from __future__ import annotations

from sim.machine.hardware import Hardware, load_hardware


def assemble(
    gpu: str,
    memory: str,
    cpu: str | None = None,
    *,
    cores: int | None = None,
    channels: int | None = None,
    pcie: str | None = None,
    ram_gb: int | None = None,
) -> Hardware:
    """The machine with these parts (``sim.machine.parts`` names them), every number with its origin.

    ``cpu``: None is a generic one that such a memory usually has. ``cores`` in use and memory ``channels``: else the
    CPU's. ``pcie``: the slot as generation x lanes, ``"3x16"``; else x16 of the board's generation. ``ram_gb``: host
    memory in GB of 2^30 bytes. The same machine by name: ``load_hardware("rtx-4080+ddr5-5600+16-cores")``.
    Raises HardwareError for an unknown part, and for parts that do not go together.
    """
    words = {
        "{}-cores": cores, "{}-channels": channels, "pcie-{}": pcie, "{}gb": ram_gb,
    }  # fmt: skip
    counts = [form.format(value) for form, value in words.items() if value is not None]
    return load_hardware("+".join([gpu, memory, *([cpu] if cpu else []), *counts]))
