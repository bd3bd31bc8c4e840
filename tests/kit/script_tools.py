"""Programs for the scripts of examples/ in a folder of their own, so that a test says which of them are there."""

from __future__ import annotations

import shutil
from pathlib import Path


def tools(folder: Path, *made: str) -> Path:
    """A folder with the programs that the scripts use, and ``made`` ones, which write down how they are called."""
    (bins := folder / "bin").mkdir(exist_ok=True)
    used = "bash sh sed tee date mkdir touch timeout cat dirname tar gzip sha256sum mv rm nproc sleep"
    for name in used.split():
        if not (bins / name).exists():
            (bins / name).symlink_to(str(shutil.which(name)))
    for name in made:
        (bins / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> {folder}/called\nexit ${{{name.upper()}_STATUS:-0}}\n'
        )
        (bins / name).chmod(0o755)
    return bins
