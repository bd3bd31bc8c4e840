"""Machines of parts, as tests ask for them."""

from __future__ import annotations

from typing import Any

from sim.machine.assembly import assembled_name
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.parts import all_parts


def assemble(gpu: str, memory: str | None = None, cpu: str | None = None, **counts: Any) -> Hardware:
    """The machine with these parts; ``counts`` as ``assembled_name`` has them."""
    return load_hardware(assembled_name(gpu, memory, cpu, **counts))


def memory_names() -> list[str]:
    """Names of the memories in the catalogue."""
    return [part.name for part in all_parts() if part.kind == "memory"]
