"""The feed-forward network of one expert, as the library computes it for any family, for one expert at a time.

A *kernel* defines what an expert computes with its weights: an experts module of the library (its flags ``has_gate``,
``has_bias`` and ``is_transposed``, its ``_apply_gate`` and ``act_fn``; transformers/integrations/moe.py, 5.17 to 5.23),
or ``SwiGlu``. Results equal those of the library's ``grouped_mm`` to the bit: same products, same order.

An expert's rows are given by a list of numbers, or by a slice if there is only one row: a gated expert then takes five
kernels instead of ten, without a list on the GPU.

In replays the CPU computes SwiGLU experts in one native call each, of bfloat16 or with weights in blocks. The native
kernel adds in another order than torch, so results differ by rounding. ``generate``, whose results equal the library's
to the bit, uses torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from realrun.errors import RefusedError
from realrun.experts.store import ExpertLayout
from realrun.machine.native_ffn import NativeFfn, native_ffn
from realrun.machine.weight_formats import FORMATS, Q4_0, Q8_0, BlockFormat
from traces.models.names import parted
from traces.models.quantisation import weight_blocks
from traces.models.shape import ModelShape

Choices: TypeAlias = Tensor | slice  # numbers int64 of several choices, or the slice of one (see ``addressed``)


@dataclass(frozen=True)
class SwiGlu:
    """The kernel of most families, for experts without a model: silu(gate) * up, or silu(up) without a gate."""

    has_gate: bool = True
    has_bias = False
    is_transposed = False

    def act_fn(self, inner: Tensor) -> Tensor:
        """SiLU."""
        return functional.silu(inner)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class InOneCall(ABC):
    """A kernel that can compute a whole weighted expert in one call."""

    @abstractmethod
    def compute(
        self, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool,
    ) -> bool:
        """As ``weighted_ffn`` or, if ``scattered``, ``compute_into`` with parts ``out``; False: it cannot do this one.
        """


def check_kernel(experts: nn.Module) -> None:
    """Raises RefusedError for an experts module that ``expert_ffn`` cannot compute."""
    name = type(experts).__name__
    if not all(hasattr(experts, flag) for flag in ("has_gate", "has_bias", "is_transposed", "_apply_gate")):
        raise RefusedError(
            f"{name}: expected an experts module of the library's registry (`use_experts_implementation`); this family "
            "computes its experts in another way, which is not supported"
        )
    if getattr(experts, "has_post_expert_norm", False):
        raise RefusedError(f"{name}: its experts end with a norm, which is not supported")
    if getattr(experts, "_is_expert_parallel", False):
        raise RefusedError(f"{name}: its experts are spread over processes; load the model in one process")


def expert_ffn(kernel: Any, views: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Apply one expert with the weights ``views`` to its rows: [rows, H] -> [rows, H], in the weights' type."""
    first = "gate_up_proj" if kernel.has_gate else "up_proj"
    inner = _linear(kernel, views, first, x)
    inner = kernel._apply_gate(inner) if kernel.has_gate else kernel.act_fn(inner)
    return _linear(kernel, views, "down_proj", inner)


def addressed(choices: Tensor) -> Choices:
    """The index of rows for the ``choices`` of one expert, which are in host memory.

    A single choice becomes a slice. Several do not, even if evenly spaced: an expert's time is measured by its number
    of rows, so nothing else may change its kernels.
    """
    if len(choices) != 1:
        return choices
    only = int(choices)
    return slice(only, only + 1)


def weighted_ffn(
    kernel: Any, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int,
    out: Tensor | None = None,
) -> Tensor:
    """One expert's weighted rows [choices, H]: number n * top_k + j is choice j of token n of ``x`` [N, H].

    ``choices``: of this expert; ``weights`` [N * k]: the router's; ``out``: the rows' destination.
    """
    if out is not None and isinstance(kernel, InOneCall) and kernel.compute(
        views, x, choices, weights, top_k, out, scattered=False
    ):
        return out
    rows = expert_ffn(kernel, views, x[_tokens(choices, top_k)])
    return torch.mul(rows, weights[choices].unsqueeze(-1), out=out)


def compute_into(
    parts: Tensor, kernel: Any, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int
) -> None:
    """Write one expert's share of a layer into its rows of ``parts`` [N * k, H]; see ``weighted_ffn``.

    The layer's output is the sum of ``parts.view(N, k, H)`` over k, independent of where and when experts ran.
    """
    if isinstance(kernel, InOneCall) and kernel.compute(views, x, choices, weights, top_k, parts, scattered=True):
        return
    if isinstance(choices, slice):
        weighted_ffn(kernel, views, x, choices, weights, top_k, parts[choices])
    else:
        parts[choices] = weighted_ffn(kernel, views, x, choices, weights, top_k)


def _tokens(choices: Choices, top_k: int) -> Choices:
    """The tokens of the choices."""
    if isinstance(choices, slice):
        token = choices.start // top_k
        return slice(token, token + 1)
    return choices // top_k


def _linear(kernel: Any, views: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = views[name]
    out = x.to(weight.dtype) @ (weight if kernel.is_transposed else weight.T)
    return out.add_(views[f"{name}_bias"]) if kernel.has_bias else out


# Rows up to which weights in blocks are multiplied by the native kernel; beyond, unpacking them once for torch's
# product is faster. The limit differs between processors; this one is chosen, not measured.
MOST_ROWS = 64
_TYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)  # of weights, x, router weights, out


@dataclass(frozen=True)
class NativeSwiGlu(SwiGlu, InOneCall):
    """``SwiGlu``, with torch on a GPU, and on the CPU for more rows than ``ffn`` is fast for."""

    ffn: NativeFfn = field(kw_only=True)

    def compute(
        self, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool,
    ) -> bool:
        """As in ``InOneCall``; False on a GPU, for many rows, and for tensors of other types or with gaps."""
        if x.device.type != "cpu":
            return False
        numbers = _numbers(choices)
        if not 0 < len(numbers) <= self.ffn.only_up_to:
            return False
        first, down = _matrices(self, views)
        types = (first.dtype, x.dtype, weights.dtype, out.dtype)
        if types != _TYPES or not (x.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            return False
        threads = torch.get_num_threads()  # of the calling lane
        self.ffn(first, down, x, numbers, weights, top_k, out, scattered=scattered, threads=threads)
        return True


@dataclass(frozen=True)
class BlockSwiGlu(SwiGlu, InOneCall):
    """``SwiGlu`` with weights in ``blocks``, which are unpacked before every product on a GPU.

    ``ffn`` None: torch unpacks the weights on the CPU too, which takes tens of times as long for one token.
    """

    blocks: BlockFormat = field(kw_only=True)
    ffn: NativeFfn | None = field(kw_only=True)

    def compute(
        self, views: Mapping[str, Tensor], x: Tensor, choices: Choices, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool,
    ) -> bool:
        """As in ``InOneCall``; always True. ``weights`` and ``out`` are float32, ``x`` is bfloat16."""
        if x.device.type == "cpu" and self.ffn is not None and len(numbers := _numbers(choices)) <= MOST_ROWS:
            self.ffn(
                *_matrices(self, views), x.contiguous(), numbers, weights.contiguous(), top_k, out,
                scattered=scattered, threads=torch.get_num_threads(), blocks=self.blocks,
            )
            return True
        plain, unpacked = SwiGlu(self.has_gate), {name: self.blocks.unpacked(view) for name, view in views.items()}
        if scattered:
            compute_into(out, plain, unpacked, x, choices, weights, top_k)
        else:
            weighted_ffn(plain, unpacked, x, choices, weights, top_k, out)
        return True


def _numbers(choices: Choices) -> Tensor:
    return torch.tensor((choices.start,)) if isinstance(choices, slice) else choices.contiguous()


def _matrices(kernel: SwiGlu, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return views["gate_up_proj" if kernel.has_gate else "up_proj"], views["down_proj"]


_DTYPES: Mapping[float, torch.dtype] = {16.0: torch.bfloat16, 32.0: torch.float32}
_BY_BITS: Mapping[float, BlockFormat] = {8.5: Q8_0, 4.5: Q4_0}  # for shapes without a format in their name


class ExpertShape(NamedTuple):
    """``dtype`` of an expert's input, and of its weights unless they are in blocks; its buffer's layout; its kernel."""

    dtype: torch.dtype
    layout: ExpertLayout
    kernel: SwiGlu

    @classmethod
    def of(cls, shape: ModelShape) -> ExpertShape:
        """The shape of a model's routed experts. Raises RefusedError if there are no kernels for their weights."""
        gated, sizes = shape.matrices_per_expert == 3, (shape.hidden, shape.expert_width)
        if len(set(shape.expert_bytes)) > 1:
            raise RefusedError(
                f"{shape.name}: expected experts of one size, these differ by layer; it can only be simulated"
            )
        if blocks := _blocks_of(shape):
            kernel = BlockSwiGlu(gated, blocks=blocks, ffn=native_ffn())
            return cls(torch.bfloat16, ExpertLayout.from_shape(*sizes, blocks, gated), kernel)
        dtype = _dtype_of(shape)
        ffn = native_ffn() if dtype == torch.bfloat16 else None  # which supports no other
        plain = SwiGlu(gated) if ffn is None else NativeSwiGlu(gated, ffn=ffn)
        return cls(dtype, ExpertLayout.from_shape(*sizes, dtype, gated), plain)


def _blocks_of(shape: ModelShape) -> BlockFormat | None:
    """The blocks that all routed experts are in, of which rows are whole ones; None: there are no such."""
    blocks, name = _BY_BITS.get(shape.weight_bits), parted(shape.name).weights
    if name is not None:
        each = weight_blocks(shape, name)
        kinds = {*each.gate_up, *each.down}
        blocks = FORMATS.get(kinds.pop(), blocks) if len(kinds) == 1 else None
    whole = blocks is not None and not (shape.hidden % blocks.weights or shape.expert_width % blocks.weights)
    return blocks if whole else None


def _dtype_of(shape: ModelShape) -> torch.dtype:
    if shape.weight_bits not in _DTYPES:
        raise RefusedError(
            f"{shape.name}: expected weights of 16 or 32 bits (bfloat16, float32), 8.5 (q8_0) or 4.5 (q4_0, q4_k), got "
            f"{shape.weight_bits:g}: other quantised experts, mixed ones, and rows that are not whole blocks, can only "
            "be simulated"
        )
    return _DTYPES[shape.weight_bits]
