"""A process that runs one command line after another, watched: its time, its memory, its words and its files."""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from benchmarks.peak_memory import status_bytes
from sim.timeline.timeline import Timeline
from trilane import cli


class Case(NamedTuple):
    """A command line with the files that it reads."""

    words: Sequence[str]
    files: Mapping[str, bytes] = {}  # by their names in the folder where the command runs
    outputs: Sequence[str] = ()  # patterns of the files that it may write, replace and remove
    runs: int = 1  # of the simulator: a command that begins another one has accepted its input
    statuses: Sequence[int] = (2,)  # of a refusal


class Outcome(NamedTuple):
    """``fault`` names what should not have happened, with the innermost of our functions; "" if all is well."""

    accepted: bool
    fault: str
    seconds: float
    grown_bytes: int
    printed: str = ""  # on standard error


SECONDS = 10.0  # of the processor, so that a busy machine makes no faults
WAIT_SECONDS = 60.0  # by the clock
GROWTH = 1 << 30  # bytes
LETTERS = 1000  # of a line on standard error
ROOT = Path(__file__).parents[2]
_OURS = re.compile(
    rf'File "({re.escape(str(ROOT))}/(?:policies|realrun|sim|traces|trilane)/\S+\.py)", line \d+,? in (\S+)'
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
Make = Callable[[Any], Case]


class Worker:
    """A process in a folder of its own. ``make`` turns what is sent into a case, over there."""

    def __init__(self, make: Make, folder: Path) -> None:
        context = get_context("fork")
        self.folder, self.turns = folder, 0
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, folder), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, task: Any) -> None:
        """Begin a task; ``pipe`` is readable once it has ended."""
        self.turns += 1
        self.pipe.send(task)

    def outcome(self) -> Outcome | None:
        """Outcome of the task that was sent; None if the process has ended, in which case ``cause`` says why."""
        try:
            outcome: Outcome = self.pipe.recv()
        except EOFError:
            return None
        return outcome

    def cause(self) -> str:
        """How the process ended."""
        self._process.join()
        dump = (self.folder / "dump").read_text(errors="replace")
        code = self._process.exitcode or 0
        what = (
            f"more than {SECONDS:g} s of the processor"
            if code == -signal.SIGPROF
            else f"no answer for {WAIT_SECONDS:g} s"
            if "Timeout" in dump
            else signal.Signals(-code).name
            if code < 0
            else f"exit {code}"
        )
        return f"{what} in {_place(dump.split(chr(10) * 2)[-1], -1)}"

    def end(self) -> None:
        """Kill it, if it has not ended."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


# --- in the process ---------------------------------------------------------------------------------------------------


def _serve(pipe: Connection[Any, Any], make: Make, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / "tmp").mkdir()
    (folder / "dump").touch()
    os.environ.update(HOME=str(folder), MPLCONFIGDIR=str(folder / "tmp"), TMPDIR=str(folder / "tmp"))
    _set_limits()
    with (folder / "dump").open("w") as dump:
        faulthandler.enable(dump)
        faulthandler.register(signal.SIGPROF, dump, chain=True)
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            case = make(task)
            faulthandler.dump_traceback_later(WAIT_SECONDS, exit=True, file=dump)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            outcome = run(case, folder)
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(outcome)


def _set_limits() -> None:
    """No more memory than the limit allows; every warning is shown that a fresh process would show."""
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.showwarning = _show_warning
    most = status_bytes("VmData") + GROWTH
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _show_warning(message: Warning | str, category: type[Warning], file: str, line: int, *_: Any) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, file, line))


def run(case: Case, folder: Path) -> Outcome:
    """Run a case in this process."""
    home = folder / f"{time.monotonic_ns()}"  # another path each time, since traces are remembered by theirs
    (home / "out").mkdir(parents=True)
    os.mkfifo(home / "pipe")
    for name in ("neighbour",):
        (home / "out" / name).write_text("another's")
    for name, data in case.files.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_bytes(data)
    os.chdir(home)
    before = _files(folder)
    with Path("/proc/self/clear_refs").open("w") as peak:
        peak.write("5")
    resident, begin = status_bytes("VmRSS"), time.process_time()
    status, fault = _result(case)
    seconds, grown = time.process_time() - begin, status_bytes("VmHWM") - resident
    printed = (folder / "stderr").read_text(errors="replace")
    touched = _touched(before, _files(folder), home, case)
    os.chdir(folder)
    shutil.rmtree(home)
    fault = fault or touched or _wrong_words(case, status, printed, (folder / "stdout").read_text(errors="replace"))
    if not fault and grown > GROWTH:
        fault = "memory above the limit"
    return Outcome(not status, fault, seconds, grown, printed)


def _result(case: Case) -> tuple[int, str]:
    """The exit status, and the fault if an exception left the command line."""
    sys.argv = ["trilane", *case.words]
    try:
        with _captured(Path("..")), simulations(case.runs):
            cli.main()
    except SystemExit as end:
        return (end.code, "") if isinstance(end.code, int) else (0 if end.code is None else 1, "")
    except Begun:
        return 0, ""
    except BaseException as error:
        return 1, f"{type(error).__name__} in {_place(''.join(traceback.format_exception(error)))}"
    return 0, ""


@contextmanager
def _captured(folder: Path) -> Iterator[None]:
    """Both streams go to files, as descriptors and as Python's, with the encoding errors of a real process."""
    names, errors = ("stdout", "stderr"), ("strict", "backslashreplace")
    kept = [(number, os.dup(number), getattr(sys, name)) for number, name in enumerate(names, 1)]
    for (number, _, _), name, handling in zip(kept, names, errors, strict=True):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, os.fdopen(os.dup(number), "w", encoding="utf-8", errors=handling))
    try:
        yield
    finally:
        for (number, old, stream), name in zip(kept, names, strict=True):
            with suppress(OSError, ValueError):
                getattr(sys, name).close()
            setattr(sys, name, stream)
            os.dup2(old, number)
            os.close(old)


def _wrong_words(case: Case, status: int, printed: str, shown: str) -> str:
    """The fault in exit status and words; "" if there is none."""
    lines = printed.splitlines()
    sentences = [line for line in lines if line.startswith("trilane: ")]
    if status not in (0, *case.statuses):
        return f"exit status {status}"
    if status == 2 and (len(sentences) != 1 or lines[-1] != sentences[0]):
        return f"{len(sentences)} sentences"
    if "Warning: " in printed:
        return f"warning: {printed[printed.index('Warning: ') :][:60].splitlines()[0]}"
    if long := [line for line in lines if len(line) >= LETTERS]:
        return f"a line of more than {LETTERS} letters: {re.split('[^ .a-z:]', long[0])[0][:60]}..."
    if found := _CONTROL.search(printed) or _CONTROL.search(shown):
        return f"control character {found[0]!r} in {'an error' if found.string is printed else 'a result'}"
    return ""


def _place(trace: str, order: int = 1) -> str:
    """The innermost of our functions in a traceback, which ends with the innermost call; -1: begins with it."""
    ours = _OURS.findall(trace)[::-order]
    return f"{Path(ours[0][0]).relative_to(ROOT)}:{ours[0][1]}" if ours else "no function of ours"


def _files(folder: Path) -> dict[str, tuple[int, ...]]:
    """Facts by path that change with a file's content or its place."""
    found = {}
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(path := os.path.join(here, name))
            found[path] = (
                (status.st_mode, status.st_ino)
                if name in folders
                else (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns)
            )
    return found


def _touched(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]], home: Path, case: Case) -> str:
    """A file that is none of the outputs, and appeared, changed or went."""
    ours = {str(home.parent / name) for name in ("dump", "stdout", "stderr")}
    for path in sorted({name for name, _ in before.items() ^ after.items()} - ours):
        name = os.path.relpath(path, home)
        if not any(fnmatch(name, pattern) for pattern in case.outputs):
            return f"file {'removed' if path not in after else 'changed' if path in before else 'left'}: {name}"
    return ""


# --- the work that a command does once its input is read --------------------------------------------------------------


_STOPS = (
    "trilane.study.pool:Worker", "trilane.verbs.trace:_capture_function", "trilane.verbs.profile:_machine",
    "traces.synthesis.synthetic_trace:synthetic_trace", "realrun.replay.replay:measure", "realrun.smoke.smoke:smoke",
    "realrun.generation.generate:generate", "trilane.study.validation.validate:ReplayBench",
    "trilane.verbs.validate:_report",
)


class Begun(BaseException):
    """The work has begun: the input was accepted."""


def stop(*_: Any, **__: Any) -> NoReturn:
    """In place of work."""
    raise Begun


def shorten() -> None:
    """Put stops in place of all work but simulations, in this process and for ever; a machine is none at all."""
    for place in _STOPS:
        module, _, name = place.partition(":")
        setattr(import_module(module), name, stop)
    for package in ("policies", "sim", "trilane"):
        for found in walk_packages([str(ROOT / package)], f"{package}."):
            if not found.name.startswith("trilane.page"):  # needs an extra, and simulates in processes of its own
                import_module(found.name)
    measure: Any = import_module("realrun.replay.replay")
    measure.machine_on = lambda *_, **__: SimpleNamespace(close=lambda: None, remarks=lambda: ())


@contextmanager
def simulations(most: int) -> Iterator[None]:
    """In the block, the simulator runs so often; then it stops the command."""
    run, left = Timeline.run, [None] * most

    def counted(timeline: Timeline) -> None:
        if not left:
            raise Begun
        left.pop()
        run(timeline)

    Timeline.run = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Timeline.run = run  # type: ignore[method-assign]
