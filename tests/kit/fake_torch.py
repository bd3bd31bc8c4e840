"""``torch.cuda`` replaced by the GPU for tests: operations in a stream's context are queued on it.

Inside ``on_stream(s)`` every operation is queued instead of done; only views are made at once, and new tensors, which
get their values later. What the host thread does outside a stream's context is done at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realrun.machine.cuda_lanes import CudaLanes, CudaSettings
from tests.kit.fake_cuda import GB, FakeCuda, FakeEvent, FakeGraph, FakeStream


class Deferred(TorchDispatchMode):
    """Operations are put on a stream. What gives no tensor makes the host wait."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __enter__(self) -> Any:
        current = self.stream.cuda.current
        self.before, current[threading.get_ident()] = current.get(threading.get_ident(), "default"), self.stream
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stream.cuda.current[threading.get_ident()] = self.before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._put(func, lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        first = func(*args, **kwargs)
        if not all(isinstance(part, torch.Tensor) for part in tree_leaves(first)):
            self.stream.synchronize()
            return func(*args, **kwargs)
        if not _memory(first) <= _memory((args, kwargs)):  # no view: it is computed again when the stream gets there
            if self.stream.captured is not None:
                self.stream.captured.made.extend(tree_leaves(first))
            self._put(func, lambda: _fill(first, func(*args, **kwargs)))
        return first

    def _put(self, func: Any, compute: Callable[[], object]) -> None:
        if self.stream.captured is None:
            self.stream.cuda.log.append(("do", self.stream.name, func.overloadpacket.__name__))
        self.stream.put(lambda now: compute(), self.stream.op_ns)


def _memory(given: Any) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in tree_leaves(given) if isinstance(part, torch.Tensor)}


def _fill(first: Any, computed: Any) -> None:
    for into, part in zip(tree_leaves(first), tree_leaves(computed), strict=True):
        into.copy_(part)


class OnDevice(TorchFunctionMode):
    """Tensors that are made on the GPU are made on the CPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None)
        face = getattr(args[0], "__cuda_array_interface__", None) if func is torch.as_tensor else None
        if face is not None:
            assert (face["typestr"], face["strides"], face["data"][1]) == ("|u1", None, False)
            view = self.cuda.bytes_at(face["data"][0], face["shape"][0])
            return view if self.cuda.maps_pinned_memory else view.clone()
        if func is torch.Tensor.add and self.cuda.cached is not None:
            return self.cuda.cached.setdefault(args[0].data_ptr(), func(*args))
        if device is not None:
            kwargs["device"] = _here(device)
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*(_here(arg) if isinstance(arg, torch.device) else arg for arg in args), **kwargs)


def _here(device: Any) -> torch.device:
    """The CPU in place of a GPU; a library that makes a model on the meta device gets it there."""
    return torch.device("cpu") if torch.device(device).type == "cuda" else torch.device(device)


class HostGenerator(torch.Generator):
    """Random numbers of the GPU are drawn on the CPU."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, "cpu")


def install(patch: Any, cuda: FakeCuda) -> None:
    """Put ``cuda`` where torch has its own; ``patch``: pytest's monkeypatch."""

    def set_stream(stream: Any) -> None:
        cuda.current[threading.get_ident()] = stream
        if isinstance(stream, FakeStream):
            cuda.current_device[threading.get_ident()] = stream.device

    def set_device(device: Any) -> None:
        cuda.log.append(("set_device", str(device)))
        cuda.current_device[threading.get_ident()] = device.index

    def current_device() -> int:
        return cuda.current_device.get(threading.get_ident(), 0)

    def on_stream(stream: FakeStream, is_current: bool) -> Deferred:
        assert not is_current or current_device() == stream.device, "launched on another device's stream"
        return Deferred(stream)

    def properties(device: Any) -> SimpleNamespace:
        return SimpleNamespace(name="Fake", total_memory=cuda.total_bytes, uuid="ffc79498", L2_cache_size=cuda.l2_bytes)

    def synchronize(device: Any) -> None:
        for stream in cuda.streams:
            stream.synchronize()

    instead = {
        "cudart": lambda: cuda,
        "is_available": lambda: cuda.devices > 0,
        "device_count": lambda: cuda.devices,
        "mem_get_info": lambda device: (cuda.free_bytes, cuda.total_bytes),
        "memory_allocated": lambda device: 3 * GB,
        "memory_reserved": lambda device: 4 * GB,
        "set_per_process_memory_fraction": lambda fraction, device: setattr(cuda, "fraction", fraction),
        "get_per_process_memory_fraction": lambda device: cuda.fraction,
        "get_device_properties": properties,
        "set_device": set_device,
        "current_device": current_device,
        "synchronize": synchronize,
        "Stream": lambda device: FakeStream(cuda, device.index),
        "Event": lambda enable_timing=False: FakeEvent(cuda, enable_timing),
        "current_stream": lambda device=None: cuda.current.get(threading.get_ident(), "default"),
        "set_stream": set_stream,
        "_sleep": cuda.sleep,
        "CUDAGraph": lambda: FakeGraph(cuda),
        "graph_pool_handle": list,
        "graph": cuda.capture,
    }
    for name, function in instead.items():
        patch.setattr(torch.cuda, name, function)
    patch.setattr("realrun.machine.cuda_streams.on_stream", on_stream)
    patch.setattr(torch, "Generator", HostGenerator)
    patch.setattr("time.perf_counter_ns", lambda: cuda.now_ns)
    patch.setattr("realrun.machine.cuda_memory.driver_wait_value", lambda: cuda.wait_value if cuda.has_flags else None)


@contextmanager
def fake_machine(cuda: FakeCuda, **given: Any) -> Iterator[CudaLanes]:
    """A machine on ``cuda``; ``given``: its settings."""
    with pytest.MonkeyPatch.context() as patch, OnDevice(cuda):
        install(patch, cuda)
        machine = CudaLanes(CudaSettings(cpu_threads=1, **given))
        cuda.log.clear()
        try:
            yield machine
        finally:
            cuda.error = None
            machine.close()
