"""Descriptions of the CPU and the GPU for profiles; "unknown" where the system has no answer."""

from __future__ import annotations

import platform
import subprocess

import torch

from realrun.machine.cores import usable_cores
from realrun.machine.native_ffn import cpu_kernel
from trilane.common.computer import cpu_name

UNKNOWN = "unknown"
SMI_FIELDS = {
    "driver": "driver_version",
    "pcie_generation": "pcie.link.gen.max",  # the current one falls while the GPU is idle
    "pcie_width": "pcie.link.width.max",
}


def cpu_facts() -> dict[str, str]:
    """Model and usable cores of the CPU, the system's kernel, and the kernel of CPU experts in replays."""
    return {
        "cpu": cpu_name() or platform.machine() or UNKNOWN,
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


def _smi(gpu: str) -> dict[str, str]:
    """The answers of the driver's tool, which are "[N/A]" or similar for missing ones."""
    query = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        values = dict(zip(SMI_FIELDS, answer.strip().split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return dict.fromkeys(SMI_FIELDS, UNKNOWN)
    return {field: UNKNOWN if value.startswith("[") or value == "N/A" else value for field, value in values.items()}
