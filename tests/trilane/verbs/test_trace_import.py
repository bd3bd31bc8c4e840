"""``trilane trace import``: logs of other programs, from the file to a run that says what they lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from tests.traces.importers.routes import MODEL, routes
from traces.importers import FORMATS
from trilane import import_trace, load_trace


@pytest.fixture
def answers(tmp_path: Path) -> None:
    ids = routes(8).tolist()
    answer = {"choices": [{"routed_experts": ids[4:]}], "prompt_routed_experts": ids[:4]}
    (tmp_path / "answers.jsonl").write_text(f"{json.dumps(answer)}\n" * 2)


def test_an_imported_log_is_played_and_every_heading_says_that_weights_are_unknown(
    trilane: Trilane, answers: None
) -> None:
    done = trilane("trace", "import", "answers.jsonl", "--model", MODEL, "-o", "t.safetensors")
    assert (done.status, done.out) == (0, "")
    said = "t.safetensors (weights unknown): 2 sequences of mini-moe:2, 8 prompt and 8 decode tokens, no forecasts"
    assert said in done.err
    settings = ("trace=t.safetensors", "model=null", "cached_share=0.5", "batch=2", "policy=on-demand")
    for words in (
        ("trace", "info", "t.safetensors"),
        ("trace", "stats", "t.safetensors"),
        ("simulate", *(word for each in settings for word in ("--set", each))),
    ):
        done = trilane(*words)
        assert done.status == 0, done.err
        assert "t.safetensors (weights unknown)" in done.out + done.err


def test_python_imports_as_the_command_line_does(trilane: Trilane, answers: None) -> None:
    trilane("trace", "import", "answers.jsonl", "--model", MODEL, "-o", "t.safetensors")
    assert import_trace("answers.jsonl", model=MODEL).checksum == load_trace("t.safetensors").checksum


def test_the_help_names_every_format(trilane: Trilane) -> None:
    shown = " ".join(trilane("trace", "import", "--help").out.split())
    assert [name for name in FORMATS if name not in shown] == []


def test_a_log_that_needs_a_model_names_the_option(trilane: Trilane, answers: None) -> None:
    for words in (("trace", "info", "answers.jsonl"), ("trace", "import", "answers.jsonl", "-o", "t.safetensors")):
        done = trilane(*words)
        assert done.status == 2
        assert "trilane trace import answers.jsonl --model NAME -o FILE" in " ".join(done.err.split())
