"""What a reader can read in a picture, and rows to draw."""

from __future__ import annotations

from typing import Any

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
