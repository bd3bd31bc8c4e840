"""Engines as data: which there are, files that are like another one, faulty files, and profiles."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.costs.engine import EngineError, FittedEngine, engine_names, load_engine
from sim.costs.engine_costs import costs_on
from sim.machine.hardware import load_hardware
from sim.machine.sourced import Sourced
from traces.models.catalogue import load_model

FITTED = (
    "llama.cpp", "llama.cpp-2025", "llama.cpp-2026-02", "llama.cpp-2026-03", "llama.cpp-vulkan", "llama.cpp-rocm",
    "llama.cpp-metal", "llama.cpp-cache", "llama.cpp-uploads", "ik_llama.cpp", "ik_llama.cpp-2025",
    "ik_llama.cpp-2026-02", "ktransformers", "ktransformers-2025", "strata", "vllm",
)
PAPERS = (
    "daop-2024", "daop-2024-phi", "dali-2025", "dali-2025-ktransformers", "dali-2025-llama.cpp", "fiddler-2024",
    "hybrimoe-2025", "se-2025", "smoe-2025",
)
KINDS = ("eager", "eager-4bit", "eager-cpp", "fused", "native")
RELEASED = ("deepspeed", "imp", "mixtral-offloading", "mixtral-offloading-hqq", "moe-infinity")


def test_the_engines_are_those_that_people_run_counted_ones_kinds_of_programs_and_those_of_papers() -> None:
    assert set(engine_names()) == {"graphs", "pytorch", *KINDS, *RELEASED, *PAPERS, *FITTED}
    assert [name for name in engine_names() if isinstance(load_engine(name), FittedEngine)] == sorted(FITTED)


def test_a_file_states_what_differs_from_another_engine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "like: llama.cpp\nabout: mine\ngpu:\n  layer_ns:\n"
        "    state: {value: 50000, source: my own measurement, confidence: high}\n"
    )
    mine, base = load_engine(str(path)), load_engine("llama.cpp")
    assert (mine.name, mine.about) == ("mine", "mine")
    changed = {key for key, number in mine.flat().items() if number != base.flat()[key]}
    assert changed == {"gpu.layer_ns.state"}
    assert mine.flat()["gpu.layer_ns.state"] == Sourced(50000, "my own measurement", "high")
    machine, shape = load_hardware("rtx-4090+ddr5-5600"), load_model("qwen3.5-35b-a3b@q4_k_m")
    slow, quick = (costs_on(machine, shape, 1, engine).step(1, (64,)).attention_ns for engine in ("llama.cpp", mine))
    assert slow - quick == pytest.approx((base.flat()["gpu.layer_ns.state"].value - 50000) * 30 / 40, rel=0.01)


@pytest.mark.parametrize(("text", "message"), [
    ("like: llamacpp\n", r"there is no engine 'llamacpp'; did you mean 'llama.cpp'\?"),
    ("[1]", "expected a mapping"),
    ("about: x\nstarts: graphs\ndecides: true\n", "expected replay_ns and spin_ns"),
    ("like: llama.cpp\ngpu: null\n", "gpu: expected a mapping"),
    (
        "like: llama.cpp\ngpu: {read_share: {value: 1.5, source: x, confidence: low}}\n",
        "gpu.read_share.value: expected a number above 0 and <= 1",
    ),
    ("like: llama.cpp\ngpu: {read: 1}\n", "gpu"),
    ("like: llama.cpp\nsoftware: {}\n", "there is no key 'software'"),
    (
        "like: pytorch\nsoftware: {small_batch_tokens: {value: 5, source: x, confidence: low}}\n",
        "software: expected small_batch_tokens and small_batch_flops_share, or _per_s, together",
    ),
    (
        "like: pytorch\nsoftware: {cpu_token_ns: {value: 5, source: x, confidence: low}}\n",
        "software: expected small_batch_tokens and small_batch_flops_share, or _per_s, together",
    ),
    ("like: llama.cpp\nfast: true\n", "fast"),
])
def test_a_faulty_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    with pytest.raises(EngineError, match=message):
        load_engine(str(path))


def test_a_file_that_is_like_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text(f"like: {path}\n")
    with pytest.raises(EngineError, match="there is no engine"):
        load_engine(str(path))


def test_only_numbers_that_there_are_can_be_changed() -> None:
    engine = load_engine("llama.cpp")
    assert engine.with_numbers({"cpu.layer_ns": 1.0}).flat()["cpu.layer_ns"].value == 1.0
    with pytest.raises(EngineError, match=r"there is no key 'cpu.layers_ns'; did you mean 'cpu.layer_ns'\?"):
        engine.with_numbers({"cpu.layers_ns": 1.0})


PROFILE = Path(__file__).parents[3] / "docs/validation/llama.cpp/engine.yaml"
SPOILT = {
    "a number of threads less": (("kernels", "step_ns", "value"), [0.0], "kernels.step_ns: expected 2 entries, as"),
    "one depth": (
        ("kernels", "attention", "pair_ns", "value"), [[1.0], [1.0]],
        "kernels.attention.pair_ns: expected 2 entries, with 3 values each",
    ),
    "a rate more": (
        ("kernels", "products", "f32", "others", "value", "flops_per_s"), [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]],
        "kernels.products.f32.others: expected 2 entries, with 3 values each",
    ),
}


@pytest.mark.parametrize(("place", "value", "message"), SPOILT.values(), ids=SPOILT)
def test_a_profile_has_a_value_for_all_that_was_measured(
    tmp_path: Path, place: tuple[str, ...], value: object, message: str
) -> None:
    document: Any = yaml.safe_load(PROFILE.read_text())
    *to, last = place
    reduce(getitem, to, document)[last] = value
    (spoilt := tmp_path / "spoilt.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(EngineError, match=message):
        load_engine(str(spoilt))
