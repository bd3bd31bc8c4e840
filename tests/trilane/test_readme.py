"""README keeps its word: every command runs, and the blocks of text are what the commands print."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.trilane.readme import PICTURES, ROOT, block, blocks, command_with, commands, demo, shown_block
from tests.trilane.test_cli import write_route_csv
from trilane.cli import main

# run by people and by CI; here only their targets are looked up
MAKE = {"make demo": "demo", "make test": "test", "make gpu": "gpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: one folder, since later ones read what earlier ones wrote."""
    made = tmp_path_factory.mktemp("reader")
    for name in ("examples", "traces"):
        (made / name).symlink_to(ROOT / name)
    (made / "prompts.txt").write_text("Once upon a time there was a small mixture of experts.\nWhat is a router?\n")
    write_route_csv(made / "phone.route.csv", size=600 * 2**20)  # 7,200 MiB in all
    return made


SMALL = {  # what takes minutes of measuring, on a model for which it takes seconds
    "trace=mini-deepseek:6": "trace=mini-moe:2",
    "model=deepseek-v2-lite:6": "model=mini-moe:2",
    "--model deepseek-v2-lite": "--model mini-moe --quick --context 16,32 --prompt 8,16 --policies dali,fiddler",
    "validate examples": "validate --set trace=mini-moe:2 --set model=mini-moe:2 --repeats 1 examples",
    "trilane smoke": "trilane smoke --lanes host-lanes",
}


ONCE = {"compare": ("--draws", "--jobs"), "ablate": ("--draws", "--jobs"), "whatif": ("--jobs",), "sweep": ("--jobs",)}


def brief(command: str) -> str:
    """Small models, short texts, one draw and no other processes, unless the command asks for something else."""
    for large, small in SMALL.items():
        command = command.replace(large, small)
    words = shlex.split(command)
    words += [word for option in ONCE.get(words[1], ()) if option not in words for word in (option, "1")]
    if words[1] == "whatif":
        words += ["--set", "prompt_tokens=8", "--set", "generated_tokens=4"]
    return shlex.join(words)


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command line, which must succeed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0


@pytest.mark.xdist_group("readme")
def test_every_command_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # a model this small is only held up by more
    ours = [command for command in commands() if command not in MAKE]
    assert all(command.startswith("trilane ") for command in ours)
    for command in ours:
        run(brief(command), folder, monkeypatch)
    for name in ("result.json", "spans.parquet", "timeline.json", "step.png", "mine.safetensors", "curve.png",
                 "machine.yaml", "made.safetensors", "validation/report.md", "fit.json", "cache.csv", "sweep.parquet",
                 "sweep/heat.png"):  # fmt: skip
        assert (folder / name).stat().st_size > 0


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_are_there(command: str) -> None:
    assert command in commands()
    assert f"\n{MAKE[command]}:" in (ROOT / "Makefile").read_text()


def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert "ms per token" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["demo", "fit"])
def test_blocks_are_what_the_commands_print(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(demo() if name == "demo" else command_with("trilane fit"), folder, monkeypatch)
    printed = block(name, capsys.readouterr().out)
    assert printed == shown_block(name), "renew it with: .venv/bin/python tests/trilane/readme.py"


def test_pictures_and_links_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    for name in PICTURES:
        assert f"docs/{name}" in text
        assert (ROOT / "docs" / name).stat().st_size < 300_000
    for link in ("examples/reference.yaml", "traces/models/models.yaml", "sim/presets", "policies"):
        assert f"]({link})" in text
        assert (ROOT / link).exists()
