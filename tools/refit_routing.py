"""Makes ``routing_models.yaml``: ``python -m tools.refit_routing --logs FOLDER``.

The folder holds the two logs that are not bundled, ``qwen.route.csv`` and ``gemma.route.csv``, of Helldez/BigMoeOnEdge
(https://github.com/Helldez/BigMoeOnEdge, Apache-2.0). Without it, their stored fits stay. DeepSeek-V2-Lite and
Mixtral-8x7B are fitted to published figures (``refit_routing_figures``, ``refit_repetitions``), gpt-oss-20b to its
calibration trace; the evaluated one is a check.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml

from tools.refit_repetitions import fit_repetitions
from tools.refit_routing_figures import fit_figures
from traces.importers.route_trace_v1 import import_route_trace
from traces.library import load_trace
from traces.synthesis.estimate import estimate_routing
from traces.synthesis.routing_model import STORED, RoutingModel, stored_models
from trilane.common.files import atomic_path

LOGS: Mapping[str, str] = {"qwen": "qwen3-30b-a3b", "gemma": "gemma-4-26b-a4b"}  # file -> model
BUNDLED: Mapping[str, str] = {  # model -> trace
    "mini-deepseek": "mini-deepseek", "mini-moe": "mini-moe", "gpt-oss-20b": "gpt-oss-20b-calibration",
}
_HEAD = "# Made by `python -m tools.refit_routing`: see there, and traces/synthesis/routing_model.py for the keys.\n"


def refit_bundled(name: str) -> RoutingModel:
    """The fit of a bundled trace, called as its model is."""
    return estimate_routing(load_trace(BUNDLED[name]), name, name, f"the bundled trace {BUNDLED[name]}")


def refit_log(folder: Path, name: str) -> RoutingModel:
    """The fit of a log that is not bundled."""
    file = f"{name}.route.csv"
    return estimate_routing(import_route_trace(folder / file), name, LOGS[name], f"Helldez/BigMoeOnEdge, {file}")


def main(
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="with qwen.route.csv and gemma.route.csv")
    ] = None
) -> None:
    """Fit, and write the file aside and rename it."""
    of_logs = [stored_models()[name] if logs is None else refit_log(logs, name) for name in LOGS]
    bundled = {name: refit_bundled(name) for name in BUNDLED}
    published = fit_figures(bundled["mini-deepseek"]), fit_repetitions(bundled["mini-moe"])
    fits = [fit.to_dict() for fit in (*of_logs, *published, *bundled.values())]  # of equally near ones, the first
    documents = {fit.pop("name"): fit for fit in fits}
    text = yaml.safe_dump(documents, sort_keys=False, default_flow_style=None, width=118)
    with atomic_path(STORED) as aside:
        aside.write_text(_HEAD + text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
