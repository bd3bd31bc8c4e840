"""Commands print and write the same bytes whatever the hash seed, locale, time zone, folder, terminal and jobs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.depth import DEEP
from tests.kit.small_commands import COMMANDS, left_in, start, write_inputs

pytestmark = pytest.mark.timeout(1800)
LOCALES = {"de_DE": "ISO-8859-1", "tr_TR": "UTF-8"}  # 1,5 and umlauts in one byte; I is not the capital of i
RC = """
axes.facecolor: black
axes.unicode_minus: False
figure.dpi: 40
figure.autolayout: True
font.family: monospace
font.size: 20
lines.linewidth: 7
savefig.bbox: tight
savefig.transparent: True
svg.fonttype: none
text.parse_math: False
xtick.labelsize: 4
"""


class Place(NamedTuple):
    """Surroundings of a command. ``folder``: below that of the test; ``apart``: whether outputs go elsewhere."""

    variables: Mapping[str, str]
    jobs: int = 1
    folder: str = "here"
    apart: bool = False


PLAIN = Place({"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"})
PLACES = {
    "another hash seed, two jobs, another zone": Place({"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu"}, jobs=2),
    "German in Latin-1": Place(
        {"LC_ALL": "de_DE", "PYTHONUTF8": "0", "TZ": "Europe/Berlin", "TERM": "dumb", "COLUMNS": "40"},
        folder="anders/wo liegt es", apart=True,
    ),
    "Turkish": Place({"LC_ALL": "tr_TR", "TERM": "xterm-256color", "COLUMNS": "300", "LINES": "5"}, jobs=2),
    "ASCII, two threads": Place(
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "2"}, apart=True,
    ),
    "own settings of matplotlib": Place({"MATPLOTLIBRC": "{rc}", "MPLBACKEND": "pdf"}, jobs=2),
}
QUICK = {"simulate": list(PLACES)[:1], "trace import": list(PLACES)[3:4]}


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that name what was made for these tests: locales, and a file of settings for matplotlib."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "matplotlibrc").write_text(RC)
    if shutil.which("localedef"):
        for name, encoding in LOCALES.items():
            subprocess.run(["localedef", "-i", name, "-f", encoding, str(folder / name)], check=False)
    return {"LOCPATH": str(folder), "rc": str(folder / "matplotlibrc")}


def left_by(command: str, place: Place, folder: Path, settings: Mapping[str, str]) -> dict[str, bytes]:
    """All that the command prints and writes there."""
    here, out = folder / place.folder, folder / "out"
    here.mkdir(parents=True)
    out.mkdir()
    write_inputs(here)
    inputs, target = left_in(here), str(out) if place.apart else "."
    variables = {name: value.format(**settings) for name, value in place.variables.items()}
    variables["LOCPATH"] = settings["LOCPATH"]
    left: dict[str, bytes] = {}
    for number, words in enumerate(COMMANDS[command]):
        process = start(words, here, variables, target, place.jobs)
        printed, said = process.communicate()
        assert process.returncode == 0, said.decode()
        assert b"Warning" not in said, said.decode()
        left[f"output {number}"] = printed.replace(target.encode() + b"/", b"./")
    files = left_in(out) if place.apart else {name: kept for name, kept in left_in(here).items() if name not in inputs}
    return left | files


@pytest.mark.parametrize("command", COMMANDS if DEEP else QUICK)
def test_a_command_leaves_the_same_bytes_everywhere(command: str, tmp_path: Path, settings: dict[str, str]) -> None:
    expected = left_by(command, PLAIN, tmp_path / "plain", settings)
    assert any(expected.values())
    # In place of a locale that is not there C would be used, without a word.
    missing = {name for name in LOCALES if not (Path(settings["LOCPATH"]) / name).exists()}
    without = [name for name, place in PLACES.items() if place.variables.get("LC_ALL") in missing]
    for number, name in enumerate(PLACES if DEEP else QUICK[command]):
        if name in without:
            continue
        left = left_by(command, PLACES[name], tmp_path / str(number), settings)
        differ = {part for part in {*left, *expected} if left.get(part) != expected.get(part)}
        assert not differ, name
    if DEEP and without:
        pytest.skip(f"not tried, since localedef or what it reads is missing: {', '.join(without)}")
