"""Training the estimator on a tiny random model: it learns, the same way every time, and its file serves capture."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch import Tensor  # noqa: E402

from tests.kit.tiny_models import build  # noqa: E402
from tools import train_estimator  # noqa: E402
from tools.mini_data import load_corpus, train_tokenizer  # noqa: E402
from tools.mini_train import build_model, export  # noqa: E402
from tools.train_estimator import Settings, main, train_file, training_head  # noqa: E402
from traces.capture.capture import CaptureError, capture  # noqa: E402
from traces.capture.layers import find_moe_layers  # noqa: E402
from traces.capture.load import Loaded, load  # noqa: E402
from traces.capture.prompts import hashes  # noqa: E402
from traces.capture.vectors import Vectors, read_vectors  # noqa: E402
from traces.file import read_trace  # noqa: E402

Array: TypeAlias = NDArray[Any]

VOCAB, LAYERS, EXPERTS, TOP_K = 300, 3, 16, 2
SMALL = Settings(
    tokens=16000, width=24, mlp=48, peak_lr=5e-3, batch=4, length=32, calibration_tokens=640, held_out_windows=2
)


@dataclass(frozen=True)
class Brief(Settings):
    """Vectors over a thirtieth of the text."""

    calibration_tokens: int = 1280


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number, words in enumerate((["alpha", "beta", "gamma", "delta"], ["12", "345", "6", "789"])):
        random = np.random.default_rng(number)
        for split, lines in (("train", 400), ("eval", 200)):
            text = "\n".join(" ".join(random.choice(words, 8)) for _ in range(lines))
            (folder / f"domain{number}.{split}.txt").write_text(text + "\n")
    return folder


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_tokenizer(corpus, VOCAB).save(str(folder / "tokenizer.json"))
    built = build_model("mini-moe", seed=1, vocab=VOCAB, layers=LAYERS)
    with torch.no_grad():
        for layer in find_moe_layers(built):
            layer.router.weight.mul_(8)
    export(built, folder)
    return folder / "model"


def trained(
    model: Path, corpus: Path, output: Path, settings: Settings = SMALL
) -> tuple[Vectors, dict[str, list[float]]]:
    recall = train_file(load(model, "float32"), corpus, output, settings)
    return read_vectors(output), recall.by_layer()


def test_the_estimator_learns_what_the_next_router_will_say(model: Path, corpus: Path, tmp_path: Path) -> None:
    vectors, recall = trained(model, corpus, tmp_path / "v.safetensors")
    said = vectors.provenance["estimator"]
    assert said["last_loss"] < 0.6 * said["first_loss"]
    assert list(recall) == ["gate@1", "residual@1", "quasi_hidden@1", "estimator@1"]
    assert all(len(values) == LAYERS - 1 for values in recall.values())
    assert min(recall["estimator@1"]) > 2 * TOP_K / EXPERTS
    assert said["held_out_recall"]["estimator@1"] == pytest.approx(np.mean(recall["estimator@1"]), abs=1e-4)
    assert (said["width"], said["mlp"], said["seed"], said["tokens"]) == (24, 48, 17, 16000)
    assert vectors.provenance["tokens"] == 640
    assert vectors.tokens.sum(1).tolist() == [TOP_K * 640] * LAYERS


def test_a_seed_gives_the_same_bytes_and_another_other_weights(model: Path, corpus: Path, tmp_path: Path) -> None:
    short = Settings(**{**vars(SMALL), "tokens": 640})
    for name in ("a", "b"):
        trained(model, corpus, tmp_path / name, short)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    other, _ = trained(model, corpus, tmp_path / "c", Settings(**{**vars(short), "seed": 5}))
    assert not np.array_equal(other.estimator["up.weight"], read_vectors(tmp_path / "a").estimator["up.weight"])


def test_the_command_writes_a_file_that_capture_takes(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_estimator, "Settings", Brief)
    output = tmp_path / "v.safetensors"
    words = f"x --model {model} --corpus {corpus} -o {output} --tokens 1024 --width 8 --mlp 16 --batch 2"
    monkeypatch.setattr(sys, "argv", words.split())
    main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["layer", "gate@1", "residual@1", "quasi_hidden@1", "estimator@1"]
    assert [line.split()[0] for line in printed[1:]] == ["0", "1", "mean"]
    (tmp_path / "p.txt").write_text("alpha beta gamma delta\n")
    traced = capture(model, tmp_path / "p.txt", tmp_path / "t.safetensors", vectors=output, dtype="float32",
                     prompt_tokens=4, generated_tokens=3, forecasts=("estimator@1",))
    assert [str(key) for key in read_trace(traced).forecasts] == ["estimator@1"]


def test_without_tokens_there_are_vectors_alone(model: Path, corpus: Path, tmp_path: Path) -> None:
    vectors, recall = trained(model, corpus, tmp_path / "v", Settings(**{**vars(SMALL), "tokens": 0}))
    assert vectors.estimator == {}
    assert list(recall) == ["gate@1", "residual@1", "quasi_hidden@1"]


def test_a_model_without_the_usual_residual_stream_has_residual_vectors_and_no_estimator(
    model: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are means of what gates see, whatever lies between two of them."""
    other = replace(build("jamba", vocab_size=VOCAB), tokenizer=load(model, "float32").tokenizer)
    settings = replace(SMALL, tokens=0)
    recall = train_file(other, corpus, tmp_path / "v", settings)
    vectors = read_vectors(tmp_path / "v")
    assert vectors.default is None
    assert list(recall.by_layer()) == ["gate@1", "residual@1"]
    assert "default vectors are left out: model.layers.1: forecast quasi_hidden@1 expects" in capsys.readouterr().err
    np.testing.assert_allclose(vectors.residual, mean_changes(other, corpus, settings), atol=1e-6)
    with pytest.raises(CaptureError, match=r"forecast estimator@1 expects input_layernorm"):
        train_file(other, corpus, tmp_path / "w", SMALL)
    assert not (tmp_path / "w").exists()


def mean_changes(loaded: Loaded, corpus: Path, settings: Settings) -> Array:
    """DALI's equation 11 by hooks of this test's own: [L-1, H]."""
    seen: list[list[Tensor]] = [[] for _ in loaded.layers]
    for inputs, layer in zip(seen, loaded.layers, strict=True):
        layer.router.register_forward_pre_hook(lambda _m, args, inputs=inputs: inputs.append(args[0].flatten(0, -2)))
    text = training_head(load_corpus(corpus, loaded.tokenizer.backend_tokenizer))
    with torch.inference_mode():
        for step in range(settings.calibration_steps):
            loaded.model(input_ids=settings.calibration_batch(text, step))
    states = [torch.cat(inputs).double().mean(0).numpy() for inputs in seen]
    return np.diff(states, axis=0)


def test_a_folder_that_is_not_there_is_refused_before_training(model: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"the folder .* does not exist"):
        trained(model, corpus, tmp_path / "absent" / "v")


def test_the_file_knows_the_windows_that_were_read_and_no_others(model: Path, corpus: Path, tmp_path: Path) -> None:
    settings = Settings(**{**vars(SMALL), "tokens": 640})
    vectors, _ = trained(model, corpus, tmp_path / "v.safetensors", settings)
    assert vectors.read is not None
    loaded = load(model, "float32")
    text = training_head(load_corpus(corpus, loaded.tokenizer.backend_tokenizer))
    for batch in (settings.calibration_batch(text, 4), settings.training_batch(text, 4)):
        assert vectors.read.shared(loaded.tokenizer.batch_decode(batch)) == (n := windows_passages(loaded, batch), n)
    held_out = (corpus / "domain1.eval.txt").read_text()
    assert vectors.read.shared([held_out])[0] == 0
    first = loaded.tokenizer.decode(settings.training_batch(text, 0)[0])
    (tmp_path / "seen.jsonl").write_text(json.dumps({"text": first}))
    with pytest.raises(CaptureError, match=r"v\.safetensors: was calibrated on text of the prompts in .*seen\.jsonl"):
        capture(model, tmp_path / "seen.jsonl", tmp_path / "t", vectors=tmp_path / "v.safetensors")


def windows_passages(loaded: Loaded, batch: Tensor) -> int:
    return len(np.unique(np.concatenate([hashes(text) for text in loaded.tokenizer.batch_decode(batch)])))


@pytest.mark.parametrize(("words", "message"), [
    ("--tokens 100 --batch 4", "tokens: expected 0 (no estimator) or at least one batch of 4 x 128 = 512 tokens"),
    ("--tokens -1", "tokens: expected 0 (no estimator) or at least one batch"),
    ("--batch 400", "batch: expected at most 312 windows of 128 tokens, as vectors are taken over 40000 tokens"),
    ("--batch 0", "batch must be >= 1, got 0"),
    ("--width 0", "width must be >= 1, got 0"),
    ("--dtype int3", "dtype: expected one of auto, float32"),
    ("--corpus /absent", "/absent: expected pairs of <domain>.train.txt and <domain>.eval.txt, found none"),
    ("--model /absent", "/absent: no such folder"),
    ("-o /absent/v", "the folder /absent does not exist"),
])
def test_the_command_says_in_one_sentence_what_it_cannot_do(
    words: str, message: str, model: Path, corpus: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    line = f"x --model {model} --corpus {corpus} -o {tmp_path / 'v'} {words}"
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert message in said
    assert not (tmp_path / "v").exists()
