"""Tests of mutants in a copy of the repository, each in a process of its own that has the libraries imported."""

from __future__ import annotations

import compileall
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module, invalidate_caches
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from benchmarks.mutation.covering import TESTS, Covering, Quiet, Recorder
from benchmarks.mutation.mutants import Mutant

OURS = ("tests", "policies", "sim", "traces", "trilane", "realrun", "tools")
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


def well_typed(copy: Path) -> bool:
    """Whether mypy, which `make test` runs too, accepts the copy as it is."""
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
    here = Path.cwd().resolve()
    sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != here)]
    sys.dont_write_bytecode = True
    invalidate_caches()
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
