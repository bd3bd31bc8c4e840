"""Lines and files of ours that a command has loaded when it ends: python -m benchmarks.loaded_lines tune MODEL ..."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = ("policies", "realrun", "sim", "traces", "trilane")


class Loaded(NamedTuple):
    """Source that is in ``sys.modules``."""

    lines: int
    files: int


def loaded_by_room() -> dict[str, Loaded]:
    """Return what is loaded in this process, largest first, by the folder two levels below the root."""
    rooms: dict[str, Loaded] = {}
    for path in _files():
        room = "/".join(path.relative_to(ROOT).parts[:2])
        own = rooms.get(room, Loaded(0, 0))
        rooms[room] = Loaded(own.lines + path.read_text(encoding="utf-8").count("\n"), own.files + 1)
    return dict(sorted(rooms.items(), key=lambda item: -item[1].lines))


def total(rooms: Iterable[Loaded]) -> Loaded:
    """Return the sum of rooms."""
    return Loaded(*map(sum, zip(*rooms, strict=True)))


def run(arguments: list[str]) -> None:
    """Run a command of ``trilane`` in this process."""
    from trilane.__main__ import main

    sys.argv = ["trilane", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def _files() -> list[Path]:
    paths = (Path(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None)))
    return [path for path in paths if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS]


if __name__ == "__main__":
    run(sys.argv[1:])
    rooms = loaded_by_room()
    for name, own in [*rooms.items(), ("all", total(rooms.values()))]:
        print(f"{own.lines:7,} lines {own.files:4} files  {name}", file=sys.stderr)
