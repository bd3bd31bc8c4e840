"""Memory of a CUDA machine: a limit on allocations, tensors, uploads, views of pinned host memory for the GPU, and
words of it that streams wait for.

CUDA's stream memory operations (driver API, "Stream Memory Operations", ``cuStreamWaitValue32``) let a stream wait
until a word of memory has reached a value. So the host can launch work that needs the CPU's results before they are
ready, as it does for work that waits for other streams.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from realrun.errors import LaneError, RefusedError
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


# --- flags that streams wait for --------------------------------------------------------------------------------------


VARIABLE = "TRILANE_STREAM_FLAGS"  # environment variable; 0: the host waits for CPU experts instead of the stream
LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
WAIT_UNTIL_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(*addr - value) >= 0, so the word may wrap around
WORD = 1 << 32
# ``cuStreamWaitValue32`` of a stream's handle, an address, a value and flags; returns a CUresult, 0 for success
WaitValue: TypeAlias = Callable[[int, int, int, int], int]


def driver_wait_value() -> WaitValue | None:
    """The driver's function; None if there is no such library or function, or if the environment disables it."""
    if os.environ.get(VARIABLE) == "0":
        return None
    for name in LIBRARIES:
        try:
            function = ctypes.CDLL(name).cuStreamWaitValue32_v2  # as of CUDA 11.7, the header's cuStreamWaitValue32
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
        return function
    return None


class StreamFlag:
    """The number of pieces of work of one lane that have ended, which streams can wait for.

    The word is in memory of torch's pinned allocator, whose address is the same on the host and on the GPU (CUDA
    programming guide, "Unified Virtual Addressing").
    """

    def __init__(self, wait_value: WaitValue) -> None:
        self._wait_value = wait_value
        self._memory = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._word = ctypes.c_uint32.from_address(self._memory.data_ptr())

    def set(self, number: int) -> None:
        """Signal that all work up to ``number`` has ended. Called by one thread, with ascending numbers."""
        self._word.value = number % WORD

    def hold_up(self, stream: Any, number: int) -> None:
        """Make ``stream`` wait for ``number``. Raises LaneError if the driver refuses."""
        code = self._wait_value(stream.cuda_stream, self._memory.data_ptr(), number % WORD, WAIT_UNTIL_REACHED)
        if code != 0:
            raise LaneError(f"cuStreamWaitValue32: expected 0, got CUresult {code}")


def stream_flag(stream: Any) -> StreamFlag | None:
    """A flag that ``stream`` and others can wait for; None if the driver does not support it."""
    wait_value = driver_wait_value()
    if wait_value is None:
        return None
    flag = StreamFlag(wait_value)
    try:
        flag.hold_up(stream, 0)  # reached already
    except LaneError:
        return None
    return flag
