"""Which tests run which lines of the packages, and how long each test takes."""

from __future__ import annotations

import ast
import json
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, count
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from benchmarks.mutation.mutants import PACKAGES, Mutant

TESTS = (
    "tests/policies", "tests/sim", "tests/traces", "tests/conformance", "tests/invariants", "tests/realrun",
    "tests/trilane",
)


@dataclass(frozen=True)
class Covering:
    """``seconds`` of each test by name, which tests run a line, and all modules that the tests import.

    ``tests``: by file and line, which of ``sets``; a set has the places of its tests in ``seconds``.
    """

    seconds: Mapping[str, float]
    tests: Mapping[str, Mapping[str, int]]
    sets: Sequence[Sequence[int]]
    modules: Sequence[str]

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Covering:
        """As ``save`` has written it."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def of(self, mutant: Mutant, root: Path, seconds: float) -> list[str]:
        """The tests for a mutant: those that run its line, those that run another line of its function, class or file,
        and the others of its package. Of each of these the fastest, up to ``seconds``.

        The line alone is not enough: imports may run it, or an earlier test, whose result has been kept.
        """
        by_line, package, names = self.tests.get(mutant.path, {}), mutant.path.partition("/")[0], list(self.seconds)
        ranges = _around((root / mutant.path).read_text(encoding="utf-8"), mutant.line)
        known = [{by_line[str(line)] for line in lines if str(line) in by_line} for lines in ranges]
        groups = [{names[place] for number in numbers for place in self.sets[number]} for numbers in known]
        groups.append({name for name in names if name.startswith(f"tests/{package}/")})
        return list(dict.fromkeys(name for group in groups for name in self._fastest(group, seconds)))

    def _fastest(self, names: Iterable[str], seconds: float) -> list[str]:
        ranked = sorted(names, key=lambda name: (self.seconds[name], name))
        ends = list(accumulate(self.seconds[name] for name in ranked))
        return ranked[: max(bisect_right(ends, seconds), 1)]


def _around(source: str, line: int) -> list[range]:
    """The lines of the statement, without those of other statements in it, of the function or class around it, and so
    on to the whole file."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and line in _lines(node)]
    found = [range(1, source.count("\n") + 2)]
    for node in sorted(nodes, key=lambda node: len(_lines(node)), reverse=True):
        inner = [part.lineno for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(_lines(node))
        elif line < min(inner, default=line + 1):
            found.append(range(node.lineno, min(inner, default=_lines(node).stop)))
    return found[::-1]


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


class Quiet:
    """A plugin for pytest: the same examples in every run, and none is made smaller once it has failed."""

    def pytest_configure(self) -> None:
        """After ``tests/conftest.py``, whose profile this one replaces."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", settings.get_profile("trilane"), derandomize=True, database=None, phases=phases
        )
        settings.load_profile("mutants")


class Recorder:
    """A plugin for pytest that attributes lines and seconds to tests."""

    def __init__(self, root: Path) -> None:
        import coverage

        include = [f"{root}/{package}/*" for package in PACKAGES]
        self.coverage = coverage.Coverage(data_file=None, include=include, config_file=False, messages=False)
        self.coverage.start()
        self.root = root
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Around each test with its fixtures."""
        began = time.perf_counter()
        self.coverage.switch_context(item.nodeid)
        outcome = yield
        self.coverage.switch_context("")
        self.seconds[item.nodeid] = time.perf_counter() - began
        return outcome

    def result(self) -> Covering:
        """After the tests."""
        self.coverage.stop()
        data, place = self.coverage.get_data(), {name: number for number, name in enumerate(self.seconds)}
        sets: defaultdict[tuple[int, ...], int] = defaultdict(count().__next__)
        tests = {
            Path(file).relative_to(self.root).as_posix(): {
                str(line): sets[tuple(sorted(place[name] for name in names if name))]
                for line, names in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        return Covering(self.seconds, tests, list(sets), sorted(sys.modules))
