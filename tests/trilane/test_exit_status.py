"""How the command line ends where a result cannot be written, its reader goes away, or Ctrl-C is pressed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from sim.runs.scenario import Scenario
from tests.kit.commands import ROOT, SHORT, Trilane
from tests.kit.processes import small_disk

TRILANE = (sys.executable, "-m", "trilane")
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
LONG = ("hardware", "rtx3090-ddr4", "--json", "-")  # more than is buffered: written before the end, too
SYNTHETIC = ("trace", "synth", "--like", "mixtral-8x7b", "--sequences", "1")

LIMIT = "File too large (the limit on the size of files; see `ulimit -f`)"  # no full disk, which it once was called

# --- full disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "file"), [
    (("simulate", *SHORT, "--json"), "a.json"),
    (("simulate", *SHORT, "--spans"), "a.parquet"),
    (("simulate", *SHORT, "--gantt"), "a.png"),
    (("simulate", *SHORT, "--gantt"), "a.svg"),
    (("simulate", *SHORT, "--perfetto"), "a.json.gz"),
    ((*SYNTHETIC, "-o"), "a.safetensors"),
])
def test_a_result_that_does_not_fit_on_the_disk_is_named_and_is_no_bad_input(
    trilane: Trilane, words: tuple[str, ...], file: str
) -> None:
    with small_disk():
        done = trilane(*words, file)
    assert (done.status, done.err.splitlines()[-1]) == (74, f"trilane: {file}: {LIMIT}")
    assert not list(Path().iterdir())


def test_so_is_a_journal(trilane: Trilane) -> None:
    Path("f.yaml").write_text("{scenario: {prompt_tokens: 4, generated_tokens: 3}, grid: {batch: [1, 2]}}")
    with small_disk():
        done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done.status == 74
    assert done.err.splitlines()[-1] == f"trilane: o.parquet.journal: {LIMIT}"


def test_a_full_disk_without_a_files_name_is_no_bug(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(scenario: Scenario) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sim.simulate.simulate", full)
    done = trilane("simulate")
    assert (done.status, done.err) == (74, "trilane: No space left on device\n")


# --- standard output --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("words", [("policies",), LONG])
def test_standard_output_on_a_full_disk_is_one_sentence(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*TRILANE, *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=BUFFERED
        )
    assert (done.returncode, done.stderr) == (74, "trilane: standard output: No space left on device\n")


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("policies",), LONG])
def test_a_reader_that_closes_the_pipe_ends_it_in_silence_as_sigpipe_would(words: tuple[str, ...]) -> None:
    """As in ``trilane policies | true``."""
    read, write = os.pipe()
    os.close(read)
    done = run(words, write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(("closed", "said"), [
    (">&-", "trilane: standard output is closed; send it to a file or to /dev/null\n"), (">&- 2>&-", ""),
])
def test_a_closed_standard_output_is_one_sentence(closed: str, said: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *TRILANE, "policies"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (74, said)


def run(words: Sequence[str], stdout: IO[str] | int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRILANE, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=BUFFERED)


# --- an extra that is not installed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("measure",), ("smoke",), ("profile", "-o", "machine.yaml")])
def test_a_verb_that_needs_torch_says_so_in_a_sentence(words: Sequence[str], tmp_path: Path) -> None:
    without = "import sys; sys.modules['torch'] = None; from trilane.__main__ import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", without, *words], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"trilane: {words[0]} needs torch; in the folder of Trilane: `pip install")
    assert not list(tmp_path.iterdir())


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from trilane.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["trilane.cli", "typer", "trilane.verbs.sweeps"])
def test_ctrl_c_while_it_starts_ends_it_in_silence(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
