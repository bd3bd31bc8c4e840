"""Facts on which predictions of ``--n-cpu-moe`` rest, from llama.cpp itself: the device that computes each expert.

The second device is real to llama.cpp, and computes with the CPU's kernels (``tests.kit.second_device``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from sim.costs.engine import load_engine
from tests.kit.commands import ROOT
from tests.kit.tiny_gguf import LAYERS, write_tiny_gguf

pytestmark = pytest.mark.llama
PRODUCTS = 3  # of a layer's experts: gate, up, down
TOKENS = {"token": 1, "few": 31, "many": 32}
SPLITS = (None, 0, 1, 99)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    command = [sys.executable, "-m", "tests.kit.second_device", str(file), json.dumps([SPLITS, TOKENS])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def products(played: dict[str, Any], split: int | None, tokens: str) -> set[int]:
    """Products with experts on the second device, from mapped and from other memory."""
    return {run[tokens]["products"] for run in played["runs"] if run["split"] == split}


def test_the_device_is_found_and_the_model_says_the_same_on_it(played: dict[str, Any]) -> None:
    assert played["name"] == "GPU0"
    assert [run["split"] for run in played["runs"]] == [split for split in SPLITS for _ in (True, False)]
    first, *others = played["runs"]
    for run in others:
        for tokens in TOKENS:
            assert run[tokens]["logits"] == pytest.approx(first[tokens]["logits"], abs=1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
def test_without_gpu_layers_it_is_not_used_even_for_long_prompts(played: dict[str, Any], tokens: str) -> None:
    assert products(played, None, tokens) == {0}


@pytest.mark.parametrize("tokens", TOKENS)
def test_with_all_experts_on_it_it_computes_them_all(played: dict[str, Any], tokens: str) -> None:
    assert products(played, 0, tokens) == {LAYERS * PRODUCTS}


@pytest.mark.parametrize("tokens", ["token", "few"])
def test_the_cpu_computes_the_experts_of_its_layers_for_few_tokens(played: dict[str, Any], tokens: str) -> None:
    assert products(played, 1, tokens) == {(LAYERS - 1) * PRODUCTS}
    assert products(played, 99, tokens) == {0}


def test_from_32_tokens_on_they_are_copied_but_those_of_the_last_layer(played: dict[str, Any]) -> None:
    """It has one token left, which is the CPU's, if the layer's experts are."""
    assert products(played, 1, "many") == {LAYERS * PRODUCTS}
    assert products(played, 99, "many") == {(LAYERS - 1) * PRODUCTS}


def test_that_is_the_number_of_tokens_of_the_engine_s_file() -> None:
    prompt = load_engine("llama.cpp").prompt
    assert prompt is not None
    assert prompt.copies_from_tokens.value == TOKENS["many"] == TOKENS["few"] + 1
