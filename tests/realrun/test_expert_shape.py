"""Experts that are known by their model's shape alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from realrun.errors import RefusedError  # noqa: E402
from realrun.experts import expert_shape  # noqa: E402
from realrun.experts.expert_ffn import SwiGlu  # noqa: E402
from realrun.experts.expert_shape import ExpertShape  # noqa: E402
from traces.model_shape import ModelShape  # noqa: E402

TOY = ModelShape("toy", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=32, expert_width=16)


@pytest.mark.parametrize(("bits", "dtype"), [(16.0, torch.bfloat16), (32.0, torch.float32)])
@pytest.mark.parametrize("matrices", [3, 2])
def test_type_layout_and_kernel_follow_from_the_shape(
    bits: float, dtype: torch.dtype, matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_shape, "native_ffn", lambda: None)  # see test_native_ffn.py
    shape = replace(TOY, weight_bits=bits, matrices_per_expert=matrices)
    found = ExpertShape.of(shape)
    assert (found.dtype, found.kernel) == (dtype, SwiGlu(has_gate=matrices == 3))
    assert [(part.name, part.shape, part.dtype) for part in found.layout.parts] == [
        ("gate_up_proj", (32, 32), dtype) if matrices == 3 else ("up_proj", (16, 32), dtype),
        ("down_proj", (32, 16), dtype),
    ]
    assert found.layout.bytes == shape.expert_bytes_of(0)


def test_what_we_have_no_kernels_for_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"toy: expected weights of 16 or 32 bits .*, got 4.5: quantised experts"):
        ExpertShape.of(replace(TOY, weight_bits=4.5))
    with pytest.raises(RefusedError, match="toy: expected experts of one size, this file's differ by layer"):
        ExpertShape.of(replace(TOY, expert_bytes=(3072, 1536)))
