"""The graphics cards of the machine at hand, by the names that its programs and files give them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trilane.common.units import MIB

_FIELDS = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
_NVIDIA = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
_MACOS = ("system_profiler", "SPDisplaysDataType")
_WINDOWS = ("powershell", "-NoProfile", "-Command", "(Get-CimInstance Win32_VideoController).Name")
_DRM = Path("/sys/class/drm")  # of Linux, as are the files that name what stands there by numbers
_AMD_NAMES = (Path("/usr/share/libdrm/amdgpu.ids"), Path("/opt/amdgpu/share/libdrm/amdgpu.ids"))
_PCI_NAMES = (Path("/usr/share/misc/pci.ids"), Path("/usr/share/hwdata/pci.ids"))
_AMD, _INTEL = "1002", "8086"
_CARDS = re.compile(  # not the graphics of a CPU, nor the adapters of remote desktops
    r"\b(nvidia|geforce|quadro|tesla|rtx|gtx|rx|instinct|apple)\b|radeon (pro|ai pro|vii)|\barc (pro )?[ab]\d"
)


class CardFound(NamedTuple):
    """A card; None: not told. ``pcie``: generation and lanes of its slot."""

    name: str
    memory_bytes: int | None = None
    pcie: str | None = None
    gpu_cores: int | None = None


def cards_found() -> list[CardFound]:
    """The graphics cards: those of ``nvidia-smi`` first, others from the system; and Apple's GPU."""
    nvidia = _of_nvidia(answer_of(_NVIDIA))
    others = [card for card in _of_system() if _CARDS.search(re.sub(r"\(\w+\)", "", card.name.lower()))]
    return [*nvidia, *(card for card in others if not (nvidia and "nvidia" in card.name.lower()))]


def answer_of(command: Sequence[str]) -> str:
    """Output of a program; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _of_nvidia(text: str) -> list[CardFound]:
    """The cards of ``nvidia-smi``; none where the text has another form. Unified memory has no size there."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        CardFound(name, int(memory) * MIB if memory.isdigit() else None, _slot(generation, width))
        for name, memory, generation, width in (row for row in rows if len(row) == len(_FIELDS.split(",")))
        if memory.isdigit() or "NVIDIA" in name
    ]


def _slot(generation: str, width: str) -> str | None:
    return f"{generation}x{width}" if f"{generation}{width}".isdigit() else None


def _of_system() -> list[CardFound]:
    """The display adapters that the system lists."""
    if sys.platform == "darwin":
        return _of_macos(answer_of(_MACOS))
    if sys.platform == "win32":
        return [CardFound(line.strip()) for line in answer_of(_WINDOWS).splitlines() if line.strip()]
    devices = sorted(card / "device" for card in _DRM.glob("card*") if re.fullmatch(r"card\d+", card.name))
    return [card for device in devices if (card := _of_linux(device)) is not None]


def _of_macos(text: str) -> list[CardFound]:
    """The chips of ``system_profiler``, with the cores of Apple's GPUs."""
    chips = re.split(r"^ *Chipset Model: *", text, flags=re.MULTILINE)[1:]
    cores = [re.search(r"Total Number of Cores: (\d+)", chip) for chip in chips]
    return [
        CardFound(chip.partition("\n")[0].strip(), gpu_cores=int(count[1]) if count else None)
        for chip, count in zip(chips, cores, strict=True)
    ]


def _of_linux(device: Path) -> CardFound | None:
    """The card of AMD or Intel at a place of the kernel's; None for others, and where no file has its name."""
    vendor, number, revision, memory = (
        _read(device / name).removeprefix("0x") for name in ("vendor", "device", "revision", "mem_info_vram_total")
    )
    name = _amd_name(number, revision) if vendor == _AMD else ""
    name = name or (_pci_name(vendor, number) if vendor in (_AMD, _INTEL) else "")
    return CardFound(name, int(memory) if memory.isdigit() else None) if name else None


def _amd_name(number: str, revision: str) -> str:
    """The name that libdrm has for a device and its revision, which tells cards of one chip apart."""
    wanted = (number.lower(), revision.lower())
    lines = (line.split(",", 2) for path in _AMD_NAMES for line in _read(path).splitlines())
    rows = (tuple(cell.strip() for cell in line) for line in lines if len(line) == 3)
    return next((name for device, rev, name in rows if (device.lower(), rev.lower()) == wanted), "")


def _pci_name(vendor: str, number: str) -> str:
    """The name that the list of PCI devices has for all cards of a chip."""
    for path in _PCI_NAMES:
        of_vendor = re.search(rf"^{vendor}  .*\n((?:[\t#].*\n)*)", _read(path), re.MULTILINE)
        if of_vendor and (named := re.search(rf"^\t{number}  (.*)", of_vendor[1], re.MULTILINE)):
            return named[1]
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
