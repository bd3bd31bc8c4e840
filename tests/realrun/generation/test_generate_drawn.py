"""Law 11 on drawn worlds: model, policy, cache size, batch and prompt; and what half precision does."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.registry import SYSTEMS
from realrun.generation.hosted_model import look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from realrun.smoke.generation_checks import ModelOutput, output_of_executor, output_of_library
from tests.kit.flips import flips_against_library, following
from tests.kit.generating import CPU, MINI_VECTORS, every_slot, hosted, library, request
from tests.kit.tiny_families import VOCAB, build

BY_ITSELF = [
    name for name, entry in SYSTEMS.items()
    if not (entry.needs.changes_routing or entry.needs.future or entry.needs.calibration)
    and all(kind == "gate" for kind, _ in entry.needs.forecasts)
]
COUNT_NAMES = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A family and sizes of its own."""
    family = draw(st.sampled_from(sorted(COUNT_NAMES)))
    experts = draw(st.sampled_from([4, 6, 8, 12]))
    changes = {COUNT_NAMES[family]: experts, "num_hidden_layers": draw(st.integers(2, 4))}
    return family, changes | {"num_experts_per_tok": draw(st.integers(1, experts // 2))}


@settings(max_examples=25)
@given(drawn=models(), data=st.data())
def test_law_11_whatever_is_drawn(
    inline_lanes: HostLanes, drawn: tuple[str, dict[str, int]], data: st.DataObject
) -> None:
    family, changes = drawn
    batch, length = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 9), "prompt tokens")
    token = st.integers(0, VOCAB - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=batch, max_size=batch))
    model = look_at(*taken_apart(build(family, **changes), CPU, plain))
    slots = data.draw(st.integers(0, every_slot(model)), "slots")
    policy = data.draw(st.sampled_from(BY_ITSELF), "policy")
    said = output_of_library(build(family, **changes).model, torch.tensor(prompts), 2)
    asked = request(policy, slots, prompts=tuple(map(tuple, prompts)), generated=2)
    ours = output_of_executor(model, asked, inline_lanes, following(said.tokens))
    torch.testing.assert_close(ours.logits, said.logits, rtol=0, atol=1e-5)


# --- bfloat16 ---------------------------------------------------------------------------------------------------------

HALF = torch.bfloat16


FOUR = (("num_experts_per_tok", 4),)
LEARNT = {"calibration": "mini-moe-calibration", "vectors": MINI_VECTORS}


@cache
def all_resident(family: str, lanes: HostLanes) -> ModelOutput:
    """What a family says with all experts on the GPU."""
    model = hosted(family, () if family == "mini-moe" else FOUR, HALF)
    return output_of_executor(model, request("llama.cpp", every_slot(model)), lanes)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *product(["deepseek_v3", "gpt_oss"], ["on-demand", "naive-cpu", "hybrimoe", "mix"]),
        *product(["mini-moe"], ["on-demand", "fiddler", "hybrimoe", "dali", "best-exact", "mixtral-offloading"]),
    ],
)
def test_bit_by_bit_what_the_run_with_all_experts_resident_says(
    family: str, policy: str, inline_lanes: HostLanes
) -> None:
    """On host lanes GPU and CPU compute an expert alike, and sums do not depend on the order."""
    bundled = family == "mini-moe"
    model = hosted(family, () if bundled else FOUR, HALF)
    resident = all_resident(family, inline_lanes)
    asked = request(policy, every_slot(model) // 4, **(LEARNT if bundled else {}))  # type: ignore[arg-type]
    said = output_of_executor(model, asked, inline_lanes, following(resident.tokens))
    assert said.logits.dtype == HALF
    assert torch.equal(said.logits, resident.logits)


def test_how_often_half_precision_flips_a_token_is_counted(inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe", (), HALF)
    found = flips_against_library(
        library("mini-moe", (), HALF), model, request("on-demand", 16, generated=8), inline_lanes
    )
    assert found.compared == 2 * 9
    assert 0 <= found.flipped_share <= 0.2
    assert found.largest_difference < 1
    same = flips_against_library(library("mini-moe"), hosted("mini-moe"), request("on-demand", 16), inline_lanes)
    assert same.flipped_share == 0
