"""Logs of several programs as rows of one table; which program's a file is, its columns or lines say.

===========================  ===========================================================================================
told by                      what it is
===========================  ===========================================================================================
column ``policy``            the table itself (``rows.CacheRow``)
columns ``part``, ``bytes``  timed copies and kernels (``kernel_rows.KernelRow``), another table
column ``slots_per_layer``   curves of expert caches as people collect them: kekzl/imp, thecodacus/llama.cpp,
                             davetha/r9700-lru-expert-cache; what they leave open is left out, with the reason
column ``eviction``          aojsd/GPU_Offloading: evictions x prefetches of Mixtral, loads and ms of a step
column ``cache_size``        Yuelinfeng/HybriMoE: its summary of runs (``analyze_mechanism_trace.py``)
line of JSON, ``event_type`` Yuelinfeng/HybriMoE: the events of one run, with times in ns
lines ``moe-cache: steps=``  llama.cpp with the cache of everett6/moe-prefetch
===========================  ===========================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from trilane.common.csv_files import read_lines
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted, shortened
from trilane.common.schema import from_dict
from trilane.engines.strata.engine_log import is_log, is_of_strata, log_text
from trilane.study.cache_logs.rows import CacheRow, LogError, read_rows

Line = Mapping[str, str]
_STRATA = {"gpu", "quant"}  # columns of its requests
_SPEEDS = {"decode_tokens_per_s", "prompt_tokens_per_s"}  # of trilane.engines.accuracy.measured_rows
_EXPECTED = "rows of caches of experts, requests of Strata, or a log that trilane accuracy knows"
_KINDS = (
    "a log of Strata's engine (lines 'strata serve: prompt ... tokens = ...'), of llama.cpp with a cache of experts "
    "('moe-cache: steps=...'), HybriMoE's events (.jsonl) or a table (.csv)"
)


def read_cache_log(path: str | Path) -> list[CacheRow]:
    """The rows of a file of any kind above. Raises LogError, which names the line and the column."""
    if Path(path).suffix in _TEXTS:
        return [_TEXTS[Path(path).suffix](_text(path), Path(path))]
    columns = columns_of(path)
    if "policy" in columns:
        return read_rows(path)
    lines = read_lines(path, _EXPECTED, LogError)
    kind = next(_CSV[column] for column in _CSV if column in columns)
    return [_row(kind, number, line, path) for number, line in enumerate(lines, 2)]


def is_cache_log(path: str | Path) -> bool:
    """True for a file of another program than Strata. Raises LogError for one that is of none."""
    if is_log(path):
        return _is_cache_text(_text(path), path)
    columns = columns_of(path)
    if _SPEEDS & {*columns}:
        raise LogError(f"{path}: expected {_EXPECTED}, got a table of speeds; use: trilane accuracy --check {path}")
    if Path(path).suffix == ".jsonl" or {"policy", *_CSV} & {*columns} or are_kernels(path):
        return True
    if not {*columns} >= _STRATA:
        got = f"the columns {shortened(', '.join(columns))}" if any(columns) else "an empty file"
        raise LogError(f"{path}: expected {_EXPECTED}, got {got}")
    return False


def _is_cache_text(text: str, path: str | Path) -> bool:
    if _STEPS.search(text):
        return True
    if not is_of_strata(text):
        raise LogError(f"{path}: expected {_KINDS}; got {'lines of none' if text.strip() else 'an empty file'}")
    return False


def are_kernels(path: str | Path) -> bool:
    """True for a table of timed copies and kernels. Raises LogError for a file that cannot be read."""
    return {*columns_of(path)} >= {"part", "bytes"}


def columns_of(path: str | Path) -> list[str]:
    """The names in the first line of a file. Raises LogError."""
    first, _, _ = _text(path).partition("\n")
    return [name.strip().strip('"') for name in first.split(",")]


def _text(path: str | Path) -> str:
    if Path(path).is_dir() or not Path(path).exists():
        known = "bundled, caches or kernels"
        raise LogError(f"{path or quoted('')}: expected {known}, or a file with {_EXPECTED}; found no such file")
    return log_text(path, _EXPECTED, LogError)


def _row(kind: Callable[[Line], dict[str, Any]], number: int, line: Line, path: str | Path) -> CacheRow:
    where = f"{path}: line {number}"
    try:
        cells = kind(line)
    except KeyError as fault:
        raise LogError(f"{where}: expected a column {fault}") from None
    except LogError as fault:
        raise LogError(f"{where}: {fault}") from None
    return from_dict(CacheRow, {name: cell for name, cell in cells.items() if cell is not None}, where, LogError)


def _number(line: Line, column: str) -> float | None:
    """The number of a cell; None if it is empty. Raises LogError, which names the column."""
    text = line[column].strip()
    with suppress(ValueError):
        if isfinite(value := float(text or 0)):
            return value if text else None
    raise LogError(f"{column}: expected a number or an empty cell, got {quoted(text)}")


def _needed(line: Line, column: str) -> float:
    value = _number(line, column)
    if not value or value < 0:
        raise LogError(f"{column}: expected a number above 0, got {quoted(line[column])}")
    return value


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


# --- aojsd/GPU_Offloading ---------------------------------------------------------------------------------------------

_H100, _MIXTRAL_LAYERS, _MIXTRAL_EXPERTS = "h100-pcie+ddr5-4800-ecc", 32, 8
_EVICTIONS = {"Belady": "belady", "StaticFreq": "static", "LFU": "lfu", "LRU": "lru"}
_AHEAD = {"None": 0, "Oracle(1)": 1, "Oracle": _MIXTRAL_EXPERTS}


def _evictions(line: Line) -> dict[str, Any]:
    for column, known in (("eviction", _EVICTIONS), ("prefetch", _AHEAD)):
        if line[column] not in known:
            raise LogError(f"{column}: expected {', '.join(known)}, got {quoted(line[column])}")
    steps = _needed(line, "steps")
    return {
        "id": f"{line['eviction']}-{line['prefetch']}-{line['cached_percent']}", "source": line["source"],
        "model": "mixtral-8x7b", "machine": _H100, "link_gb_s": _number(line, "h2d_gb_s"), "start": "profile",
        "policy": _EVICTIONS[line["eviction"]], "prefetch": _AHEAD[line["prefetch"]],
        "slots": _needed(line, "cached_experts") / _MIXTRAL_LAYERS, "steps": 64,
        "batch": round(_needed(line, "avg_batch")), "active": _number(line, "avg_experts_per_layer"),
        "compute_ms": _number(line, "compute_ms_per_step"), "step_ms": _number(line, "ms_per_step"),
        "loads": _over(_number(line, "total_loads"), steps),
        "prefetched": _over(_number(line, "prefetch_loads"), steps),
    }


# --- curves of expert caches ------------------------------------------------------------------------------------------

_IMP_HOST, _FORK_HOST = "ddr5-5600+ryzen-9-9950x", "ddr4-3200"  # of imp no CPU computes
_IMP_MATRICES = 3  # of an expert, with a slot each: 41 more of 48 layers took 1,753 MiB, as do NVFP4 matrices
_IMP_STEPS, _R9700_WINDOW, _R9700_STEPS = 256, 5, 155  # a token and 4 drafts; its 15 answers have 2,329 steps
_R9700_SLOTS = (1627, 3255, 4882, 6510, 8138, 9765, 12207, 13020, 13834, 14648)  # of points 1 to 10, docs/LOCALITY.md
_FLASH_LAYERS = 48
_R9700_KINDS = {
    "static": ("static", "profile"), "LRU warm": ("layer-lru", "profile"), "LRU cold": ("layer-lru", "empty"),
    "LFU": ("layer-lfu", "profile"), "Belady": ("layer-belady", "profile"),
}


def _curve(line: Line) -> dict[str, Any]:
    hit = line["hit_percent"]
    ranged = "hit_percent is a range" if re.fullmatch(r"\d+-\d+", hit) else ""
    speed = _number(line, "tg_tok_s")
    common: dict[str, Any] = {
        "id": line["id"], "source": line["source"].partition("#")[0].partition(" ")[0], "model": line["model"],
        "slots": _number(line, "slots_per_layer"),
        "hit_rate": None if ranged else _over(_number(line, "hit_percent"), 100),
        "step_ms": None if speed is None else 1000 / _needed(line, "tg_tok_s"),
    }
    program = next((read for name, read in _PROGRAMS.items() if name in common["source"]), None)
    cells = common | (program(line) if program else {"policy": "lru", "left_out": "the cache's rule is not stated"})
    unknown = "slots are not stated" if cells["slots"] is None else ""
    silent = "neither hits nor speeds of decode" if cells["hit_rate"] is None and cells["step_ms"] is None else ""
    return cells | {"left_out": ranged or cells.get("left_out") or unknown or silent}


def _imp(line: Line) -> dict[str, Any]:
    slots = _number(line, "slots_per_layer")
    staging = line["arm"] == "staging only"
    weights = "q4_k_m" if line["quant"] == "q4_k_m" else "nvfp4"
    return {
        "model": f"{line['model']}@{weights}", "policy": "layer-lru", "engine": "imp", "steps": _IMP_STEPS,
        "machine": f"rtx-5090+{_IMP_HOST}", "link_gb_s": _number(line, "link_gb_s"),
        "slots": 0.0 if staging else _over(slots, _IMP_MATRICES),
        "put_in": "a number of engine imp was taken from it" if staging else "",
        "left_out": "all experts are on the GPU" if line["arm"] == "resident" else "",
    }


def _fork(line: Line) -> dict[str, Any]:
    static = line["arm"] == "profile cache"
    weights = "iq4_xs" if line["quant"] == "iq4_xs" else "q4_k_m"
    return {
        "model": f"{line['model']}@{weights}", "policy": "llama-cache-static" if static else "llama.cpp",
        "engine": "llama.cpp-uploads", "steps": 64, "machine": f"rtx-3060+{_FORK_HOST}",
        "slots": _number(line, "slots_per_layer") if static else 0.0, "assumed": "the CPU and its memory",
    }


def _r9700(line: Line) -> dict[str, Any]:
    kind, _, rest = line["arm"].partition(", ")
    point = re.match(r"point (\d+) of 10", rest)
    slots = _R9700_SLOTS[int(point[1]) - 1] if point and 1 <= int(point[1]) <= 10 else None
    slots = int(rest.split()[0]) if slots is None and rest.endswith("slots") else slots
    policy, start = _R9700_KINDS.get(kind, ("layer-lru", "empty"))
    return {
        "policy": policy, "start": start, "window": _R9700_WINDOW, "steps": _R9700_STEPS,
        "slots": None if slots is None else slots / _FLASH_LAYERS,
        "left_out": "" if kind in _R9700_KINDS else "half of the slots are pinned",
    }


def _freetoken(_: Line) -> dict[str, Any]:
    return {"policy": "lru", "left_out": "the profile is of the text itself"}


_PROGRAMS: Mapping[str, Callable[[Line], dict[str, Any]]] = {
    "FreeToken": _freetoken,
    "kekzl/imp": _imp, "thecodacus": _fork, "r9700-lru-expert-cache": _r9700,
}

# --- Yuelinfeng/HybriMoE ----------------------------------------------------------------------------------------------

_HYBRIMOE = {
    "source": "Yuelinfeng/HybriMoE", "model": "deepseek-v2-lite@q4_k_m", "engine": "hybrimoe-2025",
    "machine": "rtx-4090-d+ddr5-4800-ecc+server", "prompt_tokens": 24,
}
_V2_LAYERS = 26
_HITS = ("live_cache_hit_ratio", "live_cache_hit")  # of the summary of mechanisms, and of all runs


def _hybrimoe(slots: float, prefetch: int, steps: int) -> dict[str, Any]:
    return _HYBRIMOE | {
        "id": f"cache{slots:g}_prefetch{prefetch}", "policy": f"hybrimoe@impl{{prefetch_size: {prefetch}}}",
        "slots": slots, "prefetch": prefetch, "steps": steps,
    }


def _summary(line: Line) -> dict[str, Any]:
    steps = max(round(_needed(line, "placement_events") / _V2_LAYERS), 1)
    cells = _hybrimoe(_needed(line, "cache_size"), int(_number(line, "prefetch_size") or 0), steps)
    return cells | {"hit_rate": _number(line, next((name for name in _HITS if name in line), _HITS[0]))}


def _events(text: str, path: Path) -> CacheRow:
    """A run: the hits of all decode steps, and the median time from one step's first layer to that of the next."""
    placed = [event for event in _placements(text, path) if event.get("stage") == "decode"]
    if not placed:
        raise LogError(f"{path}: expected events of HybriMoE, some of type placement in stage decode, got none of them")
    try:
        chosen = sum(int(event["selected_expert_count"]) for event in placed)
        hits = sum(int(event["resident_hit_expert_count"]) for event in placed)
        first = min(int(event["layer_idx"]) for event in placed)
        starts = sorted(int(event["time_ns"]) for event in placed if int(event["layer_idx"]) == first)
        slots, prefetch, hit_rate = float(placed[0]["cache_load_size"]), int(placed[0]["prefetch_size"]), hits / chosen
    except (KeyError, TypeError, ValueError, ArithmeticError) as fault:
        raise LogError(f"{path}: expected placements of HybriMoE with counts, layer and time_ns: {fault!r}") from None
    times = [(after - before) / 1e6 for before, after in pairwise(starts)]
    cells = _hybrimoe(slots, prefetch, len(starts)) | {"hit_rate": hit_rate}
    cells |= {"step_ms": median(times)} if times else {}
    return from_dict(CacheRow, cells, str(path), LogError)


def _placements(text: str, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}: line {number}: expected an event of HybriMoE"
        event = parse_json(line, where, LogError) if line.strip() else {}
        if isinstance(event, dict) and event.get("event_type") == "placement":
            yield event


# --- everett6/moe-prefetch --------------------------------------------------------------------------------------------

_STEPS = re.compile(r"moe-cache: steps=(\d+) hit=([\d.]+)% resident=[\d.]+/(\d+)")
_DECODE = re.compile(r"decode: (\d+) tokens, ([\d.]+) ms/token")
_GGUF = re.compile(r"([\w.-]+)-(Q\d\w+)\.gguf")
_CATALOGUE = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3.6-35B-A3B": "qwen3.5-35b-a3b"}


def _llama_cache(text: str, path: Path) -> CacheRow:
    """A run of llama-server with --moe-expert-cache; the last count is that of all steps."""
    counts, decode, file = _STEPS.findall(text), _DECODE.search(text), _GGUF.search(text)
    name = next((known for title, known in _CATALOGUE.items() if file and file[1].startswith(title)), None)
    if not counts or file is None or name is None:
        raise LogError(
            f"{path}: expected lines 'moe-cache: steps=... hit=...% resident=...' and the file of a model "
            f"({', '.join(_CATALOGUE)}), got {len(counts)} such lines and {file[0] if file else 'no file'}"
        )
    _, hit, slots = counts[-1]
    row = CacheRow(
        id=path.stem, source="everett6/moe-prefetch", model=f"{name}@{file[2].lower()}", policy="llama-cache-lru",
        engine="llama.cpp-uploads", machine="rtx-5070+ddr5-6000+ryzen-9-7950x", slots=float(slots), steps=256,
        hit_rate=float(hit) / 100,
    )
    return row if decode is None else replace(row, step_ms=float(decode[2]))


_CSV: Mapping[str, Callable[[Line], dict[str, Any]]] = {
    "slots_per_layer": _curve, "eviction": _evictions, "cache_size": _summary,
}
_TEXTS: Mapping[str, Callable[[str, Path], CacheRow]] = {
    ".jsonl": _events, ".txt": _llama_cache, ".log": _llama_cache,
}
