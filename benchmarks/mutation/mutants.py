"""Mutants of the packages: small changes of their source, made by mutmut's operators, and a sample of them.

mutmut's own command leaves out decorated functions, such as properties, and all code outside functions, such as the
fields of classes; it has no samples that a seed repeats. So its operators alone are used.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from functools import lru_cache
from itertools import islice
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

PACKAGES = ("policies", "sim/timeline", "sim/costs", "sim/runs", "traces")
ANSWERS = ("trilane/engines", "trilane/study", "trilane/fit", "sim/machine")  # what the printed answers come from

# No mutants: what only type checkers read, what every import runs, and checks of the program on itself.
_LEFT_OUT = (
    m.Annotation() | m.Decorator() | m.Import() | m.ImportFrom() | m.Assert() | m.Arg(keyword=m.Name("strict"))
    | m.AnnAssign(annotation=m.Annotation(m.Name("TypeAlias"))) | m.Assign(targets=[m.AssignTarget(m.Name("__all__"))])
    | m.Call(func=m.Name("TypeVar") | m.Name("cast")) | m.Assign(value=m.Call(func=m.Name("TypeVar")))
)


@dataclass(frozen=True)
class Mutant:
    """One change of one file: ``line`` is where it begins, ``source`` the whole file with it."""

    path: str
    line: int
    source: str

    def diff(self, root: Path) -> str:
        """The lines that differ."""
        before = (root / self.path).read_text(encoding="utf-8").splitlines()
        lines = unified_diff(before, self.source.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


@dataclass(frozen=True)
class _Place:
    """A node of a file that operators change into any of ``others``."""

    path: Path
    line: int
    node: cst.CSTNode
    others: Sequence[cst.CSTNode]


def sample(root: Path, count: int, seed: int, packages: Sequence[str] = PACKAGES) -> list[Mutant]:
    """``count`` mutants at as many places, of each package in proportion to its lines.

    The same for the same seed and sources. Every place has the same chance, and each of its changes too.
    """
    lines = {package: sum(path.read_bytes().count(b"\n") for path in _files(root, package)) for package in packages}
    chosen: list[Mutant] = []
    for package, share in shares(lines, count).items():
        draw = random.Random(f"{seed} {package}")
        places = [place for path in _files(root, package) for place in _places(path)]
        draw.shuffle(places)
        mutants = (_mutant(root, place, draw.choice(place.others)) for place in places)
        chosen += islice(filter(None, mutants), share)
    return sorted(chosen, key=lambda mutant: (mutant.path, mutant.line))


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """``count`` split in proportion to ``sizes``, by largest remainders."""
    exact = {name: count * size / sum(sizes.values()) for name, size in sizes.items()}
    found = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[: count - sum(found.values())]:
        found[name] += 1
    return found


def _files(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


@lru_cache
def _module(path: Path) -> MetadataWrapper:
    return MetadataWrapper(cst.parse_module(path.read_text(encoding="utf-8")))


def _places(path: Path) -> list[_Place]:
    finder = _Finder(path)
    _module(path).visit(finder)
    return finder.found


def _mutant(root: Path, place: _Place, other: cst.CSTNode) -> Mutant | None:
    """None if the change is none to Python."""
    module = _module(place.path).module
    source = module.deep_replace(place.node, other).code  # type: ignore[arg-type]
    try:
        same = ast.dump(ast.parse(source)) == ast.dump(ast.parse(module.code))
    except SyntaxError:
        return None
    return None if same else Mutant(place.path.relative_to(root).as_posix(), place.line, source)


class _Finder(cst.CSTVisitor):
    """Collects the places of a file."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.found: list[_Place] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Collect a node; False: nothing within it is collected."""
        if m.matches(node, _LEFT_OUT):  # type: ignore[arg-type]
            return False
        where, others = self.get_metadata(PositionProvider, node, None), list(_changed(node))
        if where and others:
            self.found.append(_Place(self.path, where.start.line, node, others))
        return True


def _strict(node: cst.CSTNode) -> list[object]:
    """Values of ``strict=`` in a call."""
    arguments = node.args if isinstance(node, cst.Call) else ()
    return [getattr(given.value, "value", None) for given in arguments if m.matches(given.keyword, m.Name("strict"))]


def _changed(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Changes of a node by mutmut's operators. Of texts only words are changed, in one way; sentences are not."""
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            if operator is not operator_string:
                yield from (other for other in operator(node) if _strict(other) == _strict(node))
            elif isinstance(node, cst.SimpleString) and " " not in node.value:
                yield from islice(operator(node), 1)
