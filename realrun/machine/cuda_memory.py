"""Memory of a CUDA machine: a limit on allocations, tensors, uploads, and views of pinned host memory for the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from realrun.errors import RefusedError
from trilane.common.units import gb


def limit_gpu_memory(device: torch.device, memory_bytes: int | None) -> None:
    """Let torch allocate at most ``memory_bytes`` on ``device`` (None: all).

    torch counts all that it holds, including free blocks, but neither contexts nor libraries.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if memory_bytes is None else memory_bytes / total, device)


def memory_in_words(device: torch.device) -> str:
    """Sentence with the GPU's memory in use, its limit and what is free, and advice for a full one."""
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    allocated, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"{gb(allocated)} in use and {gb(held)} held of a limit of {gb(limit)}, {gb(free)} of {gb(total)} free on "
        "the device; choose fewer slots, a smaller batch or a shorter context"
    )


def gpu_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that every stream may use. Raises RefusedError if they do not fit."""
    try:
        tensor = torch.zeros(*shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        needed = gb(math.prod(shape) * dtype.itemsize)
        raise RefusedError(f"cuda: expected room for {needed}, got {memory_in_words(device)}") from error
    torch.cuda.synchronize(device)
    return tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``. Pinned first: a copy from pageable memory would wait for its stream."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class _Bytes:
    r"""Contiguous pinned host memory as bytes on the GPU, at the same address; keeps the memory alive.

    torch accepts any address of CUDA \(of host memory, registered memory only\), takes the device from it, and
    holds a reference to this object. Bytes, because the interface has no name for bfloat16.
    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.numel() * host.element_size(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def gpu_view(host: Tensor, device: torch.device) -> Tensor:
    """``host``, contiguous and pinned, as a tensor on ``device`` with the same memory, shape and type, without a copy.

    Raises RuntimeError (by torch) if the memory is not registered with CUDA, or belongs to another device.
    """
    if not host.is_contiguous():
        raise ValueError(f"gpu_view: expected contiguous memory, got strides {host.stride()} for {tuple(host.shape)}")
    return torch.as_tensor(_Bytes(host), device=device).view(host.dtype).view(host.shape)


def why_unreadable(host: Tensor, device: torch.device) -> str:
    """The reason why GPU kernels do not read the latest values of ``host``, which is pinned; "" if they do."""
    try:
        view = gpu_view(host, device)
        # a plain copy of the view would use the copy engine instead of a kernel
        same = all(torch.equal((view + 0).cpu(), host) for host in map(host.fill_, (1.0, -2.0)))
        return "" if same else "it read something else"
    except RuntimeError as error:
        return str(error)
