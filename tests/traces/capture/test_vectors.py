"""The file of vectors: written whole, read with care, and used only for the model and the prompts that it fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.kit.tiny_models import build  # noqa: E402
from tests.kit.toys import declare_empty  # noqa: E402
from traces.capture.capture import CaptureError, CaptureSettings, capture_loaded  # noqa: E402
from traces.capture.forecasts import calibrate  # noqa: E402
from traces.capture.load import Loaded  # noqa: E402
from traces.capture.passes import HookedModel  # noqa: E402
from traces.capture.prompts import (  # noqa: E402
    PromptFile,
    read_prompts,
    sketch,
)
from traces.capture.record import RouterRecorder  # noqa: E402
from traces.capture.residual_stream import ResidualStream  # noqa: E402
from traces.capture.router_forecast import Estimator, estimator_from  # noqa: E402
from traces.capture.vectors import Vectors, popular_half, read_vectors, write_vectors  # noqa: E402
from traces.file import read_trace  # noqa: E402
from traces.trace import Trace  # noqa: E402

LAYERS, EXPERTS, HIDDEN = 3, 4, 8
HEADER = '{"format": "trilane-vectors 1", "provenance": {}}'
PLAIN = CaptureSettings(prompt_tokens=6, generated_tokens=2, batch_size=2, seed=3)


def network(seed: int = 0, experts: int = EXPERTS, hidden: int = HIDDEN, layers: int = LAYERS) -> Estimator:
    torch.manual_seed(seed)
    return Estimator(layers - 1, hidden, experts, width=6, mlp=10)


def some(**changes: Any) -> Vectors:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (LAYERS, EXPERTS))
    vectors = Vectors(
        residual=rng.normal(size=(LAYERS - 1, HIDDEN)).astype(np.float32),
        default=rng.normal(size=(LAYERS, EXPERTS, HIDDEN)).astype(np.float32),
        tokens=tokens,
        resident=popular_half(tokens),
        estimator=network().tensors(),
        provenance={"model": "tiny", "revision": "random"},
    )
    return replace(vectors, **changes)


def prompts(folder: Path, name: str, lines: list[str]) -> PromptFile:
    (folder / name).write_text("\n".join(lines))
    return read_prompts(folder / name)


def captured(
    loaded: Loaded, folder: Path, vectors: Path | None, *forecasts: str, other: list[str] | None = None
) -> Trace:
    evaluated = prompts(folder, "prompts.txt", ["3 4 5 6 7", "8 9 10"])
    calibration = prompts(folder, "other.txt", other) if other else None
    settings = replace(PLAIN, forecasts=forecasts)
    return read_trace(capture_loaded(loaded, evaluated, folder / "t.safetensors", settings, calibration, vectors))


def calibrated(loaded: Loaded, folder: Path, lines: list[str]) -> Vectors:
    with (
        torch.inference_mode(),
        RouterRecorder(loaded.layers) as recorder,
        ResidualStream(loaded.model, recorder, "quasi_hidden@1") as stream,
    ):
        return calibrate(HookedModel(loaded, PLAIN, recorder), stream, prompts(folder, "other.txt", lines))


@pytest.mark.parametrize("changes", [{}, {"default": None}, {"estimator": {}}, {"read": sketch(["a b c"])}])
def test_what_is_written_is_read_again_and_equal_vectors_give_equal_bytes(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    vectors = some(**changes)
    read = read_vectors(write_vectors(vectors, tmp_path / "a"))
    for name in ("residual", "default", "tokens", "resident"):
        np.testing.assert_array_equal(getattr(read, name), getattr(vectors, name))
    assert read.estimator.keys() == vectors.estimator.keys()
    assert read.provenance == vectors.provenance
    assert (read.read is None) == (vectors.read is None)
    write_vectors(read, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_failed_write_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    write_vectors(some(), tmp_path / "v")
    before = (tmp_path / "v").read_bytes()
    with pytest.raises(CaptureError, match=r"residual must be float32 of 2 axes, got float64"):
        write_vectors(some(residual=np.zeros((2, HIDDEN))), tmp_path / "v")
    with pytest.raises(CaptureError, match=r"the folder .* does not exist"):
        write_vectors(some(), tmp_path / "absent" / "v")
    assert [p.name for p in tmp_path.iterdir()] == ["v"]
    assert (tmp_path / "v").read_bytes() == before


def test_a_model_with_one_layer_of_experts_has_default_vectors_and_nothing_to_forecast(tmp_path: Path) -> None:
    vectors = calibrated(build("mixtral", num_hidden_layers=1), tmp_path, ["3 4 5 6 7"])
    assert (vectors.default is not None and vectors.default.any(), len(vectors.residual)) == (True, 0)


def test_the_popular_half_has_the_most_tokens_and_of_equal_ones_the_lower_ids() -> None:
    counts = np.array([[5, 1, 5, 5], [0, 0, 0, 0], [1, 2, 3, 4]])
    assert popular_half(counts).tolist() == [
        [True, False, True, False],
        [True, True, False, False],
        [False, False, True, True],
    ]


@pytest.mark.parametrize(("changes", "message"), [
    ({"default": np.zeros((LAYERS, EXPERTS, 7), np.float32)}, r"default must be shape \[3, 4, 8\], got float32"),
    ({"resident": np.zeros((LAYERS, 5), np.bool_)}, r"resident must be shape \[3, 4\]"),
    ({"residual": np.full((LAYERS - 1, HIDDEN), np.nan, np.float32)}, "finite numbers, 'residual' has others"),
    ({"estimator": {"enter.weight": np.zeros((6, HIDDEN), np.float32)}}, "one estimator's weights or none; miss"),
    ({"estimator": {"x" * 10**5: np.zeros(3, np.float32)}}, r"unknown \['estimator/x{10,80}\.{3}"),
    ({"estimator": network(experts=5).tensors()}, r"leave.weight must be shape \[4, 6\], got float32 \[5, 6\]"),
])
def test_tensors_that_do_not_agree_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=f"/v: .*(?:{message})"):
        write_vectors(some(**changes), tmp_path / "v")


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("harm", "message"), [
    (damaged, "expected content with checksum .* copy it again"),
    (lambda p: p.write_bytes(p.read_bytes()[:-9]), r"expected a complete \.safetensors file of vectors"),
    (
        lambda p: save_file({**load_file(p), "estimator/up.weight": np.zeros((), "f4")}, p, {"trilane": HEADER}),
        r"up.weight must be shape \[0, 6\], got float32 \[\]",
    ),
    (lambda p: declare_empty(p, "more", "F8_E4M3", [0]), r"expected a complete \.safetensors file of vectors"),
    (lambda p: declare_empty(p, "more", "F32", [0] * 70), r"expected a complete \.safetensors file of vectors"),
    (lambda p: p.write_text("no"), r"expected a complete \.safetensors file of vectors"),
    (lambda p: p.unlink(), "expected a file of vectors, found none there"),
    (lambda p: save_file({"residual": np.zeros(1)}, p), "expected metadata 'trilane-vectors 1' .* got format None"),
    (lambda p: save_file({"a": np.zeros(1)}, p, {"trilane": "[1"}), r"expected a complete \.safetensors file"),
    (
        lambda p: save_file({"a": np.zeros(1)}, p, {"trilane": HEADER}),
        r"expected tensors .* got none of \['resident', 'residual', 'tokens'\]",
    ),
])
def test_a_broken_file_is_refused(harm: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    path = write_vectors(some(), tmp_path / "v.safetensors")
    harm(path)
    with pytest.raises(CaptureError, match=rf"v\.safetensors: .*(?:{message})"):
        read_vectors(path)


def test_a_file_serves_as_well_as_calibrating_again(tmp_path: Path) -> None:
    loaded, lines = build("deepseek_v2"), ["33 34 35 36", "37 38 39 40"]
    path = write_vectors(calibrated(loaded, tmp_path, lines), tmp_path / "v")
    forecasts = ("residual@1", "quasi_hidden@1", "partial@1")
    again = captured(loaded, tmp_path, None, *forecasts, other=lines)
    from_file = captured(loaded, tmp_path, path, *forecasts)
    assert from_file.checksum == again.checksum


def test_the_estimator_ranks_by_its_own_logits(tmp_path: Path) -> None:
    loaded = build("mixtral")
    vectors = calibrated(loaded, tmp_path, ["33 34 35 36"])
    judge = network(hidden=32, experts=8, layers=4)
    path = write_vectors(replace(vectors, estimator=judge.tensors()), tmp_path / "v")
    ids = np.asarray(captured(loaded, tmp_path, path, "estimator@1").tensors()["forecast/estimator@1/ids"])
    assert (ids[:, -1] == -1).all()
    with torch.no_grad():
        judge.leave.weight.copy_(-judge.leave.weight)
    write_vectors(replace(vectors, estimator=judge.tensors()), path)
    opposite = np.asarray(captured(loaded, tmp_path, path, "estimator@1").tensors()["forecast/estimator@1/ids"])
    for best, worst in zip(ids[:, :-1].reshape(-1, 4), opposite[:, :-1].reshape(-1, 4), strict=True):
        assert not set(best.tolist()) & set(worst.tolist())


def test_the_estimator_is_the_formula_of_the_paper() -> None:
    judge = network()
    weights = {name: torch.from_numpy(value) for name, value in judge.tensors().items()}
    quasi = torch.randn(LAYERS - 1, 5, HIDDEN)
    for layer in range(LAYERS - 1):
        z = quasi[layer] @ weights["enter.weight"].T + weights["enter.bias"] + weights["position"][layer]
        inner = z @ weights["up.weight"].T
        y = z + (inner * inner.sigmoid()) @ weights["down.weight"].T
        spread = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        logits = (spread * weights["norm.weight"] + weights["norm.bias"]) @ weights["leave.weight"].T
        torch.testing.assert_close(judge(quasi[layer], layer), logits)
        torch.testing.assert_close(judge(quasi, slice(None))[layer], logits)
    torch.testing.assert_close(estimator_from(judge.tensors())(quasi, slice(None)), judge(quasi, slice(None)))


def test_vectors_that_lack_what_a_forecast_needs_are_refused(tmp_path: Path) -> None:
    loaded = build("mixtral")
    vectors = calibrated(loaded, tmp_path, ["33 34 35 36"])
    bare = write_vectors(replace(vectors, default=None), tmp_path / "v")
    with pytest.raises(CaptureError, match=r"quasi_hidden@1 needs default vectors"):
        captured(loaded, tmp_path, bare, "quasi_hidden@1")
    complete = write_vectors(vectors, tmp_path / "v")
    with pytest.raises(CaptureError, match=r"estimator@1 needs a trained estimator.*tools\.train_estimator"):
        captured(loaded, tmp_path, complete, "estimator@1")


def test_where_nobody_knows_what_was_read_the_trace_says_that_it_was_not_checked(tmp_path: Path) -> None:
    loaded = build("mixtral")
    vectors = calibrated(loaded, tmp_path, ["33 34 35 36"])
    path = write_vectors(vectors, tmp_path / "v")
    assert captured(loaded, tmp_path, path, "residual@1").provenance["read_in_calibration"] == (
        "0 of 2 passages that were looked up"
    )
    write_vectors(replace(vectors, read=None), path)
    assert captured(loaded, tmp_path, path, "residual@1").provenance["read_in_calibration"].startswith("not checked")


def test_a_sketch_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write_vectors(some(read=sketch(["what was read"])), tmp_path / "v")
    said = read_metadata(path)
    save_file(dict(load_file(path)), path, {"trilane": json.dumps({**said, "read": "?"})})
    with pytest.raises(CaptureError, match="expected a sketch of the text read, got"):
        read_vectors(path)


def read_metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="np") as file:
        return dict(json.loads(file.metadata()["trilane"]))


def test_vectors_of_another_model_or_of_evaluated_prompts_are_refused(tmp_path: Path) -> None:
    loaded = build("mixtral")
    path = write_vectors(calibrated(loaded, tmp_path, ["33 34 35 36"]), tmp_path / "v")
    with pytest.raises(
        CaptureError, match=r"expected vectors of mixtral \(revision other\), got those of mixtral \(rev"
    ):
        captured(replace(loaded, revision="other"), tmp_path, path, "residual@1")
    smaller = build("mixtral", num_local_experts=4)
    with pytest.raises(CaptureError, match=r"expected vectors for \(4, 4\) layers and experts, got \(4, 8\)"):
        captured(smaller, tmp_path, path, "residual@1")
    write_vectors(calibrated(loaded, tmp_path, ["33 34 35 36", "8 9 10"]), path)
    with pytest.raises(CaptureError, match=r"text of the prompts in .*prompts.txt \(1 of 2 passages"):
        captured(loaded, tmp_path, path, "residual@1")
    with pytest.raises(CaptureError, match="expected calibration prompts or a file of vectors, got"):
        captured(loaded, tmp_path, path, "residual@1", other=["44 45"])
