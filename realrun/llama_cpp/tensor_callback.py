"""Tensors of a running graph, by name: llama.cpp calls back for those that are asked for, once they are computed."""

from __future__ import annotations

from ctypes import CDLL, POINTER, cast
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from realrun.errors import RefusedError
from realrun.llama_cpp.structs import EvalCallback, TensorHead

DTYPES = {0: np.float32, 1: np.float16, 26: np.int32}  # enum ggml_type


@dataclass(frozen=True)
class GraphTensor:
    """A tensor of the graph that runs; its values are there while an observer takes it."""

    library: CDLL
    handle: int

    @property
    def name(self) -> str:
        return str(self.library.ggml_get_name(self.handle).decode())

    def values(self) -> NDArray[Any]:
        """A copy, the slowest dimension first, without leading ones: [tokens, features] where ggml's ``ne`` is
        (features, tokens, 1, 1); of one token [1, features]. Raises RefusedError for quantised types.
        """
        head = self._head
        if head.type not in DTYPES:
            raise RefusedError(f"llama.cpp: expected {self.name} in 32 or 16 bits, found ggml type {head.type}")
        raw = np.empty(self.library.ggml_nbytes(self.handle), np.uint8)
        self.library.ggml_backend_tensor_get(self.handle, raw.ctypes.data, 0, raw.nbytes)
        shape, strides = tuple(head.ne)[::-1], tuple(head.nb)[::-1]
        values = np.ndarray(shape, DTYPES[head.type], raw, strides=strides)  # a view, such as the first k, has gaps
        first = next((axis for axis in range(2) if shape[axis] != 1), 2)
        return np.ascontiguousarray(values[(0,) * first])

    def source(self, number: int) -> GraphTensor:
        """What it is computed from: of a product of matrices 0 is the weights, 1 what they are multiplied with."""
        return GraphTensor(self.library, self._head.src[number])

    @property
    def _head(self) -> TensorHead:
        return cast(self.handle, POINTER(TensorHead)).contents


class Observer(Protocol):
    """Says which tensors it wants, and takes them as they are computed."""

    def wants(self, name: str) -> bool: ...

    def take(self, tensor: GraphTensor) -> None: ...


class TensorCallback:
    """An observer as the library calls it. An exception of the observer ends the graph and is raised by ``check``."""

    def __init__(self, library: CDLL, observer: Observer) -> None:
        self._library = library
        self._observer = observer
        self._error: BaseException | None = None
        self.pointer = EvalCallback(self._called)

    def check(self) -> None:
        """Raise what the observer raised since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _called(self, handle: int, asked: bool, user_data: Any) -> bool:
        tensor = GraphTensor(self._library, handle)
        try:
            if asked:
                return self._observer.wants(tensor.name)
            self._observer.take(tensor)
        except BaseException as error:  # must not cross the C code; `check` raises it
            self._error = error
            return False
        return True
