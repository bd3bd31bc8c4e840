"""A word of pinned memory that CUDA streams wait for: a signal from the CPU's work to the GPU without the host.

CUDA's stream memory operations (driver API, "Stream Memory Operations", ``cuStreamWaitValue32``) let a stream wait
until a word of memory has reached a value. So the host can launch work that needs the CPU's results before they are
ready, as it does for work that waits for other streams.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from realrun.errors import LaneError

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
