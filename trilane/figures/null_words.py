"""What stands where an axis has no value: null is an answer too, such as "the card's own" memory."""

from __future__ import annotations

from collections.abc import Mapping

from trilane.study.sweep.axes import PARAMETER, SCENARIO_KEYS, axis_label

_TEXTS: Mapping[str, tuple[str, str]] = {  # as a value beside its axis' name, and with what it is
    "gpu_memory_gb": ("the card's own", "the card's own memory"),
    "cached_share": ("what fits", "what fits cached"),
    "model": ("the trace's own", "the trace's own model"),
    "prompt_tokens": ("as recorded", "prompts as recorded"),
    "generated_tokens": ("as recorded", "as many tokens as recorded"),
    "prefill_chunk_tokens": ("whole", "whole prompts"),
    "sequences": ("from the first", "sequences from the first"),
    "calibration": ("the bundled one", "the bundled calibration"),
    "noisy_forecast_recall": ("the trace's own", "the trace's own forecasts"),
    "parameters": ("default", "default parameters"),
}


def null_text(name: str) -> str:
    """What null means as a value of an axis."""
    return _of(name)[0]


def null_words(name: str) -> str:
    """The same with what it is the value of."""
    return _of(name)[1]


def _of(name: str) -> tuple[str, str]:
    if name in _TEXTS:
        return _TEXTS[name]
    words = axis_label(name).partition(" (")[0]
    if name.startswith(PARAMETER):
        return "default", f"default {words}"
    return ("none", f"no {words}") if name in SCENARIO_KEYS else ("the machine's own", f"the machine's own {words}")
