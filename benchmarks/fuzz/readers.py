"""What reads a stranger's input, and how: for each reader a share of all inputs, and the making of one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.containers import Sign, changed_archive, changed_journal, changed_table, changed_tensors
from benchmarks.fuzz.ggufs import changed_gguf
from benchmarks.fuzz.octets import changed_bytes
from benchmarks.fuzz.options import as_word, changed_word, option_case
from benchmarks.fuzz.samples import RUN, SCENARIOS, Samples
from benchmarks.fuzz.trees import changed, strange, written
from traces.capture import vectors
from traces.models.shape import ModelShape
from traces.trace import trace_checksum

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
_FIT = "fit -m mini-moe:2 --machine rtx3090-ddr4 --jobs 1"
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
        "fit -m config.json --machine rtx3090-ddr4 --jobs 1")),
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
}
