"""Commands that are killed at any moment and started again: the bytes of an undisturbed run, and nothing else is left.

What measures has other numbers every time: then the files are the same, and the keys in them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.depth import DEEP, deep
from tests.kit.small_commands import COMMANDS, CommandFolder, Undisturbed, killed, undisturbed
from tests.kit.small_sweeps import kept_blobs
from tests.kit.validations import PROFILE

pytestmark = [pytest.mark.timeout(3600), pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")]
KILLS = {"sweep": 24, "compare": 16, "trace import": 12, "trace synth": 12, "trace capture": 12}
FEW_KILLS = {"trace import": 3}  # and sweeps, in tests/trilane/study/sweep/test_killed.py
KILLS_OF_MEASURING = 12
PROFILED = ("profile", "-o", "{out}/here.yaml", *PROFILE, "--json", "{out}/found.json")
VALIDATED = ("validate", "plan.yaml", "--profile", "here.yaml", "--out", "{out}/v", "--json", "{out}/agreement.json")
PLAN = b"""
scenario: {trace: "mini-moe:2", model: null, prompt_tokens: 2, generated_tokens: 2, cached_share: 0.5}
policies: [fiddler, on-demand]
repeats: 2
"""


@pytest.mark.parametrize("command", KILLS if DEEP else FEW_KILLS)
def test_a_killed_command_that_is_repeated_leaves_the_bytes_of_an_undisturbed_one(command: str, tmp_path: Path) -> None:
    words = COMMANDS[command][0]
    whole = undisturbed(tmp_path, words, {})
    for found in killed(tmp_path, words, {}, whole, (KILLS if DEEP else FEW_KILLS)[command]):
        assert names_that_differ(found.after, whole.left) == set(), found.kills


def names_that_differ(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def test_a_command_that_no_kill_meets_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommandFolder, "run", lambda *_: (0, ""))
    with pytest.raises(AssertionError, match="3 of 3 kills came too late in 30 tries"):
        list(killed(tmp_path, (), {}, Undisturbed({}, 1, 1.0), 3))


# --- what measures ----------------------------------------------------------------------------------------------------


@deep
def test_a_killed_profile_that_is_repeated_is_whole(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path, PROFILED, {})
    for found in killed(tmp_path, PROFILED, {}, whole, KILLS_OF_MEASURING):
        assert keys_of_files(found.after) == keys_of_files(whole.left), found.kills


@deep
def test_a_killed_validation_goes_on_and_measures_no_run_twice(tmp_path: Path) -> None:
    profile = undisturbed(tmp_path / "profile", PROFILED, {}).left["out/here.yaml"]
    inputs = {"plan.yaml": PLAN, "here.yaml": profile}
    whole = undisturbed(tmp_path, VALIDATED, inputs)
    for found in killed(tmp_path, VALIDATED, inputs, whole, KILLS_OF_MEASURING):
        assert keys_of_files(found.after) == keys_of_files(whole.left), found.kills
        assert runs_in(found.before, tmp_path).items() <= runs_in(found.after, tmp_path).items(), found.kills


def runs_in(left: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """The measured runs in the journal of a validation."""
    for end in ("", "-wal"):
        (folder / f"journal{end}").write_bytes(left.get(f"out/v/journal{end}", b""))
    return {key: blob for key, blob in kept_blobs(folder / "journal", "validation").items() if key.startswith("run-")}


def keys_of_files(left: Mapping[str, bytes]) -> dict[str, set[str]]:
    """The keys in every file, by its name."""
    return {name: keys_of(content_of(name, content)) for name, content in left.items()}


def content_of(name: str, content: bytes) -> Any:
    if name.endswith(".json"):
        return json.loads(content)
    return yaml.safe_load(content) if name.endswith(".yaml") else None


def keys_of(value: Any) -> set[str]:
    """With their paths, those in lists too."""
    if isinstance(value, list):
        return set[str]().union(*map(keys_of, value))
    parts = value.items() if isinstance(value, dict) else ()
    return {f"{key}.{inner}" for key, part in parts for inner in {"", *keys_of(part)}}
