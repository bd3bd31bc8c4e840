"""Writers of traces that are killed, or that a full disk stops: nothing as large as a trace is left for long."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.small_disk import small_disk
from tests.kit.toy_traces import toy_trace
from traces.file import TraceWriter, read_trace, write_trace
from traces.trace import Trace
from trilane.testing.strategies import toy_shape

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.traces.test_killed_writers import large, stream

def kill(event, given):
    if event == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

with stream(Path(sys.argv[1])) as writer:
    writer.append(large().tensors())
    sys.addaudithook(kill)
    sys.audit("appended")
"""


def large() -> Trace:
    return toy_trace([[[token % 8]] for token in range(20_000)])


def stream(path: Path) -> TraceWriter:
    return TraceWriter(path, toy_shape(1, 8, 1), {}, scores=False, forecasts={})


def killed_at(event: str, path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), event], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_killed_capture_leaves_nothing(tmp_path: Path) -> None:
    killed_at("appended", tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_by_one_that_was_killed_at_its_end_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    killed_at("os.rename", path)
    assert not path.exists()
    write_trace(large(), path)
    assert list(tmp_path.iterdir()) == [path]
    assert len(read_trace(path)) == 20_000


@pytest.mark.parametrize("streamed", [True, False])
def test_a_trace_that_does_not_fit_on_the_disk_is_named(tmp_path: Path, streamed: bool) -> None:
    path = tmp_path / "t.safetensors"
    with small_disk(), pytest.raises(OSError, match="File too large") as raised:
        write_streamed(path) if streamed else write_trace(large(), path)
    assert raised.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def write_streamed(path: Path) -> None:
    with stream(path) as writer:
        writer.append(large().tensors())
