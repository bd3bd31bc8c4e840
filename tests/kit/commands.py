"""Commands in tests: run in an empty folder, or from a copy of the source tree with some files changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SHORT = ("--set", "prompt_tokens=4", "--set", "generated_tokens=3")


class Result(NamedTuple):
    """Output and files of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Trilane = Callable[..., Result]


def write_route_csv(path: Path, size: int = 1000) -> None:
    """A route_trace v1 file: 2 layers, 4 experts, top-1; a prompt of 2 tokens and 3 decode steps. Experts take ``size``
    bytes in the first layer, twice that in the second.
    """
    head = ["# route_trace v1", "# model=tiny arch=none n_layer=2 n_expert=4 n_expert_used=1",
            f"# layer=0 expert_bytes={size} dense_bytes=10", f"# layer=1 expert_bytes={2 * size} dense_bytes=10",
            "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    experts = [(0, 1), (2, 3), (0, 1), (0, 3), (2, 1)]
    rows = [
        f"0,{int(step > 1)},{step},{layer},0,{expert},1.0,0,{size * (layer + 1)}"
        for step, pair in enumerate(experts)
        for layer, expert in enumerate(pair)
    ]
    path.write_text("\n".join([*head, *rows, ""]))


# --- a copy of the source tree: links to everything but the changed files ---------------------------------------------

PACKAGES = ("policies", "realrun", "sim", "traces", "trilane")


def overlay(folder: Path, texts: Mapping[str, str]) -> Path:
    """Fill ``folder`` with links to the packages, except that the files in ``texts``, by path, have these texts."""
    changed = {ROOT / path: text for path, text in texts.items()}
    for package in PACKAGES:
        _place(ROOT / package, folder / package, changed)
    return folder


def _place(source: Path, target: Path, changed: Mapping[Path, str]) -> None:
    inside = [path for path in changed if source in path.parents]
    if source in changed:
        target.write_text(changed[source], encoding="utf-8")
    elif not inside:
        target.symlink_to(source)
    else:
        target.mkdir()
        new = {path for path in inside if path.parent == source}
        for path in {*source.iterdir(), *new}:
            if path.name != "__pycache__":
                _place(path, target / path.name, changed)


def run_in(folder: Path, *words: str) -> str:
    """Output of ``trilane WORDS`` imported from ``folder``; fails with its message of an error."""
    code = "from trilane.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRILANE_WIDTH": "150"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
