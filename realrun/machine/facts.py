"""Descriptions of the CPU and the GPU for profiles; "unknown" where the system has no answer."""

from __future__ import annotations

import platform
import re
import subprocess

import torch

from realrun.machine.cores import usable_cores
from realrun.machine.native_ffn import CPU_LIST, cpu_kernel

UNKNOWN = "unknown"
SMI_FIELDS = {
    "driver": "driver_version",
    "pcie_generation": "pcie.link.gen.max",  # the current one falls while the GPU is idle
    "pcie_width": "pcie.link.width.max",
}


def cpu_facts() -> dict[str, str]:
    """Model and usable cores of the CPU, the system's kernel, and the kernel of CPU experts in replays."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(usable_cores())),
        "kernel": platform.release() or UNKNOWN,
        "cpu_kernel": cpu_kernel(),
    }


def gpu_facts(device: torch.device) -> dict[str, str]:
    """Name and memory, versions of driver and CUDA, PCIe generation and width of the GPU in this mainboard."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": str(properties.total_memory),
        "cuda": torch.version.cuda or UNKNOWN,
        "torch": torch.__version__,
        **_smi(f"GPU-{properties.uuid}"),
    }


def _cpu_model() -> str:
    """The name of the processor, which Linux gives on x86 and few others."""
    text = CPU_LIST.read_text() if CPU_LIST.exists() else ""
    named = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine() or UNKNOWN


def _smi(gpu: str) -> dict[str, str]:
    """The answers of the driver's tool, which are "[N/A]" or similar for missing ones."""
    query = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        values = dict(zip(SMI_FIELDS, answer.strip().split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return dict.fromkeys(SMI_FIELDS, UNKNOWN)
    return {field: UNKNOWN if value.startswith("[") or value == "N/A" else value for field, value in values.items()}
