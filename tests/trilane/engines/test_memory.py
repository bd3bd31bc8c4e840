"""Memory that a question needs, the splits that have room, and what helps where there is none."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sim.machine.hardware import Hardware, load_hardware
from tests.kit.depth import thinned
from tests.kit.loadable_ggufs import FAMILIES, TWICE_AS_DEEP, write_loadable
from tests.kit.questions import GEMMA, QWEN, answered, splitter
from traces.models.attention import Attention
from traces.models.catalogue import load_model
from traces.models.gguf_model import read_gguf_model
from traces.models.shape import ModelShape
from trilane.common.units import GIB
from trilane.engines.load_memory import LoadMemory, LoadSetting, load_memory
from trilane.engines.memory import HOST_RESERVE_BYTES, need_of
from trilane.engines.question import FitError, Question
from trilane.engines.shortage import NoRoomError
from trilane.engines.split_speed import StaticSplit
from trilane.fit.fit import fit, with_longest_prompt

RESERVE, MEMORY = 1_500_000_000, 12 * GIB


def told(asked: Question) -> tuple[ModelShape, Hardware, Question]:
    return load_model(asked.shape), load_hardware(asked.hardware), asked


def qwen(**more: Any) -> tuple[ModelShape, Hardware, Question]:
    return told(Question("qwen3-30b-a3b", gpu="rtx-3060", ram="ddr4-3200", **more))


def test_the_least_need_is_every_tokens_weights_the_cache_of_keys_and_values_and_the_reserve() -> None:
    shape, hardware, asked = qwen(weights="bf16", prompt_tokens=1000, generated=24, batch=2)
    weights = 2 * (48 * (18_874_368 + 2048 * 128) + 2 * 151_936 * 2048)
    fixed = weights + 2 * 1024 * (48 * 1024 * 2) + RESERVE
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    need = need_of(shape, hardware, asked.batch, asked.tokens)
    assert (need.fixed, need.host) == (fixed, experts - (MEMORY - fixed) + HOST_RESERVE_BYTES)


def test_every_expert_may_be_on_the_gpu() -> None:
    for gpu, fits in (("rtx-4090", True), ("rtx-4080", False)):
        shape, hardware, asked = told(Question("qwen3-30b-a3b", gpu=gpu, ram="ddr5-5600"))
        assert need_of(shape, hardware, asked.batch, asked.tokens).all_on_gpu == fits


def test_the_missing_gb_are_those_that_would_do() -> None:
    shape, hardware, asked = qwen(weights="bf16")
    need = need_of(shape, hardware, asked.batch, asked.tokens)
    assert need.missing(hardware.gpu.memory_bytes, need.host) == (need.fixed - MEMORY, 0)
    assert need.missing(need.fixed - 7, need.host - 9) == (7, 9)
    assert need.missing(need.fixed, None) == (0, 0)


def test_the_host_lacks_what_experts_and_its_own_reserve_have_no_room_for() -> None:
    shape, hardware, asked = qwen(weights="bf16", ram_gb=16)
    need = need_of(shape, hardware, asked.batch, asked.tokens)
    lacking = need.shortages(shape, hardware, asked)[-1]
    assert lacking.missing_bytes == need.missing(MEMORY, 16 * GIB)[1] == need.host - 16 * GIB


def test_the_fewest_layers_are_on_the_cpu_that_leave_room_for_the_rest() -> None:
    one, own = answered(**QWEN), splitter(**QWEN)
    assert one.memory.missing_bytes <= 0
    assert own.memory(StaticSplit(one.cpu_layers - 1)).missing_bytes > 0
    layer = load_model("qwen3-30b-a3b@q4_k_m").routed_bytes / 48
    assert one.memory.experts_bytes == pytest.approx((48 - one.cpu_layers) * layer, rel=0.05)
    assert one.memory.experts_bytes + one.memory.host_bytes == load_model("qwen3-30b-a3b@q4_k_m").routed_bytes


@pytest.mark.parametrize(
    ("model", "mib"), [("qwen3-30b-a3b", 300.75), ("qwen3.6-35b-a3b", 493)], ids=["Qwen3-30B", "Qwen3.6-35B"]
)
def test_memory_is_within_three_percent_of_what_logs_of_older_builds_say(model: str, mib: float) -> None:
    """Builds of 2025 used the room of the inputs again for the logits: 16 MiB less in compute buffers, and a mask."""
    memory = splitter(model=model, gpu="rtx-5090", ram="ddr5-5600", prompt_tokens=4096).memory(StaticSplit(40))
    ours = memory.every_token_bytes + memory.kv_bytes + memory.compute_bytes + memory.experts_bytes
    logged = ours - memory.compute_bytes + mib * 2**20
    assert 0 <= ours / logged - 1 < 0.03


@pytest.mark.parametrize(("asked", "layers"), [
    ({"model": "qwen3.5-35b-a3b", "gpu": "rtx-5060-ti-16gb", "ram": "ddr5-5600", "prompt_tokens": 16_000}, 14),
    ({"model": "qwen3.6-35b-a3b", "weights": "iq4_xs", "gpu": "rtx-3060", "ram": "ddr4-3200",
      "prompt_tokens": 1470}, 18),
    ({"model": "qwen3-30b-a3b", "gpu": "rtx-5070", "ram": "ddr5-5600", "prompt_tokens": 512}, 22),
    ({"model": "gpt-oss-120b", "gpu": "rtx-3090", "ram": "ddr4-3200", "prompt_tokens": 1400}, 27),
], ids=lambda value: str(value["model"]) if isinstance(value, dict) else "")
def test_people_put_nearly_as_many_layers_on_the_cpu(asked: dict[str, Any], layers: int) -> None:
    """N of --n-cpu-moe of speeds that were measured on these cards (measured_speeds.csv; everett6/moe-prefetch)."""
    assert abs(answered(**asked).cpu_layers - layers) <= 3


def test_experts_that_are_copied_have_room_by_matrix_or_by_layer() -> None:
    """Mixtral: eight experts of 3 x 4,096 x 14,336; two results of two experts for each of 512 tokens, or one and what
    comes of it; inputs are four rows of 4,096, and a mask of 4,352 cells."""
    own, shape = splitter(**{**QWEN, "model": "mixtral-8x7b"}), load_model("mixtral-8x7b@q4_k_m")
    layer, inputs = 8 * shape.expert_bytes_by_layer[0], 512 * (4 * 4096 * 4 + 4352 * 2)
    assert own.memory(StaticSplit(1)).compute_bytes == layer // 3 + 512 * 4 * 2 * 2 * 14_336 + inputs
    other = splitter(**{**QWEN, "model": "mixtral-8x7b", "engine": "ik_llama.cpp"})
    expected = layer + other.piece_tokens * (4 * 2 * 2 * 14_336 + 4 * 4096 * 4 + 4352 * 2)
    assert other.memory(StaticSplit(1)).compute_bytes == expected


def test_larger_pieces_have_more_room() -> None:
    larger = splitter(**QWEN, ubatch=2048).memory(StaticSplit(0))
    assert larger.compute_bytes == 4 * splitter(**QWEN).memory(StaticSplit(0)).compute_bytes
    assert answered(**QWEN, ubatch=4096).cpu_layers > answered(**QWEN).cpu_layers


def test_a_sliding_window_and_a_quantised_cache_leave_room_for_experts() -> None:
    """gemma-4: 25 of 30 layers keep 1,024 tokens."""
    one = answered(**GEMMA, prompt_tokens=32_768)
    assert one.memory.kv_bytes / 1e9 < 1.0
    small, usual = (answered(**GEMMA, prompt_tokens=131_072, kv=kv) for kv in ("q4_0", None))
    assert small.cpu_layers < usual.cpu_layers


def test_the_host_has_room_for_embeddings_and_inputs_too() -> None:
    memory = splitter(**QWEN).memory(StaticSplit(48))
    assert memory.host_table_bytes == load_model("qwen3-30b-a3b@q4_k_m").embedding_bytes
    assert memory.host_compute_bytes == 512 * (4 * 2048 * 4 + 4352 * 2)
    needed = memory.host_bytes + memory.host_table_bytes + memory.host_compute_bytes + HOST_RESERVE_BYTES
    assert sum(memory.host_parts.values()) == needed
    own = splitter(**QWEN, ram_gb=64)
    for ram, room in ((needed, True), (needed - 1, False)):
        little = replace(own.hardware, cpu=replace(own.hardware.cpu, ram_bytes=ram))
        asked = replace(own.question, ram_gb=None)
        assert replace(own, question=asked, hardware=little).has_room(StaticSplit(48)) == room


def test_one_memory_holds_embeddings_and_inputs_with_all_else() -> None:
    own = splitter(model="gpt-oss-120b", gpu="gb10")
    memory, loaded = own.memory(StaticSplit(0)), load_memory(own.shape, LoadSetting(4352))
    all_of_it = loaded.gpu_bytes + loaded.host_weights_bytes + loaded.host_compute_bytes
    assert sum(memory.gpu_parts.values()) == all_of_it + memory.reserve_bytes
    assert (memory.host_table_bytes, memory.host_share) == (0, None)


def test_shares_of_memory() -> None:
    """The reserve of a card is free; of the host's memory the system has its own."""
    card = splitter(**QWEN, ram_gb=32).memory(StaticSplit(24))
    used = sum(card.gpu_parts.values()) - card.reserve_bytes
    assert card.gpu_share == pytest.approx(used / (16 * GIB))
    assert card.host_share == pytest.approx(sum(card.host_parts.values()) / (32 * GIB))
    assert splitter(**QWEN).memory(StaticSplit(24)).host_share is None
    unified = splitter(model="gpt-oss-120b", gpu="gb10").memory(StaticSplit(0))
    assert unified.gpu_share == pytest.approx(sum(unified.gpu_parts.values()) / (128 * GIB))


def test_what_leaves_no_room_is_refused_with_what_is_missing() -> None:
    with pytest.raises(NoRoomError, match=r"llama.cpp with the experts of 2 layers on the CPU needs .* of GPU memory"):
        answered(**QWEN, n_cpu_moe=2)
    with pytest.raises(NoRoomError, match=r"llama.cpp .* of host memory .*the host has 32 GiB, 34.4 GB: "):
        answered(**{**QWEN, "weights": "bf16"}, ram_gb=32)


@pytest.mark.parametrize(("generated", "prompt"), [
    (200, 40_704), (256, 40_704), (257, 40_448), (40_958, 2), (40_959, 1), (50_000, 1),
])
def test_the_longest_prompt_leaves_room_for_the_answer_in_what_the_model_was_trained_for(
    generated: int, prompt: int
) -> None:
    asked = with_longest_prompt(Question("qwen3-30b-a3b", "rtx-4090", "ddr5-5600", generated=generated))
    assert asked.prompt_tokens == prompt


def test_where_it_is_not_known_what_a_model_was_trained_for_the_longest_prompt_has_a_million_tokens(
    tmp_path: Path
) -> None:
    sizes = {
        "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert with_longest_prompt(Question(str(tmp_path), "rtx-4090", "ddr5-5600")).prompt_tokens == 2**20


def test_an_answer_tells_what_the_model_was_trained_for() -> None:
    asked = Question("qwen3-30b-a3b", "rtx-4090", "ddr5-5600", prompt_tokens=40_704, generated=2)
    assert fit(asked).trained_tokens == 40_960


def test_the_longest_prompt_fits_and_a_longer_one_does_not() -> None:
    own: dict[str, Any] = {"model": "qwen3-30b-a3b-instruct-2507", "gpu": "rtx-3060", "ram": "ddr4-3200", "kv": "q8_0"}
    asked = with_longest_prompt(Question(**own))
    assert asked.prompt_tokens % 256 == 0
    assert splitter(**own, prompt_tokens=asked.prompt_tokens).best()
    with pytest.raises(FitError):
        splitter(**own, prompt_tokens=asked.prompt_tokens + 512).best()


# --- Memory at load ---------------------------------------------------------------------------------------------------


GROUPED = ModelShape(
    name="hand", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=8, expert_width=16, heads=4, kv_heads=1,
    head_dim=4, kv_width=8, attention_params=100, vocab=1000, weight_bits=8, dense_bits=8, kv_bits=16,
)
ONE_PIECE = LoadSetting(context_tokens=300, ubatch_tokens=64)


def test_a_grouped_cache_with_flash_attention() -> None:
    """512 cells of 8 elements in 2 bytes, twice; a piece's inputs: 4 rows of 8 in 4 bytes, 512 cells of a mask in 2."""
    inputs = 64 * (4 * 8 * 4 + 512 * 2)
    weights = 2 * 4 * 3 * 8 * 16 + 2 * (100 + 8 * 4) + 1000 * 8
    found = load_memory(GROUPED, ONE_PIECE)
    assert found == LoadMemory(weights, 2 * 512 * 8 * 2, 64 * 1000 * 4 + inputs, 1000 * 8, inputs)
    assert found.gpu_bytes == weights + 2 * 512 * 8 * 2 + 64 * 1000 * 4 + inputs


def test_without_flash_attention_scores_are_there_with_queries_and_outputs() -> None:
    """4 heads x 16,384 cells, twice 4 heads of 4; masks in 32 bits, 64-bit places of the 4 elements of values."""
    setting = replace(ONE_PIECE, context_tokens=16_384, flash_attention=False)
    inputs = 64 * (4 * 8 * 4 + 16_384 * 4 + 4 * 8)
    assert load_memory(GROUPED, setting).compute_bytes == 64 * 4 * (4 * 16_384 + 2 * 4 * 4) + inputs


@pytest.mark.parametrize(("cells", "turned"), [(1024, 0), (1280, 1280 * 12 * 2)])
def test_a_latent_cache_is_turned_in_room_of_its_own_where_queries_and_outputs_leave_too_little(
    cells: int, turned: int
) -> None:
    """12 elements in 2 bytes a cell; queries and outputs of 4 heads of 12 in 4 bytes, a piece of 64: 1,024 cells."""
    kinds = (Attention("full", 100, 4, 4, 12),)
    shape = replace(GROUPED, vocab=10, attention=kinds, attention_layers=(0, 0))
    setting = replace(ONE_PIECE, context_tokens=cells, flash_attention=False)
    scores = 64 * 4 * (4 * cells + 2 * 4 * 12)
    found = load_memory(shape, setting)
    assert found.compute_bytes - found.host_compute_bytes == scores + turned


def test_a_window_has_cells_for_itself_and_a_piece() -> None:
    """128 + 64 tokens: 256 cells; 512 for the layer that attends to everything. Two masks."""
    kinds = (Attention("full", 100, 4, 4, 8), Attention("window", 100, 4, 4, 8, span=128))
    shape = replace(GROUPED, attention=kinds, attention_layers=(0, 1))
    found = load_memory(shape, ONE_PIECE)
    assert found.kv_bytes == (512 + 256) * 8 * 2
    assert found.host_compute_bytes == 64 * (4 * 8 * 4 + (512 + 256) * 2)


def test_sequences_have_caches_of_their_own_and_states_no_cells() -> None:
    """300 tokens for two: 150 each, 256 cells."""
    kinds = (Attention("full", 100, 4, 4, 8), Attention("state", 100, 4, 4, state_bytes=999))
    shape = replace(GROUPED, attention=kinds, attention_layers=(0, 1))
    assert load_memory(shape, replace(ONE_PIECE, sequences=2)).kv_bytes == 2 * (256 * 8 * 2 + 999)


def test_experts_on_the_host_leave_the_gpu_and_a_matrix_is_copied() -> None:
    """An expert has 3 x 8 x 16 bytes; results of one product, and of two, for two experts of each of 64 tokens."""
    shape, on_host = replace(GROUPED, vocab=10), replace(ONE_PIECE, cpu_layers=1)
    plain, found = load_memory(shape, ONE_PIECE), load_memory(shape, on_host)
    inputs = found.host_compute_bytes
    assert plain.weights_bytes - found.weights_bytes == 4 * 3 * 8 * 16
    assert found.host_weights_bytes == 4 * 3 * 8 * 16 + 10 * 8
    assert plain.compute_bytes == 64 * 4 * 2 * 3 * 16 + inputs
    assert found.compute_bytes == max(64 * 4 * 2 * 3 * 16, 4 * 8 * 16 + 64 * 4 * 2 * 2 * 16) + inputs


LATE = replace(  # 4 heads of 4 in all layers; the cache of all tokens is first used behind the first experts
    GROUPED, moe_layers=4, vocab=10, experts=512, attention_layers=(0, 1, 0, 1),
    attention=(Attention("window", 100, 4, 4, 8, span=128), Attention("full", 100, 4, 4, 8)),
)
MATRIX, ROWS, WINDOW, FULL = 512 * 8 * 16, 64 * 4 * 8 * 4, 64 * 256 * 2, 64 * 16_384 * 2


def compute_bytes(on_host: int, context: int = 16_384, **changed: Any) -> int:
    setting = replace(ONE_PIECE, context_tokens=context, cpu_layers=on_host)
    return load_memory(replace(LATE, **changed), setting).compute_bytes


def test_a_mask_that_comes_with_a_later_part_is_gone_at_the_logits() -> None:
    """Without cuts it is there from the first part on."""
    assert compute_bytes(0, vocab=10**6) == 64 * 4 * 10**6 + ROWS + WINDOW + FULL
    assert compute_bytes(1, vocab=10**6) == 64 * 4 * 10**6 + ROWS + WINDOW


def test_a_matrix_is_copied_above_a_mask_that_lies_above_the_place_of_another() -> None:
    """In the third block, while the fourth layer still needs the mask; the second block's have the place itself."""
    of_chosen = 64 * 4 * 2  # an element of each
    assert compute_bytes(2) == ROWS + WINDOW + FULL + MATRIX + of_chosen * 2 * 16
    assert compute_bytes(3) == ROWS + WINDOW + FULL + 2 * MATRIX + of_chosen * 16


def test_biases_of_experts_leave_no_hole() -> None:
    assert compute_bytes(3, expert_biases=True) == compute_bytes(2)


def test_without_a_gpu_everything_is_in_one_memory() -> None:
    found, other = load_memory(GROUPED, replace(ONE_PIECE, gpu=False)), load_memory(GROUPED, ONE_PIECE)
    assert (found.host_weights_bytes, found.host_compute_bytes) == (0, 0)
    assert found.weights_bytes == GROUPED.routed_bytes + GROUPED.non_expert_bytes
    assert found.compute_bytes == other.compute_bytes + 64 * 8 * 4


def test_tied_embeddings_are_on_both_sides() -> None:
    found = load_memory(replace(GROUPED, tied_embeddings=True), ONE_PIECE)
    assert found.host_weights_bytes == 8000
    assert found.weights_bytes == GROUPED.routed_bytes + 2 * (100 + 8 * 4) + 8000


KV_TYPES = {1: 16.0, 8: 8.5, 2: 4.5}  # numbers of ggml: f16, q8_0, q4_0
SETTINGS = [
    {"c": context, "ub": ubatch, "fa": flash, "kv": kv, "np": sequences}
    for context, ubatch, (flash, kv), sequences in product(
        (512, 5000, 16_384), (128, 512, 2048), ((1, 1), (1, 8), (1, 2), (0, 1)), (1,)
    )
] + [{"c": 16_384, "ub": 512, "fa": flash, "kv": 1, "np": 4} for flash in (0, 1)]
ALL = 99  # blocks
MACHINES = [(True, 0), (True, 2), (True, ALL), (False, 0)]
PLANS = Path(__file__).with_name("llama_plans.csv")  # of xllamacpp 2026.10.11549; made by renew_llama_plans.py
FEW = [asked for asked in SETTINGS if asked["np"] == 4 or (asked["c"] == 5000 and asked["ub"] == 128)] + [
    asked for asked in SETTINGS if (asked["c"], asked["ub"], asked["kv"], asked["np"]) == (16_384, 2048, 1, 1)
]
WORST = {("gemma4", True, ALL): 0.04}  # without flash attention; all others are within 3 %
BORDER = ("gemma4, twice as deep", 5000, 128)  # a mask nearly as large as a row of hidden states: 285 to 419 MiB


@pytest.mark.parametrize(("gpu", "cpu_layers"), MACHINES, ids=["gpu", "split", "host", "cpu"])
@pytest.mark.parametrize("family", [*FAMILIES, *TWICE_AS_DEEP])
def test_llama_cpp_planned_as_much(family: str, gpu: bool, cpu_layers: int, tmp_path: Path) -> None:
    """As it said once, for a few settings."""
    shape = read_gguf_model(write_loadable(family, tmp_path / "m.gguf"))
    with PLANS.open(encoding="utf-8") as plans:
        rows = [row for row in csv.DictReader(plans) if row.pop("family") == family]
    its = [{key: float(number) for key, number in row.items()} for row in rows]
    its = [row for row in its if (row["gpu"], row["cpu_layers"]) == (gpu, cpu_layers)]
    assert len(its) == len(FEW)
    for asked, row in zip(FEW, its, strict=True):
        assert asked.items() <= row.items()
        assert_as_planned(family, shape, asked, (gpu, cpu_layers), row["cache_mib"], row["compute_mib"])


@pytest.mark.llama
@pytest.mark.skipif(sys.platform != "linux", reason="the wheel's structures are those of Linux")
@pytest.mark.parametrize(("gpu", "cpu_layers"), MACHINES, ids=["gpu", "split", "host", "cpu"])
@pytest.mark.parametrize("family", [*FAMILIES, *TWICE_AS_DEEP])
def test_llama_cpp_plans_as_much(family: str, gpu: bool, cpu_layers: int, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: pip install 'trilane[llama]'")
    file = write_loadable(family, tmp_path / "m.gguf")
    shape = read_gguf_model(file)
    for asked, said in zip(SETTINGS, planned(file, gpu, cpu_layers), strict=True):
        assert_as_planned(family, shape, asked, (gpu, cpu_layers), sum(said["cache"]), said["compute"][0])


def assert_as_planned(
    family: str, shape: ModelShape, asked: dict[str, int], machine: tuple[bool, int], cache_mib: float,
    compute_mib: float,
) -> None:
    gpu, cpu_layers = machine
    setting = LoadSetting(
        asked["c"], asked["np"], asked["ub"], bool(asked["fa"]), gpu=gpu,
        cpu_layers=sum(block < cpu_layers for block in shape.expert_blocks),
    )
    ours = load_memory(replace(shape, kv_bits=KV_TYPES[asked["kv"]]), setting)
    assert ours.kv_bytes / 2**20 == pytest.approx(cache_mib, rel=0.001, abs=0.02), asked
    if (family, asked["c"], asked["ub"]) != BORDER or not cpu_layers:
        error = WORST.get((family, gpu, cpu_layers), 0.03)
        assert ours.compute_bytes / 2**20 == pytest.approx(compute_mib, rel=error), asked


@thinned(3)
@pytest.mark.llama
@pytest.mark.parametrize("family", ["olmoe", "gpt-oss", "deepseek2"])
def test_llama_cpp_loads_as_many_weights(family: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed: pip install 'trilane[llama]'")
    file = write_loadable(family, tmp_path / "m.gguf")
    found = load_memory(read_gguf_model(file), replace(ONE_PIECE, gpu=False)).weights_bytes / 2**20
    assert found == pytest.approx(sum(planned(file, False, 0, [])), rel=0.001)


def planned(file: Path, gpu: bool, cpu_layers: int, settings: list[dict[str, int]] = SETTINGS) -> list[Any]:
    asked = {"file": str(file), "gpu": gpu, "cpu_layers": cpu_layers, "settings": settings}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.llama_load"], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found
