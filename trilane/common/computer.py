"""The computer at hand: name of its CPU, physical cores and memory, on Linux, macOS and Windows."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

System = Literal["linux", "windows", "macos"]
CPU_LIST = Path("/proc/cpuinfo")  # of Linux
_BRAND = ("sysctl", "-n", "machdep.cpu.brand_string")  # of macOS
_REGISTRY_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"  # of Windows


def cpu_name() -> str:
    """Marketing name of the CPU, such as "AMD Ryzen 5 5600X 6-Core Processor"; "" where the system has none."""
    if sys.platform == "darwin":
        name = _brand()
    elif sys.platform == "win32":
        name = _registry_name()
    else:
        name = _listed_name()
    return name.strip() or platform.processor()


def operating_system() -> System:
    """The system at hand; every other one counts as Linux."""
    return "macos" if sys.platform == "darwin" else "windows" if sys.platform == "win32" else "linux"


def memory_bytes() -> int:
    """Size of the host's memory in bytes, a little less than that of its modules."""
    import psutil

    return int(psutil.virtual_memory().total)


def threads_a_core() -> int:
    """Logical cores of one physical core: 2 with SMT; 1 also where some cores have it and others have not."""
    import psutil

    return max((psutil.cpu_count() or 1) // physical_core_count(), 1)


def physical_core_count() -> int:
    """Physical cores of the computer; logical ones where the system does not tell them apart."""
    import psutil

    return int(psutil.cpu_count(logical=False) or psutil.cpu_count() or 1)


def _listed_name() -> str:
    try:
        text = CPU_LIST.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    named = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)  # on x86 and few others
    return named[1] if named else ""


def _brand() -> str:
    try:
        return subprocess.run(_BRAND, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _registry_name() -> str:
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _REGISTRY_KEY) as key:  # type: ignore[attr-defined, unused-ignore]
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0])  # type: ignore[attr-defined, unused-ignore]
    except OSError:
        return ""
