"""The tests of a file by their place: those that import it, those of its folder, of its room, and of what prints it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

PRINTED = ("tests/trilane/fit", "tests/trilane/verbs", "tests/trilane/output/pages", "tests/trilane/test_readme.py")


def mirrors(path: str, root: Path) -> list[list[str]]:
    """Groups of test files for a file of the sources, the nearest first; each file is in one of them."""
    module, parts = path.removesuffix(".py").replace("/", "."), Path("tests", path).parent.parts
    folder, room = Path(*parts), Path(*parts[:3])
    near = [file for file in _files(root, Path("tests")) if _imports(root / file, module)]
    near.sort(key=lambda file: (file.stem != f"test_{Path(path).stem}", file.parent != folder, file))
    printed = chain.from_iterable(_files(root, Path(name)) for name in PRINTED)
    found: list[list[str]] = []
    for group in (near, _files(root, folder), _files(root, room), printed):
        known = set(chain.from_iterable(found))
        found.append([str(file) for file in group if str(file) not in known])
    return found


def _files(root: Path, place: Path) -> Iterator[Path]:
    names = [root / place] if place.suffix else sorted((root / place).rglob("test_*.py"))
    return (file.relative_to(root) for file in names)


def _imports(file: Path, module: str) -> bool:
    package, _, name = module.rpartition(".")
    text = file.read_text(encoding="utf-8")
    return f"{module} import" in text or f"from {package} import {name}" in text
