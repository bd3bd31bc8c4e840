"""Words of a command line: numbers, names, lists and ranges that an option may be given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from random import Random
from typing import Any

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.octets import changed_bytes
from benchmarks.fuzz.trees import TEXTS

NUMBERS = (
    "0", "1", "2", "-1", "-0", "+5", "3", "1.5", ".5", "1e3", "1e18", "1e999", "nan", "inf", "-inf", "9" * 30,
    "9" * 5000, "1_000", "0x10", "\u0663", "\uff11", "2147483648", "9223372036854775808", "1,2", "1,,2", ",", "1..4",
    "..", "1..", "1..1e9", "1..4/1000000000", "4..1", "0..1", "null", "1,null", "true", "1/0", "{a: 1}", "[1]", "4x16",
    "0x0", "3x-1", "500MiB", "1e3GB", "0B", "9" * 30 + "TB",
)
_TINY = "--set trace=mini-moe:2 --set model=null --set cached_share=0.3 --set prompt_tokens=4 --set generated_tokens=2"
_WHATIF = f"whatif --jobs 1 --policies dali,fiddler {_TINY}"
OPTIONS: Mapping[str, str] = {
    f"compare --policies fiddler {_TINY}": "--draws=2 --jobs=1 --policies=dali",
    f"{_WHATIF} --vary batch=1,2": "--draws=2 --jobs=1 --vary=cached_share=0.1,null",
    _WHATIF: "--vary=pcie_gbps=8..64/3 --vary=hardware=rtx3090-ddr4,rtx4090-ddr5",
    f"ablate fiddler {_TINY}": "--draws=2 --jobs=1",
    "sweep s.yaml -o out/table.parquet": "--jobs=1",
    "plot t.parquet -o out --kind heat": "--x=cached_share --y=batch --policies=dali --where=batch=1 --kind=heat",
    "plot t.parquet -o out --kind speedup": "--baseline=fiddler --where=batch=2",
    "cache-curve mini-moe:1": "--pool=1MiB,50MB --seed=1 --policies=lru,belady",
    "trace synth --like mixtral-8x7b:2 -o out/trace.safetensors": "--sequences=3 --prompt-tokens=8 --seed=1 "
    "--generated-tokens=8 --like=mixtral-8x7b:2 --fit=mini-moe:2",
    "trace capture --model a/b --prompts p.jsonl -o out/trace.safetensors": "--prompt-tokens=8 --generated-tokens=8 "
    "--batch-size=2 --temperature=0.8 --seed=1 --forecasts=gate@1,residual@1 --dtype=auto",
    "fit -m mini-moe:2 --gpu rtx-4080 --ram ddr5-5600 --jobs 1": "--cores=16 --channels=2 --pcie=4x16 --ram-gb=64 "
    "--prompt=512 --generated=64 --batch=2 --jobs=1 --model=mixtral-8x7b@q4_k_m:2 --gpu=rtx-4090 --ram=ddr4-3200 "
    "--cpu=ryzen-9-7950x --weights=q8_0 --policies=fiddler --trace=mini-moe:2 --calibration=mini-moe "
    "--policy-engine=pytorch",
    "fit -m mini-moe:2 --jobs 1": "--machine=rtx3090-ddr4",
    "pays cache -m mixtral-8x7b:2 --weights bf16 --gpu gtx-1650-super --ram ddr4-3200 --draws 1 --jobs 1 --generated 2":
    "--x=0.5 --y=13 --draws=2 --batch=2 --prompt=64 --policy=llama.cpp@cache --trace=mini-moe:2 --generated=4",
    "profile -o out/profile.yaml --lanes host-lanes": "--batch=1,4 --context=16,32 --prompt=16 --gpu-core=0 "
    "--cpu-cores=0,1 --link-gb-per-s=4 --memory-gb=8 --cpu-threads=2 --device=0 --chunk-mb=4 "
    "--model=mini-moe:2 --policy-engine=pytorch",
    "validate p.yaml --profile m.yaml": "--repeats=2 --time-limit=5 --policies=fiddler --set=seed=1",
    f"measure {_TINY}": "--host-memory-gb=4 --cpu-threads=2 --device=0 --chunk-mb=4 --policy=dali",
    f"simulate {_TINY}": "--policy=fiddler --set=hardware=rtx-4080+ddr5-5600+16-cores --scenario=s.yaml",
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
    """What a shell can pass: no null bytes, and no more than the system allows."""
    return os.fsdecode(text.replace(b"\0", b"")[:120_000])
