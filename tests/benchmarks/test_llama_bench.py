"""One model for llama.cpp: the GGUF file holds it, and ``llama-bench`` is asked what the others are asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

gguf = pytest.importorskip("gguf")

from transformers import AutoModelForCausalLM  # noqa: E402

from benchmarks import llama_bench  # noqa: E402
from benchmarks.contestants import Size, write_model  # noqa: E402
from benchmarks.figures import Section  # noqa: E402
from benchmarks.llama_bench import write_gguf  # noqa: E402
from realrun.llama_cpp.bench import VARIABLE  # noqa: E402

SIZE = Size(hidden=64, layers=3, experts=8, top_k=2, width=32, vocab=96)
LIMIT_BYTES = 10**7
PROGRAM = """#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/asked"
echo '{found}'
exit {status}
"""
FOUND = [
    {"n_prompt": 16, "n_gen": 0, "samples_ns": [5, 6, 7]},
    {"n_prompt": 0, "n_gen": 16, "samples_ns": [32_000_000, 16_000_000, 48_000_000]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "model"
    write_model(SIZE, folder)
    return folder


def test_the_file_holds_the_model(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    write_gguf(model, tmp_path / "model.gguf")
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    values = {name: field.contents() for name, field in read.fields.items()}
    assert values["general.architecture"] == "qwen3moe"
    assert values["tokenizer.ggml.model"] == "none"
    expected = {"expert_count": 8, "expert_used_count": 2, "block_count": 3, "embedding_length": 64, "vocab_size": 96,
                "expert_feed_forward_length": 32, "attention.head_count": 8, "attention.head_count_kv": 4}
    assert {key: values[f"qwen3moe.{key}"] for key in expected} == expected
    types = {"F32": torch.float32, "BF16": torch.bfloat16}
    tensors = {
        tensor.name: torch.from_numpy(np.array(tensor.data)).view(types[tensor.tensor_type.name])
        for tensor in read.tensors
    }
    experts = model.model.layers[2].mlp.experts
    merged = torch.cat([tensors["blk.2.ffn_gate_exps.weight"], tensors["blk.2.ffn_up_exps.weight"]], 1)
    assert torch.equal(merged, experts.gate_up_proj)
    assert torch.equal(tensors["blk.2.ffn_down_exps.weight"], experts.down_proj)
    assert torch.equal(tensors["blk.1.attn_q.weight"], model.model.layers[1].self_attn.q_proj.weight)
    assert torch.equal(tensors["blk.1.attn_k_norm.weight"], model.model.layers[1].self_attn.k_norm.weight.float())
    assert tensors["blk.0.ffn_gate_inp.weight"].dtype == torch.float32
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in model.parameters())


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "llama-bench"
    path.write_text(PROGRAM.format(found=json.dumps(FOUND), status=0))
    path.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def row(program: Path, checkpoint: Path) -> list[Any]:
    return llama_bench.row_of(str(program), checkpoint, program.parent, LIMIT_BYTES, 16, 16, 3, reference_ms=20.0)


def test_the_row_is_of_the_tokens_that_were_generated(program: Path, checkpoint: Path) -> None:
    who, tpot, spread, faster, *_ = row(program, checkpoint)
    assert (who, tpot, spread, faster) == ("llama-bench, all on the CPU", 2.0, "1.5-2.5", 10.0)
    asked = (program.parent / "asked").read_text().split("\n")
    assert asked[asked.index("-p") + 1] == asked[asked.index("-n") + 1] == "16"
    assert "-ngl" not in asked


def test_on_a_gpu_layers_that_do_not_fit_have_their_experts_on_the_cpu(
    program: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert row(program, checkpoint)[4:6] == [24, 1.0]
    monkeypatch.setattr(llama_bench, "split", lambda *_: type("Split", (), {"layers_on_gpu": 0, "layers": 3}))
    assert row(program, checkpoint)[0] == "llama-bench, experts of 2 layers on the CPU"
    asked = (program.parent / "asked").read_text().split("\n")
    assert asked[asked.index("-ncmoe") + 1] == "2"


def test_a_failure_says_what_it_printed(program: Path, checkpoint: Path) -> None:
    program.write_text("#!/bin/sh\necho 'unknown argument -ncmoe' >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="exit status 1: unknown argument -ncmoe"):
        row(program, checkpoint)


def test_where_it_is_not_installed_a_note_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from benchmarks.beside_accelerate import with_llama_bench

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = with_llama_bench(Section("who", ("who",), [["accelerate", 20.0]]), tmp_path, tmp_path, LIMIT_BYTES)
    assert found.notes == ["llama-bench is not installed: neither LLAMA_BENCH nor the path names one"]
