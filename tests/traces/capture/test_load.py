"""Checkpoints of strangers: their code is not run, and their pickled weights are not read."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from realrun.errors import RefusedError  # noqa: E402
from realrun.experts.checkpoint import load_streamed  # noqa: E402
from realrun.generation.hosted_model import load_model  # noqa: E402
from realrun.machine.pinned import plain  # noqa: E402
from tests.kit.tiny_models import build  # noqa: E402
from traces.capture.load import load  # noqa: E402
from traces.capture.settings import CaptureError  # noqa: E402

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
OWN_CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nPath({ran!r}).touch()\n"


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with Python code that leaves a file ``ran``; the user answers yes to every question."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    names = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "stranger", "auto_map": names}))
    (folder / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    return folder


@pytest.mark.parametrize("read", ["capture", "generate", "checkpoint"])
def test_code_in_a_checkpoint_is_not_run(stranger: Path, read: str) -> None:
    with pytest.raises((CaptureError, RefusedError), match="could not"):
        read_by(read, stranger)
    assert not (stranger.parent / "ran").exists()


@pytest.mark.parametrize("read", ["capture", "checkpoint"])
def test_pickled_weights_are_not_read(tmp_path: Path, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral").model
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises((CaptureError, RefusedError), match=r"safetensors"):
        read_by(read, tmp_path)


def read_by(way: str, folder: Path) -> Any:
    if way == "capture":
        return load(folder)
    if way == "generate":
        return load_model(folder, "auto", CPU, plain)
    return load_streamed(folder, torch.float32, CPU, plain)


@pytest.mark.parametrize("config", [
    {"model_type": "mixtral", "hidden_size": -4}, {"model_type": ["mixtral"]}, {"model_type": "of next year"}, [],
])
def test_a_config_that_no_model_has_is_one_sentence(tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for way in ("capture", "generate", "checkpoint"):
        with pytest.raises((CaptureError, RefusedError), match="expected") as refused:
            read_by(way, tmp_path)
        assert "\n" not in str(refused.value)


def test_a_library_without_words_has_the_name_of_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", out_of_memory)
    with pytest.raises(CaptureError, match=r"could not load: MemoryError$"):
        load(tmp_path)


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


def test_every_call_of_the_library_says_so() -> None:
    """Code without a test of its own would be found here."""
    calls = [
        (path, node)
        for room in ("traces", "realrun", "sim", "policies", "trilane", "tools")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "from_config")
    ]
    for path, call in calls:
        spread = {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None}
        assert spread & {"NO_CODE", "NO_PICKLE"}, f"{path}:{call.lineno}"
        if "AutoModel" in ast.unparse(call.func) or "CAUSAL" in ast.unparse(call.func):
            assert "NO_PICKLE" in spread or call.func.attr == "from_config", f"{path}:{call.lineno}"
    assert len(calls) == 8
