"""What llama.cpp says that it would allocate, for files and settings: ``python -m tests.kit.llama_load`` in a process.

It asks with ``no_alloc``, which plans all buffers and allocates none. The GPU is a pretended one: a device of type GPU
that can compute everything, whose buffers are aligned as CUDA's are; the plan of graphs and buffers is llama.cpp's own.
Reads JSON from standard input, ``{"file", "gpu", "cpu_layers", "settings": [{"c", "ub", "fa", "kv", "np"}]}``, and
writes for each setting the MiB of the caches and of the compute buffers. Without settings the model is loaded, mapped
and not planned, and the MiB of its weights are written. Structures: build 11549.
"""

from __future__ import annotations

import ctypes as c
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import xllamacpp.xllamacpp as wheel

LIB = c.CDLL(wheel.__file__)
P, SIZE, BOOL = c.c_void_p, c.c_size_t, c.c_bool
KEPT: list[Any] = []
LINES: list[str] = []


def record(name: str, fields: str, kind: Any = P) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": [(field, kind) for field in fields.split()]})


MODEL = type("Model", (c.Structure,), {"_fields_": [
    ("devices", P), ("overrides", P), *[(name, c.c_int32) for name in ["layers", "split", "load_mode", "lazy", "main"]],
    *[(name, P) for name in ["tensor_split", "progress", "progress_data", "keys"]],
    *[(name, BOOL) for name in ["vocabulary", "check", "extra", "no_host", "no_alloc", "mtp"]], ("rest", c.c_byte * 64),
]})
CONTEXT = type("Context", (c.Structure,), {"_fields_": [
    *[(name, c.c_uint32) for name in ["c", "b", "ub", "np", "rs", "outputs", "per_sequence"]],
    *[(name, c.c_int32) for name in ["threads", "batch_threads", "type", "rope", "pooling", "attention", "fa"]],
    ("rope_scaling", c.c_float * 6), ("yarn", c.c_uint32), ("defrag", c.c_float), ("callback", P), ("data", P),
    ("type_k", c.c_int), ("type_v", c.c_int), ("abort", P), ("abort_data", P), ("new", P),
    *[(name, BOOL) for name in ["embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "unified"]],
    ("rest", c.c_byte * 96),
]})
BUFFERS = record("Buffers", "name allocate allocate_n alignment most size size_n is_host device context")
BACKEND = record("Backend", "guid name free a b d e f synchronize g h i j compute k l m device context")
DEVICE = record(
    "Device", "name words memory type properties start buffers host_buffers pointer computes reads wants a b d owner e"
)
OVERRIDE = type("Override", (c.Structure,), {"_fields_": [("pattern", c.c_char_p), ("buffers", P)]})
PROPERTIES = type("Properties", (c.Structure,), {"_fields_": [
    ("name", c.c_char_p), ("words", c.c_char_p), ("free", SIZE), ("total", SIZE), ("type", c.c_int),
    ("id", c.c_char_p), ("can", BOOL * 5),
]})
OWNER = type("Owner", (c.Structure,), {"_fields_": [
    ("version", c.c_int), *[(name, P) for name in ["name", "count", "device", "function", "context"]],
]})


def function(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], int]:
    """The address of a function of Python's, for C."""

    def made(given: Callable[..., Any]) -> int:
        KEPT.append(c.CFUNCTYPE(result, *arguments)(given))
        return c.cast(KEPT[-1], P).value or 0

    return made


def declare() -> None:
    for name, result, arguments in (
        ("llama_model_default_params", MODEL, []), ("llama_context_default_params", CONTEXT, []),
        ("llama_model_load_from_file", P, [c.c_char_p, MODEL]), ("llama_init_from_model", P, [P, CONTEXT]),
        ("ggml_backend_cpu_buffer_type", P, []), ("ggml_backend_buft_alloc_buffer", P, [P, SIZE]),
        ("ggml_backend_register", None, [P]), ("llama_free", None, [P]), ("ggml_op_name", c.c_char_p, [c.c_int]),
    ):
        getattr(LIB, name).restype, getattr(LIB, name).argtypes = result, arguments
    LIB.llama_log_set(P(function(None, c.c_int, c.c_char_p, P)(lambda _, line, __: LINES.append(line.decode()))), None)
    LIB.llama_backend_init()


class PretendedGpu:
    """Made of addresses that it must keep."""

    def __init__(self) -> None:
        self.name, self.host_name = c.create_string_buffer(b"GPU0"), c.create_string_buffer(b"GPU_Host")
        self.buffers, self.host, self.device, self.owner = BUFFERS(), BUFFERS(), DEVICE(), OWNER()
        name, cpu = function(P, P)(lambda _: c.addressof(self.name)), LIB.ggml_backend_cpu_buffer_type()
        self.buffers.name, self.buffers.device = name, c.addressof(self.device)
        self.buffers.alignment = function(SIZE, P)(lambda _: 128)
        self.buffers.allocate = function(P, P, SIZE)(self.allocated)
        self.host.name = function(P, P)(lambda _: c.addressof(self.host_name))
        self.host.alignment, self.host.is_host = function(SIZE, P)(lambda _: 32), function(BOOL, P)(lambda _: True)
        self.host.allocate = function(P, P, SIZE)(lambda _, size: LIB.ggml_backend_buft_alloc_buffer(cpu, size))
        self.host.device = c.addressof(self.device)
        device = self.device
        device.name = device.words = name
        device.memory = function(None, P, c.POINTER(SIZE), c.POINTER(SIZE))(self.memory)
        device.type = function(c.c_int, P)(lambda _: 1)
        device.properties = function(None, P, c.POINTER(PROPERTIES))(self.properties)
        device.start = function(P, P, P)(self.started)
        device.buffers = function(P, P)(lambda _: c.addressof(self.buffers))
        device.host_buffers = function(P, P)(lambda _: c.addressof(self.host))
        device.computes = function(BOOL, P, P)(lambda *_: True)
        device.reads = function(BOOL, P, P)(lambda _, buffers: buffers == c.addressof(self.buffers))
        device.wants = function(BOOL, P, P)(lambda _, tensor: rows(tensor) >= 32)
        device.owner = c.addressof(self.owner)
        self.owner.version, self.owner.name = 2, name
        self.owner.count = function(SIZE, P)(lambda _: 1)
        self.owner.device = function(P, P, SIZE)(lambda *_: c.addressof(self.device))
        self.owner.function = function(P, P, c.c_char_p)(lambda *_: 0)
        LIB.ggml_backend_register(c.addressof(self.owner))

    def allocated(self, _: int, size: int) -> int:
        """Memory of the host's under this device's name: of states, which are allocated all the same."""
        cpu = LIB.ggml_backend_cpu_buffer_type()
        buffer = LIB.ggml_backend_buft_alloc_buffer(cpu, size + 256)
        fields = (P.from_address(buffer + 8 * at) for at in range(20))
        next(field for field in fields if field.value == cpu).value = c.addressof(self.buffers)
        return int(buffer)

    @staticmethod
    def memory(_: int, free: Any, total: Any) -> None:
        free[0] = total[0] = 2**40

    def properties(self, _: int, given: Any) -> None:
        its = given[0]
        its.name = its.words = self.name.value
        its.free, its.total, its.type, its.id = 2**40, 2**40, 1, None
        its.can[:] = [True, False, False, False, False]

    def started(self, _: int, __: int) -> int:
        backend = BACKEND()
        KEPT.append(backend)
        backend.guid, backend.name, backend.device = c.addressof(self.name), self.device.name, c.addressof(self.device)
        backend.free = backend.synchronize = function(None, P)(lambda _: None)
        backend.compute = function(c.c_int, P, P)(lambda *_: 0)
        return c.addressof(backend)


def rows(tensor: int) -> int:
    """Tokens of an operation, as CUDA counts them (ggml-cuda.cu, get_op_batch_size)."""
    sizes = [c.c_int64.from_address(tensor + 16 + 8 * at).value for at in range(4)]
    operation = LIB.ggml_op_name(c.c_int.from_address(tensor + 80).value)
    if operation in (b"GET_ROWS", b"MUL_MAT"):
        return 0 if operation == b"GET_ROWS" else sizes[1]
    return sizes[2] if operation in (b"MUL_MAT_ID", b"ROPE") else sizes[1] * sizes[2] * sizes[3]


def loaded(file: str, cpu_layers: int, planned_only: bool) -> int:
    """A model with the experts of so many blocks on the host; mapped, without copies in another order of rows."""
    params = LIB.llama_model_default_params()
    params.no_alloc, params.load_mode, params.extra = planned_only, int(not planned_only), planned_only
    overrides = (OVERRIDE * (cpu_layers + 1))()
    for block in range(cpu_layers):
        overrides[block].pattern = rb"blk\.%d\.ffn_(up|down|gate|gate_up)_(ch|)exps" % block
        overrides[block].buffers = LIB.ggml_backend_cpu_buffer_type()
    params.overrides = c.addressof(overrides) if cpu_layers else None
    model = LIB.llama_model_load_from_file(file.encode(), params)
    if not model:
        sys.exit("".join(LINES[-5:]))
    return int(model)


def planned(model: int, setting: dict[str, int]) -> dict[str, list[float]]:
    """MiB of a context's buffers, in the order of llama.cpp's log."""
    params = LIB.llama_context_default_params()
    params.c, params.ub, params.np, params.fa = setting["c"], setting["ub"], setting["np"], setting["fa"]
    params.b, params.swa_full = max(2048, setting["ub"]), False
    params.type_k = params.type_v = setting["kv"]
    LINES.clear()
    context = LIB.llama_init_from_model(model, params)
    text = "".join(LINES)
    if not context:
        sys.exit(text[-1000:])
    LIB.llama_free(context)
    patterns = {"cache": r"size =\s*([\d.]+) MiB \(\s*\d+ cells", "compute": r"compute buffer size =\s*([\d.]+) MiB"}
    return {name: [float(size) for size in re.findall(pattern, text)] for name, pattern in patterns.items()}


def main() -> None:
    asked = json.load(sys.stdin)
    declare()
    if asked["gpu"]:
        KEPT.append(PretendedGpu())
    model = loaded(asked["file"], asked["cpu_layers"], bool(asked["settings"]))
    weights = [float(size) for size in re.findall(r"model buffer size =\s*([\d.]+) MiB", "".join(LINES))]
    print(json.dumps([planned(model, setting) for setting in asked["settings"]] or weights))


if __name__ == "__main__":
    main()
