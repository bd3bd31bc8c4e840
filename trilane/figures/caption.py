"""What was run, in a line: what all runs have in common, and must be said of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from sim.machine.dials import DIALS, PCIE
from sim.runs.scenario import Scenario
from trilane.figures.axis_words import setting_words
from trilane.study.sweep.axes import SCENARIO_KEYS

_MEMORY = ("cached_share", "gpu_memory_gb", "gpu.memory_bytes")  # axes that say how much room there is
_LENGTHS = ("prompt_tokens", "generated_tokens")
_TOLD = ("runtime", "prefill_chunk_tokens", "noisy_forecast_recall")  # keys that are told if they are not by default
_DEFAULT = Scenario()
_LINK = "pcie_gbps"  # turns the same numbers of the machine as PCIE


def about(runs: pd.DataFrame, axes: Collection[str]) -> str:
    """Of model, machine, memory, batch, lengths, trace and draws, what does not vary along ``axes``."""
    fixed = {name: runs[name].iloc[0] for name in runs.columns if name in SCENARIO_KEYS and name not in axes}
    synthetic = any("synthetic trace" in json.loads(labels) for labels in runs["labels"])
    parts = [
        _machine(fixed), _changed(runs, axes), _memory(fixed, axes),
        f"batch {fixed['batch']:g}" if "batch" in fixed else "",
        _lengths(runs, axes),
        *(setting_words(name, fixed[name]) for name in _TOLD if not _by_default(name, fixed)),
        f"routing of {fixed['trace']}" if "trace" in fixed else "",
        "synthetic trace" if synthetic else "",
        f"{draws} draws" if (draws := runs["draw"].nunique()) > 1 else "1 draw",
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _by_default(name: str, fixed: Mapping[str, Any]) -> bool:
    """Whether a key is what a scenario has without a word; true of one that varies."""
    value = fixed.get(name)
    return value is None or value != value or value == getattr(_DEFAULT, name)


def _machine(fixed: Mapping[str, Any]) -> str:
    model, machine = fixed.get("model"), fixed.get("hardware")
    return " on ".join(str(part) for part in (model, machine) if isinstance(part, str))


def _changed(runs: pd.DataFrame, axes: Collection[str]) -> str:
    """How many numbers of the machine all runs have changed, beside those that the axes turn."""
    documents = [json.loads(text) for text in runs["hardware_overrides"].unique()]
    common = set.intersection(*(set(document.items()) for document in documents))
    turned = {key for axis in axes for key in _turned(axis)}
    count = len({key for key, _ in common} - turned) if "hardware_overrides" not in axes else 0
    return f"{count} number{'s' * (count != 1)} of the machine changed" if count else ""


def _turned(axis: str) -> tuple[str, ...]:
    """The numbers of a machine that an axis sets."""
    dial = _LINK if axis == PCIE else axis
    return DIALS[dial].keys if dial in DIALS else (axis,)


def _memory(fixed: Mapping[str, Any], axes: Collection[str]) -> str:
    if set(_MEMORY) & set(axes):
        return ""
    if pd.notna(fixed["cached_share"]):
        return f"{fixed['cached_share']:.0%} of the experts cached"
    if pd.isna(fixed["gpu_memory_gb"]):
        return "the card's own memory"
    return f"{fixed['gpu_memory_gb']:g} GB of GPU memory"


def _lengths(runs: pd.DataFrame, axes: Collection[str]) -> str:
    """Tokens of prompt and answer, where they are the same in all runs; of a prompt as recorded nothing."""
    names = [name for name in _LENGTHS if name in runs.columns and name not in axes]
    told = {name: runs[name].dropna().unique() for name in names}
    known = {name: f"{lengths[0]:g}" for name, lengths in told.items() if len(lengths) == 1}
    if len(known) == len(_LENGTHS):
        return f"{'+'.join(known.values())} tokens"
    return "".join(f"{count} {name.replace('_', ' ')}" for name, count in known.items())
