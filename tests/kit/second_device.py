"""A second device for llama.cpp that computes: ``python -m tests.kit.second_device FILE JSON``, in a process.

It is the pretended GPU of ``tests.kit.llama_load``, with memory of the host's under its own name, and what llama.cpp
gives it to compute is handed to the CPU's kernels. So models are split between two devices for real, by llama.cpp's own
scheduler, which copies what one device needs of the other.

JSON: splits, each the number of blocks whose experts stay with the CPU, or null for no second device; and numbers of
tokens by name. Printed, as JSON: the device's name, and for each split, and each number of tokens, the logits, and how
many products of experts the device computed.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from realrun.llama_cpp.abi import gpu_name, llama_library
from realrun.llama_cpp.model import LlamaContext, LlamaModel
from tests.kit.llama_load import BACKEND, KEPT, LIB, P, PretendedGpu, declare, function

OPERATION_AT = 80  # bytes into a tensor: type, buffer, ne, nb


class ComputingDevice(PretendedGpu):
    """Counts the products of experts that it is given."""

    def __init__(self) -> None:
        for name, result, arguments in (
            ("ggml_backend_cpu_init", P, []), ("ggml_backend_graph_compute", c.c_int, [P, P]),
            ("ggml_graph_n_nodes", c.c_int, [P]), ("ggml_graph_node", P, [P, c.c_int]),
        ):
            getattr(LIB, name).restype, getattr(LIB, name).argtypes = result, arguments
        self.kernels = LIB.ggml_backend_cpu_init()
        self.products = 0
        super().__init__()

    def started(self, device: int, words: int) -> int:
        backend = super().started(device, words)
        BACKEND.from_address(backend).compute = function(c.c_int, P, P)(self.computed)
        return backend

    def computed(self, _: int, graph: int) -> int:
        for place in range(LIB.ggml_graph_n_nodes(graph)):
            operation = c.c_int.from_address(LIB.ggml_graph_node(graph, place) + OPERATION_AT).value
            self.products += LIB.ggml_op_name(operation) == b"MUL_MAT_ID"
        return int(LIB.ggml_backend_graph_compute(self.kernels, graph))


def played(
    file: Path, device: ComputingDevice, split: int | None, mapped: bool, numbers: Mapping[str, int]
) -> dict[str, Any]:
    """The logits after each number of tokens, and the products of experts on the device."""
    gpu_layers, found = (0 if split is None else -1), {}
    with (
        LlamaModel(file, gpu_layers=gpu_layers, cpu_expert_layers=split or 0, mmap=mapped, repack=False) as model,
        LlamaContext(model, context=256, piece=64) as context,
    ):
        for name, tokens in numbers.items():
            context.keep(0)
            device.products = 0
            context.decode(np.arange(tokens) % 7 + 3)
            found[name] = {"logits": context.logits().tolist(), "products": device.products}
    return found


def main() -> None:
    file, (splits, numbers) = Path(sys.argv[1]), json.loads(sys.argv[2])
    declare()
    device = ComputingDevice()
    KEPT.append(device)
    llama_library()
    runs = [
        {"split": split, "mapped": mapped, **played(file, device, split, mapped, numbers)}
        for split in splits for mapped in (True, False)
    ]
    print(json.dumps({"name": gpu_name(), "runs": runs}))


if __name__ == "__main__":
    main()
