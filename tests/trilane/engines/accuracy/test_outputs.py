"""Speeds in the output of programs: every form of llama-bench says the same, and other texts are refused."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from trilane.engines.accuracy.outputs import MOST_BYTES, OutputTextError, ReadSpeed, read_output, speeds_in

TESTS: list[dict[str, Any]] = [
    {"build_commit": "b11400", "cpu_info": "AMD Ryzen 5 5600 6-Core Processor", "gpu_info": "NVIDIA GeForce RTX 3060",
     "backends": "CUDA", "model_filename": "/models/Qwen3-30B-A3B-Q4_K_M.gguf", "n_ubatch": 512, "n_threads": 6,
     "type_k": "f16", "n_gpu_layers": 99, "n_cpu_moe": 28, "tensor_buft_overrides": "none", "n_prompt": prompt,
     "n_gen": generated, "n_depth": depth, "test_time": "2026-11-20T10:00:00Z", "avg_ts": rate}
    for prompt, generated, depth, rate in ((512, 0, 0, 451.25), (0, 128, 4096, 34.5))
]
TABLE = """ggml_cuda_init: found 1 CUDA devices
| model                          |      size | backend | ngl | n_cpu_moe | n_ubatch |          test |           t/s |
| ------------------------------ | --------: | ------- | --: | --------: | -------: | ------------: | ------------: |
| qwen3moe 30B.A3B Q4_K - Medium | 17.28 GiB | CUDA    |  99 |        28 |      512 |         pp512 | 451.25 ± 2.10 |
| qwen3moe 30B.A3B Q4_K - Medium | 17.28 GiB | CUDA    |  99 |        28 |      512 | tg128 @ d4096 |  34.50 ± 0.10 |

build: b11400
"""
LOG = """slot print_timing: id  0 | task 0 |
prompt eval time =    1000.00 ms /   512 tokens (    1.95 ms per token,   512.00 tokens per second)
       eval time =    4000.00 ms /   128 tokens (   31.25 ms per token,    32.00 tokens per second)
"""


def as_csv() -> str:
    text = StringIO()
    writer = csv.DictWriter(text, TESTS[0], quoting=csv.QUOTE_ALL)
    text.write(",".join(TESTS[0]) + "\n")
    writer.writerows(TESTS)
    return text.getvalue()


FORMS = {"json": json.dumps(TESTS), "with lines before": f"ggml_cuda_init\n{json.dumps(TESTS)}", "csv": as_csv(),
         "jsonl": "\n".join(map(json.dumps, TESTS))}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_llama_bench_says_the_same(form: str) -> None:
    assert speeds_in(FORMS[form]) == speeds_in(json.dumps(TESTS))


def test_its_facts_are_read() -> None:
    prompt, decode = speeds_in(json.dumps(TESTS))
    assert (prompt.decode, prompt.tokens, prompt.tokens_per_s, prompt.piece_tokens) == (False, 512, 451.25, 512)
    assert (decode.decode, decode.tokens, decode.depth, decode.cpu_layers) == (True, 128, 4096, 28)
    assert decode.date == "2026-11-20"


def test_its_table_has_the_speeds_and_what_it_prints() -> None:
    prompt, decode = speeds_in(TABLE)
    assert [prompt.tokens_per_s, decode.tokens_per_s] == [451.25, 34.5]
    assert (decode.depth, decode.cpu_layers, decode.gpu_layers, decode.file) == (4096, 28, 99, None)


def test_a_servers_log_and_timings() -> None:
    numbers = {"prompt_n": 512, "prompt_per_second": 512.0, "predicted_n": 128, "predicted_per_second": 32.0}
    expected = [ReadSpeed(False, 512, 512.0), ReadSpeed(True, 128, 32.0, depth=512)]
    assert speeds_in(LOG) == expected
    assert speeds_in(json.dumps({"timings": numbers})) == expected


def test_what_measure_writes() -> None:
    record = {"gguf": "qwen3-30b-a3b-q4_k_m.gguf", "program": None, "threads": 8,
              "settings": {"context_tokens": 2112, "piece_tokens": 512, "gpu": True, "cpu_layers": 28, "kv": "f16"},
              "decode at 2,048 tokens": {"tokens_per_s": 33.0}, "prompt of 512": {"tokens_per_s": 400.0}}
    decode, prompt = speeds_in(json.dumps(record))
    assert (decode.decode, decode.depth, decode.tokens_per_s) == (True, 2048, 33.0)
    assert (prompt.tokens, prompt.cpu_layers, prompt.gpu_layers) == (512, 28, 99)


@pytest.mark.parametrize("text", [
    "", "hello", "[]", "{}", '{"timings": 3}', "[[[[", '[{"avg_ts": "fast"}]', "| test | t/s |",
])
def test_other_texts_are_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(OutputTextError, match="expected the output of llama-bench"):
        speeds_in(text)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b" " * (MOST_BYTES + 1))
    with pytest.raises(OutputTextError, match=r"expected at most 1,000,000 bytes, got 1,000,001"):
        read_output(tmp_path / "log")


@pytest.mark.parametrize(("rate", "threads"), [(0, 8), (-1.5, 8), ("NaN", 8), (1e308, 8), (20.0, -1)])
def test_speeds_that_no_machine_has_are_refused(rate: object, threads: int) -> None:
    test = {"avg_ts": rate, "n_prompt": 0, "n_gen": 128, "n_threads": threads}
    with pytest.raises(OutputTextError, match="expected speeds above 0 and up to 1,000,000 tokens/s"):
        speeds_in(json.dumps([test]))


@pytest.mark.parametrize("rate", [None, [], {}])
def test_a_speed_that_is_no_number_is_none(rate: object) -> None:
    with pytest.raises(OutputTextError, match="expected the output of llama-bench"):
        speeds_in(json.dumps([{"avg_ts": rate, "n_prompt": 0, "n_gen": 128}]))
