"""Logs of caches of experts: each kind is told by its columns or lines, and becomes rows of one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trilane.study.cache_logs.importers import is_cache_log, read_cache_log
from trilane.study.cache_logs.rows import CacheRow, LogError, read_rows, write_rows

EVICTIONS = """\
machine,h2d_gb_s,cached_percent,cached_experts,steps,avg_batch,avg_experts_per_layer,eviction,prefetch,ms_per_step,\
total_loads,prefetch_loads,compute_ms_per_step,source
H100,56,80,204,100,19.1,6.27,LRU,Oracle(1),250,4000,1000,37.5,here
"""
CURVES = """\
id,source,link_gb_s,model,quant,arm,slots_per_layer,hit_percent,tg_tok_s,note
a,kekzl/imp#1,25.6,qwen3-30b-a3b,q4_k_m,"LRU, 5 %",24,36.6,10,
b,kekzl/imp#1,25.6,qwen3-30b-a3b,q4_k_m,LRU,,88.7,25,
c,davetha/r9700-lru-expert-cache docs,28.4,qwen3.8-flash-next,mxfp4,"static, point 3 of 10 (2 to 18 GB)",,40.78,,
d,thecodacus/llama.cpp#5,,qwen3.6-35b-a3b,q4_k_m,ncmoe 99,,,40,
e,FlashML-org/FreeToken#1,,deepseek-v4-flash,,"LRU, 700 slots in all",11.5,8-18,,
f,somebody/else#1,,qwen3-30b-a3b,q4_k_m,LRU,11.5,50,,
"""
SUMMARY = """\
run,cache_size,prefetch_size,placement_events,live_cache_hit
one,16,4,234,0.5
"""
LLAMA = """\
# model: /models/Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf
moe-cache: steps=512 hit=90.0% resident=55.8/56 scheduled=1
moe-cache: steps=1024 hit=92.5% resident=55.9/56 scheduled=2
# decode: 1024 tokens, 8.5 ms/token, 117 tok/s
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def event(layer: int, time_ns: int, hits: int, stage: str = "decode") -> str:
    return json.dumps({
        "event_type": "placement", "stage": stage, "layer_idx": layer, "time_ns": time_ns, "cache_load_size": 16,
        "prefetch_size": 4, "selected_expert_count": 6, "resident_hit_expert_count": hits,
    })


def test_evictions_and_prefetches(tmp_path: Path) -> None:
    [row] = read_cache_log(written(tmp_path, "log.csv", EVICTIONS))
    assert (row.policy, row.prefetch, row.slots, row.batch, row.active) == ("lru", 1, 204 / 32, 19, 6.27)
    assert (row.loads, row.prefetched, row.step_ms, row.compute_ms, row.link_gb_s) == (40, 10, 250, 37.5, 56)


def test_curves_say_why_a_row_is_left_out(tmp_path: Path) -> None:
    rows = {row.id: row for row in read_cache_log(written(tmp_path, "curves.csv", CURVES))}
    assert (rows["a"].slots, rows["a"].hit_rate, rows["a"].step_ms) == (8, 0.366, 100)
    assert rows["b"].left_out == "slots are not stated"
    assert (rows["c"].policy, rows["c"].slots, rows["c"].window) == ("static", 4882 / 48, 5)
    assert (rows["d"].policy, rows["d"].slots, rows["d"].assumed) == ("llama.cpp", 0, "the CPU and its memory")
    assert rows["e"].left_out == "hit_percent is a range"
    assert rows["f"].left_out == "the cache's rule is not stated"


def test_a_summary_of_hybrimoe(tmp_path: Path) -> None:
    [row] = read_cache_log(written(tmp_path, "runs.csv", SUMMARY))
    assert (row.policy, row.slots, row.prefetch, row.steps) == ("hybrimoe@impl{prefetch_size: 4}", 16, 4, 9)
    assert row.hit_rate == 0.5


def test_events_of_hybrimoe_give_hits_and_the_time_from_step_to_step(tmp_path: Path) -> None:
    events = [event(1, 0, 0, "prefill"), event(1, 10_000_000, 3), event(2, 12_000_000, 6), event(1, 25_000_000, 3)]
    [row] = read_cache_log(written(tmp_path, "run.jsonl", "\n".join(events)))
    assert (row.steps, row.hit_rate, row.step_ms) == (2, 12 / 18, 15)


def test_the_last_count_of_a_log_of_llama_cpp_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, "server.txt", LLAMA)
    [row] = read_cache_log(path)
    assert is_cache_log(path)
    assert (row.model, row.policy, row.slots) == ("qwen3-30b-a3b@q4_k_m", "llama-cache-lru", 56)
    assert (row.hit_rate, row.step_ms) == (0.925, 8.5)


def test_rows_of_any_log_are_written_as_the_table_and_read_again(tmp_path: Path) -> None:
    rows = read_cache_log(written(tmp_path, "log.csv", EVICTIONS))
    write_rows(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows == read_cache_log(tmp_path / "rows.csv")


def test_a_request_of_strata_is_of_another_kind(tmp_path: Path) -> None:
    assert not is_cache_log(written(tmp_path, "strata.csv", "id,gpu,quant\na,RTX 4090,iq3_s\n"))
    assert not is_cache_log(written(tmp_path, "engine.log", "strata serve: prompt\n"))


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("log.csv", EVICTIONS.replace(",LRU,", ",MRU,"), "line 2: eviction: expected Belady, StaticFreq, LFU, LRU, got"),
    ("log.csv", EVICTIONS.replace(",4000,", ",many,"), "line 2: total_loads: expected a number or an empty cell"),
    ("log.csv", EVICTIONS.replace(",204,", ",,"), "line 2: cached_experts: expected a number above 0, got ''"),
    ("log.csv", EVICTIONS.replace(",1000,", ",5000,"), "line 2: prefetched: expected at most the loads, 40, got 50"),
    ("log.csv", EVICTIONS.replace("ms_per_step,", "ms,", 1), "line 2: expected a column 'ms_per_step'"),
    ("curves.csv", CURVES.replace("36.6,10", "136.6,10"), "line 2: hit_rate: expected a number from 0 to 1"),
    ("rows.csv", "id,model,policy\na,mixtral-8x7b,lru\n", "line 2: slots: expected experts a layer"),
    ("run.jsonl", "{]", "line 1: expected an event of HybriMoE: not plain JSON"),
    ("run.jsonl", "", "expected events of HybriMoE, some of type placement in stage decode, got none"),
    ("run.jsonl", event(1, 0, 3).replace("time_ns", "time"), "expected placements of HybriMoE with counts, layer"),
    ("run.jsonl", event(1, 0, 3).replace(': 6', ': 0'), "expected placements of HybriMoE with counts, layer"),
    ("runs.csv", SUMMARY.replace(",4,", ",inf,"), "line 2: prefetch_size: expected a number or an empty cell"),
    ("run.txt", "moe-cache: steps=5 hit=9.0% resident=1/2", "got 1 such lines and no file"),
])
def test_what_cannot_be_read_is_refused_with_its_line_and_column(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    with pytest.raises(LogError) as refused:
        read_cache_log(written(tmp_path, name, text))
    assert expected in str(refused.value)


@pytest.mark.parametrize(("name", "expected"), [("none.csv", "found no such file"), ("none.log", "found no such file")])
def test_a_file_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(LogError) as refused:
        is_cache_log(tmp_path / name)
    assert expected in str(refused.value)
    assert "Errno" not in str(refused.value)


def test_a_table_of_something_else_is_refused_by_its_columns(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="or a log that trilane accuracy knows, got the columns a, b"):
        is_cache_log(written(tmp_path, "other.csv", "a,b\n1,2\n"))


@pytest.mark.parametrize(("text", "got"), [("server is listening\n", "lines of none"), ("", "an empty file")])
def test_a_log_of_another_program_is_refused_with_all_kinds_that_are_read(tmp_path: Path, text: str, got: str) -> None:
    with pytest.raises(LogError) as refused:
        is_cache_log(written(tmp_path, "server.txt", text))
    for kind in ("Strata's engine", "llama.cpp with a cache", "HybriMoE's events (.jsonl)", "a table (.csv)"):
        assert kind in str(refused.value)
    assert str(refused.value).endswith(f"got {got}")


def test_a_window_of_a_batch_is_refused() -> None:
    with pytest.raises(LogError, match="a batch of several texts has no windows"):
        CacheRow(id="a", model="mixtral-8x7b", policy="lru", slots=1, batch=2, window=2)
