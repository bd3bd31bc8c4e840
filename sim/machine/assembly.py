"""Names of machines put together from parts, for hardware that nobody has a preset or a profile of."""

from __future__ import annotations

from sim.machine.parts import PartKind, part


def assembled_name(
    gpu: str,
    memory: str,
    cpu: str | None = None,
    *,
    cores: int | None = None,
    channels: int | None = None,
    pcie: str | None = None,
    ram_gb: int | None = None,
) -> str:
    """The name that ``load_hardware`` knows the machine by: ``rtx-4080+ddr5-5600+16-cores``.

    Parts by the names of ``sim.machine.parts``. ``cpu``: None is a generic one that such a memory usually has.
    ``cores`` in use and memory ``channels``: else the CPU's. ``pcie``: the slot as generation x lanes, ``"3x16"``; else
    x16 of the board's generation. ``ram_gb``: host memory in GB of 2^30 bytes.
    Raises HardwareError for a GPU, memory or CPU that is none.
    """
    named: dict[PartKind, str | None] = {"gpu": gpu, "memory": memory, "cpu": cpu}
    parts = [part(kind, name.lower()).name for kind, name in named.items() if name is not None]
    counts = {"{}-cores": cores, "{}-channels": channels, "pcie-{}": pcie, "{}gb": ram_gb}
    return "+".join([*parts, *(form.format(value) for form, value in counts.items() if value is not None)])
