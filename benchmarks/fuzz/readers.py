"""Readers of a stranger's input: the share of all inputs that each gets, and the making of one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.fuzz.containers import (
    Sign,
    changed_archive,
    changed_gguf,
    changed_journal,
    changed_table,
    changed_tensors,
)
from benchmarks.fuzz.policy_files import policy_case
from benchmarks.fuzz.samples import RUN, SCENARIOS, TINY, Samples
from benchmarks.fuzz.trees import TEXTS, changed, changed_bytes, strange, written
from benchmarks.fuzz.worker import Case
from traces.capture import vectors
from traces.models.shape import ModelShape
from traces.trace import trace_checksum

# --- words of a command line ------------------------------------------------------------------------------------------


NUMBERS = (
    "0", "1", "2", "-1", "-0", "+5", "3", "1.5", ".5", "1e3", "1e18", "1e999", "nan", "inf", "-inf", "9" * 30,
    "9" * 5000, "1_000", "0x10", "\u0663", "\uff11", "2147483648", "9223372036854775808", "1,2", "1,,2", ",", "1..4",
    "..", "1..", "1..1e9", "1..4/1000000000", "4..1", "0..1", "null", "1,null", "true", "1/0", "{a: 1}", "[1]", "4x16",
    "0x0", "3x-1", "500MiB", "1e3GB", "0B", "9" * 30 + "TB",
)
_WHATIF = f"whatif --jobs 1 --policies dali,fiddler {TINY}"
OPTIONS: Mapping[str, str] = {
    f"compare --policies fiddler {TINY}": "--draws=2 --jobs=1 --policies=dali",
    f"{_WHATIF} --vary batch=1,2": "--draws=2 --jobs=1 --vary=cached_share=0.1,null",
    _WHATIF: "--vary=pcie_gbps=8..64/3 --vary=hardware=rtx3090-ddr4,rtx4090-ddr5",
    f"ablate fiddler {TINY}": "--draws=2 --jobs=1",
    "sweep s.yaml -o out/table.parquet": "--jobs=1",
    "plot t.parquet -o out --kind heat": "--x=cached_share --y=batch --policies=dali --where=batch=1 --kind=heat",
    "plot t.parquet -o out --kind speedup": "--baseline=fiddler --where=batch=2",
    "cache-curve mini-moe:1": "--pool=1MiB,50MB --seed=1 --policies=lru,belady",
    "trace synth --like mixtral-8x7b:2 -o out/trace.safetensors": "--sequences=3 --prompt-tokens=8 --seed=1 "
    "--generated-tokens=8 --like=mixtral-8x7b:2 --fit=mini-moe:2",
    "trace capture --model a/b --prompts p.jsonl -o out/trace.safetensors": "--prompt-tokens=8 --generated-tokens=8 "
    "--batch-size=2 --temperature=0.8 --seed=1 --forecasts=gate@1,residual@1 --dtype=auto",
    "fit -m mini-moe:2 --gpu rtx-4080 --ram ddr5-5600 --jobs 1": "--cores=16 --channels=2 --pcie=4x16 --ram-gb=64 "
    "--prompt=512 --generated=64 --batch=2 --jobs=1 --model=mixtral-8x7b@q4_k_m:2 --ram=ddr4-3200 "
    "--cpu=ryzen-9-7950x --weights=q8_0 --policies=fiddler --trace=mini-moe:2 --calibration=mini-moe "
    "--policy-engine=pytorch",
    "fit -m mini-moe:2 --jobs 1": "--machine=rtx3090-ddr4",
    "fit -m mini-moe:2 --ram ddr5-5600 --jobs 1": "--gpu=rtx-4090",
    "pays cache -m mixtral-8x7b:2 --weights bf16 --gpu gtx-1650-super --ram ddr4-3200 --draws 1 --jobs 1 --generated 2":
    "--x=0.5 --y=13 --draws=2 --batch=2 --prompt=64 --policy=llama.cpp@cache --trace=mini-moe:2 --generated=4",
    "profile -o out/profile.yaml --lanes host-lanes": "--batch=1,4 --context=16,32 --prompt=16 --gpu-core=0 "
    "--cpu-cores=0,1 --link-gb-per-s=4 --memory-gb=8 --cpu-threads=2 --device=0 --chunk-mb=4 "
    "--model=mini-moe:2 --policy-engine=pytorch",
    "validate p.yaml --profile m.yaml": "--repeats=2 --time-limit=5 --policies=fiddler --set=seed=1",
    f"measure {TINY}": "--host-memory-gb=4 --cpu-threads=2 --device=0 --chunk-mb=4 --policy=dali",
    f"simulate {TINY}": "--policy=fiddler --set=hardware=rtx-4080+ddr5-5600+16-cores --scenario=s.yaml",
    "hardware": "rtx-4080+ddr5-5600+ryzen-9-7950x+pcie-4x16",
    "models": "qwen3-30b-a3b@q4_k_m:4",
    "policies": "fiddler@impl",
    "trace info": "mini-moe:3",
    "trace stats": "mini-moe:1",
}  # commands, and options that they take


def option_case(random: Random, samples: Any, damaged: bool = True) -> Case:
    """A command with one option that has a strange value, and all files that a command may name."""
    command = random.choice(list(OPTIONS))
    option, equals, value = random.choice(OPTIONS[command].split()).partition("=")
    if not equals:
        option, value = "", option
    if damaged:
        value = random.choice(NUMBERS) if random.random() < 0.4 else changed_word(random, value)
    words = (value,) if not option else (f"{option}={value}",) if random.random() < 0.6 else (option, value)
    files = {"p.jsonl": samples.prompts, "p.yaml": samples.plan, "m.yaml": samples.profile, "s.yaml": samples.sweep,
             "t.parquet": samples.table}
    outputs = ("out/table.parquet", "out/table.parquet.journal*", "out/trace.safetensors", "out/*.png", "out/*.csv")
    return Case((*command.split(), *words), files, outputs, statuses=(1, 2) if command.startswith("sweep") else (2,))


def changed_word(random: Random, word: str) -> str:
    """Another word, as a shell can pass it: without null bytes, and no longer than the system allows."""
    kind = random.random()
    if kind < 0.5:
        return as_word(changed_bytes(random, word.encode("utf-8", "surrogateescape")))
    at = random.randrange(len(word) + 1)
    text = word[:at] + random.choice((*NUMBERS, *TEXTS)) + word[at + random.randrange(4) :]
    return as_word((random.choice(TEXTS) if kind < 0.8 else text).encode("utf-8", "surrogatepass"))


def as_word(text: bytes) -> str:
    """Text as a shell can pass it: without null bytes, and no longer than the system allows."""
    return os.fsdecode(text.replace(b"\0", b"")[:120_000])


# --- readers ----------------------------------------------------------------------------------------------------------

Change = Callable[[Random, bytes], bytes]


# --- changes ----------------------------------------------------------------------------------------------------------


def in_grammar(change: Change) -> Change:
    """Half of the inputs with ``change``, half with other bytes; a few with both."""

    def either(random: Random, data: bytes) -> bytes:
        kind = random.random()
        if kind < 0.6:
            data = change(random, data)
        return changed_bytes(random, data) if kind > 0.57 else data

    return either


def in_document(random: Random, data: bytes) -> bytes:
    """Another node in a document of YAML or JSON."""
    return _bytes(written(changed(random, _parsed(data))))


def in_lines(random: Random, data: bytes) -> bytes:
    """Other fields of a line: separated by commas or blanks, or JSON."""
    lines = data.decode().splitlines()
    at = random.randrange(len(lines))
    if lines[at].startswith("{"):
        lines[at] = written(changed(random, json.loads(lines[at])))
    else:
        mark = "," if "," in lines[at] else "="
        fields = lines[at].split(mark)
        fields[random.randrange(len(fields))] = (
            written(strange(random)) if random.random() < 0.5 else changed_word(random, "1")
        )
        lines[at] = mark.join(fields)
    if random.random() < 0.2:
        lines[at:at] = random.choice((lines[at : at + 1], lines, [""]))
    return _bytes("\n".join(lines))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@cache
def _parsed(data: bytes) -> Any:
    return yaml.safe_load(data)


def sign_trace(metadata: dict[str, str], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Renew the checksum of a trace."""
    shape = ModelShape.from_dict(json.loads(metadata["shape"]))
    metadata["checksum"] = trace_checksum("trace", shape, tensors, json.loads(metadata["provenance"]))


def sign_vectors(metadata: dict[str, str], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Renew the checksum of vectors, which is in their one JSON text."""
    values = json.loads(metadata["trilane"])
    metadata["trilane"] = json.dumps({**values, "checksum": vectors._checksum(tensors)})


def in_tensors(sign: Sign) -> Change:
    """Other metadata, header or numbers of a safetensors file."""
    return lambda random, data: changed_tensors(random, data, sign)


# --- readers ----------------------------------------------------------------------------------------------------------


class Reader(NamedTuple):
    """A file that commands read; ``weight``: its part of the inputs, next to those of the others."""

    weight: float
    file: str
    sample: str
    change: Change
    commands: Sequence[str]
    others: Mapping[str, str] = {}  # other files, by the samples' names
    outputs: Sequence[str] = ()
    statuses: Sequence[int] = (2,)
    runs: int = 1

    def case(self, random: Random, samples: Samples, damaged: bool = True) -> Case:
        """One of the commands, and one of the samples."""
        found = samples.named(self.sample)
        data = random.choice(found) if isinstance(found, list) else found
        files = {name: samples.named(other) for name, other in self.others.items()}
        files[self.file] = self.change(random, data) if damaged else data
        return Case(random.choice(self.commands).split(), files, self.outputs, self.runs, self.statuses)


class Words(NamedTuple):
    """Options of commands, in place of a file."""

    weight: float
    case: Callable[..., Case]


def in_set(random: Random, samples: Samples, damaged: bool = True) -> Case:
    """Values of ``--set``."""
    scenario = random.choice(SCENARIOS)
    key = random.choice(list(scenario))
    value = json.dumps(scenario[key])
    if damaged:
        value = written(changed(random, scenario[key])) if random.random() < 0.7 else changed_word(random, value)
    word = changed_word(random, f"{key}={value}") if damaged and random.random() < 0.1 else f"{key}={value}"
    rest = [part for name, its in scenario.items() if name != key for part in ("--set", f"{name}={json.dumps(its)}")]
    return Case(("simulate", *rest, "--set", as_word(_bytes(word))))


def in_measured(random: Random, samples: Samples, damaged: bool = True) -> Case:
    """The journal of a validation, of which nothing is left to be measured."""
    files = {**samples.measured, "m.yaml": samples.profile}
    if damaged:
        files["out/journal"] = in_grammar(changed_journal)(random, files["out/journal"])
    words = ("validate", "p.yaml", "--profile", "m.yaml", "--out", "out")
    return Case(words, files, ("out/journal*",), runs=8)


_DOCUMENT, _LINES = in_grammar(in_document), in_grammar(in_lines)
_TRACE, _VECTORS = in_grammar(in_tensors(sign_trace)), in_grammar(in_tensors(sign_vectors))
_TABLE, _JOURNAL = in_grammar(changed_table), in_grammar(changed_journal)
_SET = " ".join(f"--set {key}={json.dumps(value)}" for key, value in RUN.items())
_MEASURED = "--set trace=mini-deepseek:2 --set model=deepseek-v2-lite:2"
_LOG = "-o out/trace.safetensors --model mini-moe:2"
_IMPORTED = ("out/trace.safetensors",)
_CAPTURE = "trace capture --model a/b -o out/trace.safetensors --prompts"
_FIT = "fit -m mini-moe:2 --machine rtx3090-ddr4 --policies usual --jobs 1"
_SWEEP = ("sweep s.yaml -o out/table.parquet --jobs 1",)
_SWEPT = ("out/table.parquet", "out/table.parquet.journal*")
READERS: Mapping[str, Reader | Words] = {
    "scenario": Reader(12, "s.yaml", "scenarios", _DOCUMENT, (
        "simulate -s s.yaml", "simulate -s s.yaml --json out/result.json",
        "compare -s s.yaml --policies fiddler,dali --draws 2 --jobs 1"), outputs=("out/result.json",)),
    "machine": Reader(10, "m.yaml", "machines", _DOCUMENT, (
        "hardware m.yaml", "hardware m.yaml --json out/result.json", f"simulate {_SET} --set hardware=m.yaml"),
        outputs=("out/result.json",)),
    "profile": Reader(8, "m.yaml", "profile", _DOCUMENT, (
        "hardware m.yaml", "hardware m.yaml --json -", "profile -o m.yaml",
        f"simulate {_SET} --set hardware=m.yaml {_MEASURED}")),
    "config.json": Reader(6, "config.json", "configs", _DOCUMENT, (
        "models config.json", "models config.json@q4_k_m:1 --json -",
        "fit -m config.json --machine rtx3090-ddr4 --policies usual --jobs 1")),
    "gguf": Reader(8, "m.gguf", "ggufs", in_grammar(changed_gguf), ("models m.gguf", "models m.gguf:1 --json -")),
    "sweep": Reader(8, "s.yaml", "sweeps", _DOCUMENT, _SWEEP, outputs=_SWEPT, statuses=(1, 2)),
    "plan": Reader(4, "p.yaml", "plan", _DOCUMENT, ("validate p.yaml --profile m.yaml",), {"m.yaml": "profile"}),
    "mix": Reader(5, "s.yaml", "mixes", _DOCUMENT, ("simulate -s s.yaml",)),
    "--set": Words(8, in_set),
    "trace": Reader(12, "t.safetensors", "trace", _TRACE, (
        "trace info t.safetensors", "trace stats t.safetensors --json -", f"simulate {_SET} --set trace=t.safetensors",
        "cache-curve t.safetensors --policies lru,belady", f"{_FIT} --trace t.safetensors")),
    "calibration": Reader(3, "t.safetensors", "trace", _TRACE, (
        f"simulate {_SET} --set policy=moe-infinity --set calibration=t.safetensors",
        f"simulate {_SET} --set policy=hybrimoe --set calibration=t.safetensors")),
    "vectors": Reader(4, "v.safetensors", "vectors", _VECTORS, (f"{_CAPTURE} p.jsonl --vectors v.safetensors",), {
        "p.jsonl": "prompts"}),
    "prompts": Reader(4, "q.jsonl", "prompts", _LINES, (
        f"{_CAPTURE} q.jsonl", f"{_CAPTURE} p.jsonl --calibration q.jsonl"), {"p.jsonl": "other_prompts"}),
    "route csv": Reader(5, "r.csv", "route", _LINES, (
        "trace info r.csv", "trace import r.csv -o out/trace.safetensors", "cache-curve r.csv --policies lru"),
        outputs=("out/trace.safetensors",)),
    "llama-cpp csv": Reader(1.5, "r.csv", "llama_cpp", _LINES, (
        f"trace import r.csv {_LOG}", f"trace import r.csv --format llama-cpp {_LOG}"), outputs=_IMPORTED),
    "moe-beyond csv": Reader(1, "r.csv", "moe_beyond", _LINES, (
        f"trace import r.csv {_LOG}", f"trace import r.csv --prompt-tokens 2 {_LOG}"), outputs=_IMPORTED),
    "answers": Reader(2, "a.json", "answers", _DOCUMENT, (f"trace import a.json {_LOG}",), outputs=_IMPORTED),
    "megatron": Reader(1, "a.jsonl", "megatron", _LINES, (
        f"trace import a.jsonl {_LOG}", f"trace import a.jsonl --format megatron {_LOG}"), outputs=_IMPORTED),
    "npz": Reader(1.5, "a.npz", "arrays", in_grammar(changed_archive), (f"trace import a.npz {_LOG}",),
        outputs=_IMPORTED),
    "route manifest": Reader(1, "d/manifest.json", "manifest", _DOCUMENT, (f"trace import d {_LOG}",), {
        "d/r.safetensors": "shard"}, _IMPORTED),
    "route shard": Reader(1, "d/r.safetensors", "shard", in_grammar(in_tensors(lambda *_: None)), (
        f"trace import d {_LOG}",), {"d/manifest.json": "manifest"}, _IMPORTED),
    "parquet layer": Reader(1, "d/layer_02.parquet", "layer", _TABLE, (f"trace import d {_LOG}",), {
        "d/layer_03.parquet": "layer"}, _IMPORTED),
    "table": Reader(0.8, "t.parquet", "tables", _TABLE, tuple(
        f"plot t.parquet -o out --kind {kind}" for kind in ("tpot", "speedup", "heat", "hits")),
        outputs=("out/*.png", "out/*.csv")),
    "table again": Reader(1.5, "out/table.parquet", "tables", _TABLE, _SWEEP, {"s.yaml": "sweep"}, _SWEPT, (1, 2)),
    "journal": Reader(
        4, "out/table.parquet.journal", "journal", _JOURNAL, _SWEEP, {"s.yaml": "sweep"}, _SWEPT, (1, 2), 0),
    "measured runs": Words(1.5, in_measured),
    "speeds": Reader(4, "s.csv", "speeds", _LINES, (
        "accuracy --check s.csv", "accuracy --check s.csv --json out/result.json", "accuracy --check s.csv --row 172"),
        outputs=("out/result.json",)),
    "options": Words(10, option_case),
    "policy file": Words(8, policy_case),
}
