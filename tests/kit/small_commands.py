"""Small commands of the kinds that write files, what each leaves behind, and commands that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.kit.commands import ROOT, SHORT, write_route_csv
from tests.kit.processes import in_session, wait_for
from tests.kit.small_sweeps import SMALL

Words = tuple[str, ...]
MODEL = str(ROOT / "traces" / "bundled" / "mini-moe")
POLICIES = ("--policies", "fiddler,dali,smoe,oracle")
GRID = {"scenario": SMALL, "grid": {"policy": ["fiddler", "dali"], "cached_share": [0.25, 0.5], "batch": [1, 2]}}
SYNTH = ("--like", "mixtral-8x7b:2", "--sequences", "2", "--prompt-tokens", "4", "--generated-tokens", "4")
CAPTURE = ("--model", MODEL, "--prompts", "prompts.txt", "--calibration", "other.txt", "--prompt-tokens", "6",
           "--generated-tokens", "4", "--batch-size", "2")

# By name, the words of each step. {out}: the folder to write to; {jobs}: the number of processes.
COMMANDS: Mapping[str, Sequence[Words]] = {
    "compare": [("compare", *POLICIES, *SHORT, "--draws", "2", "--jobs", "{jobs}", "--out", "{out}/o", "--json",
                 "{out}/c.json")],
    "simulate": [("simulate", "--policy", "dali", *SHORT, "--spans", "{out}/s.parquet", "--perfetto", "{out}/p.json.gz",
                  "--gantt", "{out}/g.svg", "--json", "{out}/s.json")],
    "whatif": [("whatif", "--vary", "pcie=3x16,4x16", *POLICIES, *SHORT, "--jobs", "{jobs}", "--png", "{out}/w.svg",
                "--json", "{out}/w.json")],
    "fit": [("fit", "--model", "olmoe-1b-7b", "--gpu", "rtx-4080", "--ram", "ddr5-5600", "--policies", "fiddler,dali",
             "--jobs", "{jobs}", "--json", "{out}/f.json")],
    "pays": [("pays", "memory", "--model", "mixtral-8x7b:2", "--weights", "bf16", "--gpu", "gtx-1650-super", "--ram",
              "ddr4-3200", "--prompt", "64", "--generated", "4", "--draws", "1", "--jobs", "{jobs}", "--out",
              "{out}/m.svg", "--json", "{out}/m.json")],
    "ablate": [("ablate", "dali", *SHORT, "--draws", "2", "--jobs", "{jobs}", "--png", "{out}/a.svg", "--json",
                "{out}/a.json")],
    "sweep": [("sweep", "grid.yaml", "-o", "{out}/s.parquet", "--jobs", "{jobs}")],
    "plot": [("sweep", "grid.yaml", "-o", "{out}/s.parquet", "--jobs", "{jobs}"),
             ("plot", "{out}/s.parquet", "--out", "{out}/pictures")],
    "cache-curve": [("cache-curve", "mini-moe:3", "--png", "{out}/c.svg", "--json", "{out}/c.json"),
                    ("cache-curve", "mini-moe:3", "--png", "{out}/c.pdf")],
    "trace synth": [("trace", "synth", *SYNTH, "-o", "{out}/t.safetensors", "--json", "{out}/t.json")],
    "trace import": [("trace", "import", "route.csv", "-o", "{out}/t.safetensors"),
                     ("trace", "info", "{out}/t.safetensors", "--json", "{out}/i.json"),
                     ("trace", "stats", "{out}/t.safetensors", "--json", "{out}/s.json")],
    "trace capture": [("trace", "capture", *CAPTURE, "-o", "{out}/t.safetensors")],
    "lists": [("policies",), ("policies", "dali"), ("models",), ("models", "qwen3-30b-a3b", "--json", "{out}/m.json"),
              ("hardware", "--parts"), ("hardware", "rtx3090-ddr4", "--json", "{out}/h.json")],
}


def write_inputs(folder: Path) -> None:
    """The files that the commands read."""
    (folder / "grid.yaml").write_text(json.dumps(GRID))
    (folder / "prompts.txt").write_text("The river runs to the sea.\nOnce there was a small house.\nTwo and two.\n")
    (folder / "other.txt").write_text("A cat sat there.\nThe night was cold and long.\n")
    write_route_csv(folder / "route.csv")


def start(
    words: Words, folder: Path, environment: Mapping[str, str], out: str = ".", jobs: int = 1,
    program: Words = ("-m", "trilane"),
) -> subprocess.Popen[bytes]:
    """Start one step of a command in ``folder``, in a session of its own, with few variables but those given."""
    filled = [word.replace("{out}", out).replace("{jobs}", str(jobs)) for word in words]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    given = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, *program, *filled], cwd=folder, env=given, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)


def left_in(folder: Path) -> dict[str, bytes]:
    """The content of every file by its name, and folders by theirs."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder" for path in found}


# --- commands that are killed: after a share of their time, or before the n-th change of the file system --------------

SIGNALS = [signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT]
ROWS = 10  # at most, for each kill that is asked for
ROW = 3  # kills at most before a command may end
COUNTING = """
import atexit, os, sys
nth, number, count = int(sys.argv.pop(1)), int(sys.argv.pop(1)), 0
changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "sqlite3.connect")

def watch(name, given):
    global count
    if name in changes or name == "open" and given[2] & (os.O_WRONLY | os.O_RDWR):
        if not isinstance(given[0], int) and os.path.abspath(os.fsdecode(given[0])).startswith(os.getcwd()):
            count += 1
            if count == nth:
                os.kill(os.getpid(), number)

sys.addaudithook(watch)
atexit.register(lambda: print(count, file=sys.stderr))
from trilane.cli import main
main()
"""


class Kill(NamedTuple):
    """When: after a share of the time of an undisturbed run, or before a change of the file system, from 1 on."""

    signal: int
    share: float | None
    change: int = 0


class Undisturbed(NamedTuple):
    """Files that a command leaves, its changes of the file system, and the seconds that it takes."""

    left: Mapping[str, bytes]
    changes: int
    whole_s: float


class Killed(NamedTuple):
    """A row of kills, what they have left, and what the command has left that was then run to its end."""

    kills: Sequence[Kill]
    before: Mapping[str, bytes]
    after: Mapping[str, bytes]


class CommandFolder:
    """A command and the folder where it runs. All that it writes, temporary and cached files too, is below."""

    def __init__(self, path: Path, words: Words, inputs: Mapping[str, bytes]) -> None:
        self._path, self._words = path, words
        for name in ("out", "tmp", "cache"):
            (path / name).mkdir(parents=True)
        write_inputs(path)
        for name, content in inputs.items():
            (path / name).write_bytes(content)
        self._variables = {
            "TMPDIR": str(path / "tmp"), "XDG_CACHE_HOME": str(path / "cache"),
            "MPLCONFIGDIR": str(path.parent / "matplotlib"),  # the cache of fonts takes long to make
        }

    def left(self) -> dict[str, bytes]:
        """All files and folders but the inputs."""
        return {name: kept for name, kept in left_in(self._path).items() if Path(name).parent != Path()}

    def run(self, kill: Kill | None = None, whole_s: float = 0) -> tuple[int, str]:
        """The exit status, once all processes have ended, and what was written to standard error."""
        program = ("-c", COUNTING, str(kill.change if kill else 0), str(kill.signal if kill else 0))
        process = start(self._words, self._path, self._variables, "out", jobs=2, program=program)
        if kill and kill.share is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(kill.share * whole_s)
            process.send_signal(kill.signal)
        said = process.communicate()[1].decode()
        wait_for(lambda: not in_session(process.pid))
        return process.returncode, said


def undisturbed(path: Path, words: Words, inputs: Mapping[str, bytes]) -> Undisturbed:
    """Run a command in a new folder."""
    folder, begin_s = CommandFolder(path / "undisturbed", words, inputs), time.monotonic()
    status, said = folder.run()
    assert status == 0, said
    return Undisturbed(folder.left(), int(said.split()[-1]), time.monotonic() - begin_s)


def killed(path: Path, words: Words, inputs: Mapping[str, bytes], whole: Undisturbed, count: int) -> Iterator[Killed]:
    """``count`` kills of a command, a few in each new folder. The seed is the command."""
    rng, left = random.Random(" ".join(words)), count
    kills = _kills(rng, whole.changes)
    for number in range(ROWS * count):
        folder = CommandFolder(path / str(number), words, inputs)
        wanted = [next(kills) for _ in range(rng.randint(1, min(ROW, left)))]
        row = [kill for kill in wanted if folder.run(kill, whole.whole_s)[0]]  # others came too late
        left -= len(row)
        before = folder.left()
        status, said = folder.run()
        assert status == 0, (row, said)
        yield Killed(row, before, folder.left())
        if left <= 0:
            return
    raise AssertionError(f"{left} of {count} kills came too late in {ROWS * count} tries: the command is too fast")


def _kills(rng: random.Random, changes: int) -> Iterator[Kill]:
    """Half of them at any time, half of them at any change."""
    while True:
        yield Kill(rng.choice(SIGNALS), None, rng.randint(1, changes))
        yield Kill(rng.choice(SIGNALS), rng.uniform(0, 1))
