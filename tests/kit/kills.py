"""Commands that are killed: after a share of their time, or before the n-th change of the file system."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.kit.processes import in_session, wait_for
from tests.kit.small_commands import Words, left_in, start, write_inputs

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
    """What a command leaves, its changes of the file system, and the seconds that it takes."""

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
