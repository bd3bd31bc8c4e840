"""Tests of mutants: which of them run a changed line, and their outcome, in a copy of the repository."""

from __future__ import annotations

import ast
import compileall
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module, invalidate_caches
from importlib.util import cache_from_source
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


# --- outcomes ---------------------------------------------------------------------------------------------------------


OURS = ("tests", "policies", "sim", "traces", "trilane", "realrun", "tools", "benchmarks")
MEMORY_BYTES = 6 << 30  # a mutant may ask for more without end
BROKEN = 70  # exit status of a process in which the tests did not start
_PLAIN = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", "--tb=line", "--no-header")


class Selected:
    """A plugin for pytest that keeps the tests of these names, in this order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rank = {name: number for number, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """After the quick profile has left out what it leaves out."""
        items[:] = sorted((i for i in items if i.nodeid in self.rank), key=lambda i: self.rank[i.nodeid])


class Budget:
    """A plugin for pytest that ends the session once ``seconds`` are over, between two tests."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """After each test."""
        if time.monotonic() > self.end:
            pytest.exit("the budget is spent", returncode=pytest.ExitCode.OK)


def copy_of(root: Path, into: Path) -> Path:
    """Copies the files that git does not ignore, compiled; returns ``into``."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, into / name)
    for package in OURS:
        compileall.compile_dir(into / package, quiet=1)
    return into


def cover(copy: Path, file: Path) -> Covering:
    """Runs all tests once, unchanged. Raises RuntimeError if one of them fails."""

    def tests() -> int:
        recorder = Recorder(copy)
        status = pytest.main([*TESTS, "-q", *_PLAIN], plugins=[Quiet(), recorder])
        recorder.result().save(file)
        return int(status)

    if (outcome := _in_child(copy, tests, 7200, file.with_suffix(".txt"))) != "passed":
        raise RuntimeError(f"the tests of the unchanged sources: {outcome}; see {file.with_suffix('.txt')}")
    return Covering.load(file)


def preload(modules: Sequence[str]) -> None:
    """Imports libraries, so that no process of a mutant has to; this repository's own modules are left out."""
    for name in modules:
        if name.partition(".")[0] not in OURS and name != "__main__":
            with suppress(BaseException):
                import_module(name)


@contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The copy has the mutant meanwhile."""
    target = copy / mutant.path
    before, compiled = target.read_bytes(), Path(cache_from_source(str(target)))
    try:
        target.write_text(mutant.source, encoding="utf-8")
        compiled.unlink(missing_ok=True)
        yield
    finally:
        target.write_bytes(before)
        compileall.compile_file(target, quiet=1)


def play(names: Sequence[str], copy: Path, seconds: float, log: Path) -> str:
    """Tests of the copy as it is: "passed", "timeout", or "failed" if one of them does."""
    files = sorted({name.partition("::")[0] for name in names})

    def tests() -> int:
        return int(pytest.main([*files, "-x", "-q", *_PLAIN], plugins=[Quiet(), Selected(names)]))

    return _in_child(copy, tests, seconds, log)


def play_files(files: Sequence[str], copy: Path, seconds: float, log: Path) -> str:
    """All tests of files as they come, until ``seconds`` are over: as ``play``. A test without end has 240 s."""

    def tests() -> int:
        return int(pytest.main([*files, "-x", "-q", "--timeout=240", *_PLAIN], plugins=[Quiet(), Budget(seconds)]))

    return _in_child(copy, tests, seconds + 300, log)


def well_typed(copy: Path) -> bool:
    """True if mypy, which `make test` runs too, accepts the copy as it is."""
    return subprocess.run([sys.executable, "-m", "mypy"], cwd=copy, check=False, capture_output=True).returncode == 0


def _in_child(copy: Path, tests: Callable[[], int], seconds: float, log: Path) -> str:
    """Runs ``tests`` in a forked process whose imports and programs are those of ``copy``; what it starts ends too."""
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            os.setsid()
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            _move_to(copy)
            status = tests()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    limit = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(ended[1])
    if status == BROKEN:
        raise RuntimeError(f"the tests could not be started; see {log}")
    return {pytest.ExitCode.OK: "passed", pytest.ExitCode.NO_TESTS_COLLECTED: "passed"}.get(status, "failed")


def _move_to(copy: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.modules["xllamacpp"] = None  # type: ignore[assignment]  # `make test` does not install it
    here = Path.cwd().resolve()
    sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != here)]
    sys.dont_write_bytecode = True
    invalidate_caches()
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
