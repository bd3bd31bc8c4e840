"""Malformed input ends in an answer or in one sentence; and what the fuzzer would find if it did not."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fuzz import worker
from benchmarks.fuzz.worker import Case
from tests.kit.depth import DEEP
from trilane import cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits on memory are those of Linux")


@pytest.mark.timeout(3600)
def test_malformed_input_is_answered_or_refused_in_one_sentence_and_was_valid() -> None:
    words = ("--valid", "100", "--inputs", "100000", "--jobs", "2") if DEEP else ("--valid", "100", "--inputs", "1000")
    done = subprocess.run([sys.executable, "-m", "benchmarks.fuzz", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def work() -> None:
    while True:
        pass


def wait() -> None:
    while True:
        time.sleep(0.1)


def say(text: str, status: int = 2) -> None:
    print(text, file=sys.stderr)
    sys.exit(status)


PLANTED: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (lambda: say("trilane: no"), ""),
    "traceback": (lambda: {}["key"], "KeyError in"),
    "no end of work": (work, "more than 0.5 s of the processor"),
    "no end of waiting": (wait, "no answer for 0.5 s"),
    "allocation": (lambda: bytearray(2 << 30), "MemoryError in"),
    "another's file changed": (lambda: Path("out/neighbour").write_text("mine"), "file changed: out/neighbour"),
    "another's file removed": (lambda: Path("out/neighbour").unlink(), "file removed: out/neighbour"),
    "file left": (lambda: Path("out/result.json.part").write_text("half"), "file left: out/result.json.part"),
    "file left in the folder of temporary files": (lambda: Path("../tmp/x").touch(), "file left: ../tmp/x"),
    "no sentence": (lambda: sys.exit(2), "0 sentences"),
    "two sentences": (lambda: say("trilane: no\ntrilane: no"), "2 sentences"),
    "endless sentence": (lambda: say(f"trilane: {'x' * 5000}"), "a line of"),
    "control character": (lambda: say("trilane: \x1b[31mred"), "control character"),
    "control character in a result": (lambda: print("\x1b[31mred"), "control character"),
    "warning": (lambda: warnings.warn("overflow", RuntimeWarning, stacklevel=1), "warning"),
    "exit status": (lambda: say("trilane: no", 7), "exit status 7"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harm, found = PLANTED[planted]
    monkeypatch.setattr(cli, "main", harm)
    monkeypatch.setattr(worker, "SECONDS", 0.5)
    monkeypatch.setattr(worker, "WAIT_SECONDS", 0.5 if planted == "no end of waiting" else 30.0)
    one = worker.Worker(lambda _: Case(()), tmp_path / "worker")
    one.send(None)
    outcome = one.outcome()
    fault = outcome.fault if outcome else one.cause()
    one.end()
    assert fault.startswith(found) if found else fault == ""
