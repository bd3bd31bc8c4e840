"""examples/gpu.sh, played with commands that are written down and not run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.kit.commands import ROOT
from trilane import cli
from trilane.verbs.inputs import changes_of

SCRIPT = ROOT / "examples" / "gpu.sh"
LLAMA_STAGES = ["llama.cpp-profile", "llama.cpp-qwen3-30b-a3b", "llama.cpp-gpt-oss-20b"]
STAGES = [
    "smoke", "profile", "deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", "llama.cpp-build", *LLAMA_STAGES, "peer",
    "pack",
]
RECORDER = """#!/bin/sh
{ printf "%s\\n" "$@"; echo ---; } >> "$RECORDED"
case " $* " in *" $SLOW "*) echo begun >> "$RECORDED.slow"; exec sleep 60 ;; esac
case " $* " in *" $FAILING "*) exit "${STATUS:-1}" ;; esac
"""


class Played(NamedTuple):
    """The script's exit status, the lines on stages at its end, and the commands that it ran."""

    status: int
    said: dict[str, str]
    commands: list[list[str]]


Play = Callable[..., Played]


def player(folder: Path) -> Play:
    """Plays stages of the script in ``folder``; its commands are written down and end as ``changes`` say."""
    environment = environment_for(folder)

    def played(*stages: str, **changes: str) -> Played:
        Path(environment["RECORDED"]).unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(SCRIPT), "a folder", *stages], cwd=folder, env={**environment, **changes},
            capture_output=True, text=True, check=False,
        )
        return Played(done.returncode, stages_of(folder), recorded(folder))

    return played


def environment_for(folder: Path) -> dict[str, str]:
    """With a program that writes its arguments down in place of ``trilane`` and ``python``."""
    recorder = folder / "recorder"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    here = {"TRILANE": str(recorder), "PYTHON": str(recorder), "RECORDED": str(folder / "recorded")}
    return {**here, "PATH": "/usr/bin:/bin", "FAILING": "nothing", "SLOW": "nothing"}


def recorded(folder: Path) -> list[list[str]]:
    """The commands that ran in ``folder``."""
    return [call.split("\n")[:-1] for call in (folder / "recorded").read_text().split("---\n")[:-1]]


def stages_of(folder: Path) -> dict[str, str]:
    """Lines of the summary by stage."""
    lines = (folder / "a folder" / "stages.txt").read_text().splitlines()
    return {line.split()[0]: line.partition(" s  ")[2] or line[25:] for line in lines}


def commands_of(folder: Path, lanes: str) -> list[list[str]]:
    """Commands of all stages."""
    environment = {**environment_for(folder), "LANES": lanes}
    subprocess.run(["bash", str(SCRIPT), "a folder"], check=True, cwd=folder, env=environment, capture_output=True)
    return recorded(folder)


def options_of(words: list[str]) -> dict[str, object]:
    """The values of a command's options, by the parser that the command has. Raises its usage errors."""
    command = cli.command()
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, list(words)) as context:
        return dict(context.params)


def called(commands: list[list[str]], *verb: str, engine: str | None = None) -> Iterator[dict[str, object]]:
    """The options of the commands of one verb and engine."""
    found = (options_of(words) for words in commands if tuple(words[: len(verb)]) == verb)
    return (options for options in found if options.get("engine") == engine)


def changes(call: Mapping[str, object]) -> dict[str, object]:
    """Values that ``--set`` changes."""
    return changes_of(call["changes"])  # type: ignore[arg-type]


# --- programs for the scripts of examples/, so that a test says which of them are there -------------------------------

def tools(folder: Path, *made: str) -> Path:
    """A folder with the programs that the scripts use, and ``made`` ones, which write down how they are called."""
    (bins := folder / "bin").mkdir(exist_ok=True)
    used = "bash sh sed tee date mkdir touch timeout cat dirname tar gzip sha256sum mv rm nproc sleep"
    for name in used.split():
        if not (bins / name).exists():
            (bins / name).symlink_to(str(shutil.which(name)))
    for name in made:
        (bins / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> {folder}/called\nexit ${{{name.upper()}_STATUS:-0}}\n'
        )
        (bins / name).chmod(0o755)
    return bins
