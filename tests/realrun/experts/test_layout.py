"""How one expert lies in its buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from realrun.errors import RefusedError
from realrun.experts.store import ExpertLayout, WeightPart

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple), st.sampled_from(DTYPES)), max_size=5
)


def test_parts_begin_at_multiples_of_64_bytes() -> None:
    layout = ExpertLayout.of_parts([("up_proj", (3, 5), torch.bfloat16), ("down_proj", (5, 3), torch.float32)])
    assert layout.parts == (
        WeightPart("up_proj", (3, 5), torch.bfloat16, 0),  # 30 bytes
        WeightPart("down_proj", (5, 3), torch.float32, 64),  # 60 bytes
    )
    assert layout.size_bytes == 128


def test_a_shape_gives_the_librarys_matrices() -> None:
    gated = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.bfloat16)
    assert [(p.name, p.shape) for p in gated.parts] == [("gate_up_proj", (96, 32)), ("down_proj", (32, 48))]
    assert gated.size_bytes == 3 * 32 * 48 * 2
    ungated = ExpertLayout.from_shape(hidden=32, width=48, weights=torch.float32, gated=False)
    assert [(p.name, p.shape) for p in ungated.parts] == [("up_proj", (48, 32)), ("down_proj", (32, 48))]


@given(PARTS)
def test_views_share_the_buffer_and_not_each_other(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    layout = ExpertLayout.of_parts((f"part{n}", shape, dtype) for n, (shape, dtype) in enumerate(parts))
    buffer = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    views = layout.views(buffer)
    assert layout.size_bytes % 64 == 0
    for number, part in enumerate(layout.parts):
        view = views[part.name]
        assert (view.shape, view.dtype) == (part.shape, part.dtype)
        assert view.data_ptr() == buffer.data_ptr() + part.offset_bytes
        assert view.data_ptr() % 64 == 0
        view.fill_(number + 1)
    assert all((views[part.name] == number + 1).all() for number, part in enumerate(layout.parts))


def test_a_larger_slot_serves_too() -> None:
    layout = ExpertLayout.from_shape(4, 4, torch.float32)
    assert layout.views(torch.zeros(layout.size_bytes + 640, dtype=torch.uint8))["down_proj"].shape == (4, 4)


class Experts(nn.Module):
    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))


def test_a_module_gives_one_slice_of_each_parameter_of_all_experts() -> None:
    experts = Experts(
        gate_up_proj=torch.zeros(8, 6, 4), gate_up_proj_bias=torch.zeros(8, 6), down_proj=torch.zeros(8, 4, 3),
        scale=torch.zeros(1),
    )
    layout = ExpertLayout.from_module(experts.bfloat16())
    assert [(p.name, p.shape) for p in layout.parts] == [
        ("gate_up_proj", (6, 4)),
        ("gate_up_proj_bias", (6,)),
        ("down_proj", (4, 3)),
    ]
    assert {part.dtype for part in layout.parts} == {torch.bfloat16}


def test_parameters_that_disagree_about_the_number_of_experts_are_refused() -> None:
    experts = Experts(gate_up_proj=torch.zeros(12, 6, 4), down_proj=torch.zeros(8, 4, 3))
    with pytest.raises(RefusedError, match=r"same leading dimension.*'gate_up_proj': \(12, 6, 4\)"):
        ExpertLayout.from_module(experts)
