"""A copy of the source tree with some files changed: links to everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
    """What ``trilane WORDS`` prints when it is imported from ``folder``; fails with what it says of an error."""
    code = "from trilane.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "150"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
