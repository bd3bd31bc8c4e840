"""Rows to draw, results of sweeps made by hand, and what a reader can read in a picture."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
from matplotlib.figure import Figure


def row(policy: str, tpot: float, *labels: str, **more: Any) -> dict[str, Any]:
    """A run's row: a fifth of its time waiting for copies, a tenth for the CPU."""
    stalls = {"stall_h2d_ms": 0.2 * tpot, "stall_cpu_ms": 0.1 * tpot, "stall_host_ms": 0.0}
    return {"policy": policy, "tpot_ms": tpot, "labels": list(labels), **stalls, **more}


def texts(figure: Figure) -> str:
    """All that a reader can read in a figure and its first panel, but for axis numbers."""
    ax, *_ = figure.axes
    [part] = figure.subfigs
    legend = [text.get_text() for legend in part.legends for text in legend.get_texts()]
    words = [text.get_text() for text in ax.texts] + [label.get_text() for label in ax.get_yticklabels()]
    around = [figure.get_suptitle(), part.get_suptitle(), figure.get_supxlabel(), ax.get_xlabel(), ax.get_ylabel()]
    return "\n".join([*around, *words, *legend])


# --- results of sweeps ------------------------------------------------------------------------------------------------

FIXED: dict[str, Any] = {
    "trace": "mini-deepseek", "model": "deepseek-v2-lite", "hardware": "rtx3090-ddr4", "hardware_overrides": "{}",
    "engine_overrides": "{}", "parameters": "{}", "prompt_tokens": None, "generated_tokens": 24, "sequences": "[0]",
    "gpu_memory_gb": None, "cached_share": 0.5, "batch": 1, "draw": 0, "labels": "[]",
    "decode_resident_hit_rate": 0.5, "cache_share": 0.5, "cache_bytes": 5 * 10**9, "lower_bound_tpot_ms": 4.0,
    "error": "",
}
ORACLE = {"policy": "oracle", "labels": json.dumps(["clairvoyant"])}
CHANGES = {"labels": json.dumps(["changes routing"]), "lower_bound_tpot_ms": None}


def run(policy: str, tpot_ms: float | None, **more: Any) -> dict[str, Any]:
    """One row of a sweep."""
    return {**FIXED, "policy": policy, "tpot_ms": tpot_ms, **more}


def seer(tpot_ms: float, **more: Any) -> dict[str, Any]:
    """The clairvoyant run."""
    return {**FIXED, **ORACLE, "tpot_ms": tpot_ms, **more}


def results(*axes: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The table of a sweep over ``axes``."""
    frame = pd.DataFrame([{"point": str(place), **row} for place, row in enumerate(rows)])
    frame.attrs["axes"] = ["policy", *axes]
    return frame


def two_shares(*, oracle: bool = True, draws: int = 1) -> pd.DataFrame:
    """dali 40 and 10 ms, fiddler 20 and 18 ms, with 20 % and 80 % cached; oracle 8 and 6, bounds 5 and 3. The second
    of two draws takes twice as long.
    """
    rows = []
    for share, dali, fiddler, best, bound in ((0.2, 40.0, 20.0, 8.0, 5.0), (0.8, 10.0, 18.0, 6.0, 3.0)):
        for draw in range(draws):
            at = {
                "cached_share": share, "cache_share": share, "cache_bytes": round(share * 10**10), "draw": draw,
                "lower_bound_tpot_ms": bound,
            }
            rows.append(run("dali", dali * (1 + draw), decode_resident_hit_rate=share, **at))
            rows.append(run("fiddler", fiddler * (1 + draw), decode_resident_hit_rate=share / 2, **at))
            rows += [seer(best * (1 + draw), decode_resident_hit_rate=0.9, **at)] if oracle else []
    return results("cached_share", rows=rows)
