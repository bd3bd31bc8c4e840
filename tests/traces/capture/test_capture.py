"""Capture: batches, forecasts, inert hooks, bounded memory, provenance and errors, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tools.mini_train import build_model, export  # noqa: E402
from traces.capture import capture as capture_module  # noqa: E402
from traces.capture.capture import CaptureError, CaptureSettings, capture, capture_loaded  # noqa: E402
from traces.capture.layers import _kv_width, find_moe_layers  # noqa: E402
from traces.capture.load import Loaded, load, revision_of  # noqa: E402
from traces.capture.passes import Sampler, make_batches  # noqa: E402
from traces.capture.prompts import read_prompts  # noqa: E402
from traces.capture.record import (  # noqa: E402
    LayerRecord,
    RouterRecorder,
    reading,
)
from traces.file import (  # noqa: E402
    FOLDER,
    TraceWriter,
    read_trace,
)
from traces.trace import Trace  # noqa: E402

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 16, 2, 64
PROMPTS = ["3 4 5 6 7 8", "9 10 11", "12 13 14 15 16 17", "18 19 20 21 22 23 24 25"]
OTHER = ["33 34 35 36", "37 38 39 40"]
PLAIN: dict[str, Any] = {"prompt_tokens": 6, "generated_tokens": 4, "batch_size": 2, "seed": 3}


class Numbers:
    """A tokenizer for text that is token numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    model = build_model("mini-moe", seed=4, vocab=VOCAB, layers=LAYERS).eval()
    with torch.no_grad():
        for layer in find_moe_layers(model):
            layer.router.weight.mul_(5)
    return Loaded("tiny", "random", model, Numbers(), find_moe_layers(model), 32)


def run(loaded: Loaded, folder: Path, prompts: list[str] = PROMPTS, other: list[str] = OTHER, **settings: Any) -> Trace:
    (folder / "prompts.txt").write_text("\n".join(prompts))
    (folder / "other.txt").write_text("\n".join(other))
    evaluated, calibration = read_prompts(folder / "prompts.txt"), read_prompts(folder / "other.txt")
    wanted = CaptureSettings(**{**PLAIN, **settings})
    return read_trace(capture_loaded(loaded, evaluated, folder / "t.safetensors", wanted, calibration))


def in_order(trace: Trace, tensor: str) -> Any:
    return np.asarray(trace.tensors()[tensor])[np.lexsort((trace.position, trace.sequence))]


def gate_inputs(loaded: Loaded, tokens: list[int]) -> list[Any]:
    """Gate input of every layer [N, H], by hooks of this test's own."""
    seen: list[Any] = []
    routers = [layer.router for layer in loaded.layers]
    hooks = [router.register_forward_hook(lambda _m, args, _o: seen.append(args[0])) for router in routers]
    with torch.inference_mode():
        loaded.model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return seen


def expected_forecast(loaded: Loaded, target: int, hidden: Any) -> Any:
    router = loaded.layers[target].router
    with torch.inference_mode():
        return torch.nn.functional.linear(hidden, router.weight).topk(2 * TOP_K).indices.numpy()


def test_every_sequence_has_its_prompt_and_its_generated_tokens(loaded: Loaded, tmp_path: Path) -> None:
    trace = run(loaded, tmp_path)
    for sequence, length in enumerate([6, 3, 6, 6]):  # the last prompt is cut
        mine = trace.sequence == sequence
        assert trace.position[mine].tolist() == list(range(length + 4))
        assert trace.phase[mine].tolist() == [0] * length + [1] * 4
    assert trace.topk_ids.shape == (sum([6, 3, 6, 6]) + 16, LAYERS, TOP_K)


def test_progress_is_reported_by_batch_and_token(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("1 2 3\n4 5 6\n7 8 9")
    said: list[str] = []
    settings = CaptureSettings(generated_tokens=2, batch_size=2, forecasts=())
    prompts = read_prompts(tmp_path / "prompts.txt")
    capture_loaded(loaded, prompts, tmp_path / "t.safetensors", settings, progress=said.append)
    assert said[-6:] == [f"batch {batch} of 2: {step} of 2 tokens generated" for batch in (1, 2) for step in range(3)]


def test_a_batch_gives_what_single_sequences_give(loaded: Loaded, tmp_path: Path) -> None:
    batched, single = run(loaded, tmp_path, batch_size=3), run(loaded, tmp_path, batch_size=1)
    for name in ("sequence", "position", "phase", "topk_ids", "forecast/gate@1/ids", "forecast/residual@1/ids"):
        np.testing.assert_array_equal(in_order(batched, name), in_order(single, name), err_msg=name)
    for name in ("topk_weights", "scores", "forecast/partial@1/scores"):
        np.testing.assert_allclose(in_order(batched, name), in_order(single, name), atol=1e-3, err_msg=name)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_tokens(loaded: Loaded, tmp_path: Path) -> None:
    run(loaded, tmp_path)
    first = (tmp_path / "t.safetensors").read_bytes()
    run(loaded, tmp_path)
    assert (tmp_path / "t.safetensors").read_bytes() == first
    other = run(loaded, tmp_path, seed=4)
    again = run(loaded, tmp_path)
    assert not np.array_equal(other.topk_ids, again.topk_ids)


def test_greedy_sampling_takes_the_likeliest_and_sampling_ignores_the_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert Sampler(0, 0.0)(logits, [0, 1, 2], 0).squeeze(1).tolist() == logits.argmax(-1).tolist()
    together = Sampler(0, 0.8)(logits, [4, 5, 6], 7)
    assert Sampler(0, 0.8)(logits[1:2], [5], 7).item() == together[1].item()


def test_sampling_follows_the_probabilities() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log().repeat(4000, 1)
    drawn = Sampler(1, 1.0)(logits, range(4000), 0).squeeze(1).bincount(minlength=3) / 4000
    np.testing.assert_allclose(drawn.numpy(), [0.1, 0.6, 0.3], atol=0.03)


def test_batches_hold_prompts_of_one_length() -> None:
    batches = make_batches([[1], [1, 2], [3], [4], [5, 6]], 2)
    assert [b.sequences for b in batches] == [(0, 2), (3,), (1, 4)]


def test_hooks_are_inert_and_gone_afterwards(loaded: Loaded) -> None:
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.inference_mode():
        plain = loaded.model(input_ids=tokens).logits
        with RouterRecorder(loaded.layers) as recorder:
            hooked = loaded.model(input_ids=tokens).logits
            assert len(recorder.take()) == LAYERS
    assert torch.equal(plain, hooked)
    modules = [m for layer in loaded.layers for m in (layer.router, layer.experts)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_gate_forecasts_are_the_later_router_on_this_layers_gate_input(
    loaded: Loaded, tmp_path: Path, ahead: int
) -> None:
    trace = run(loaded, tmp_path, prompts=PROMPTS[:1], generated_tokens=0, forecasts=(f"gate@{ahead}",))
    tensors = trace.tensors()
    ids = tensors[f"forecast/gate@{ahead}/ids"]
    seen = gate_inputs(loaded, [3, 4, 5, 6, 7, 8])
    assert f"forecast/gate@{ahead}/scores" not in tensors
    assert (ids[:, LAYERS - ahead :] == -1).all()
    for layer in range(LAYERS - ahead):
        np.testing.assert_array_equal(ids[:, layer], expected_forecast(loaded, layer + ahead, seen[layer]))


def test_residual_forecasts_add_the_mean_change_on_the_calibration_prompts(loaded: Loaded, tmp_path: Path) -> None:
    trace = run(loaded, tmp_path, prompts=PROMPTS[:1], generated_tokens=0, forecasts=("residual@1",))
    calibration = [gate_inputs(loaded, [int(w) for w in text.split()]) for text in OTHER]
    seen = gate_inputs(loaded, [3, 4, 5, 6, 7, 8])
    for layer in range(LAYERS - 1):
        change = torch.cat([c[layer + 1] - c[layer] for c in calibration]).mean(0)
        best = expected_forecast(loaded, layer + 1, seen[layer] + change)
        np.testing.assert_array_equal(trace.tensors()["forecast/residual@1/ids"][:, layer], best)


def test_memory_is_bounded_by_one_pass(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Counting(TraceWriter):
        def append(self, rows: Any) -> None:
            sizes.append(len(rows["sequence"]))
            super().append(rows)

    monkeypatch.setattr(capture_module, "TraceWriter", Counting)
    run(loaded, tmp_path)
    assert sizes == [12, 2, 2, 2, 2, 6, 1, 1, 1, 1, 3, 1, 1, 1, 1]  # lengths 6, 6 | 6 | 3


def test_a_failure_midway_leaves_no_file(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "__call__", lambda *_: (_ for _ in ()).throw(RuntimeError("power cut")))
    with pytest.raises(RuntimeError, match="power cut"):
        run(loaded, tmp_path, forecasts=())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.txt", "prompts.txt"]


def test_a_saved_model_is_captured_with_its_provenance(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    lines = [{"text": "the cat sat on the mat", "domain": "a"}, {"text": "on the mat the cat", "domain": "b"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = capture(folder, tmp_path / "prompts.jsonl", tmp_path / "t.safetensors", forecasts=("gate@1",), **PLAIN)
    trace = read_trace(output)
    said = trace.provenance
    assert said["domains"] == ["a", "b"]
    assert said["prompts"] == read_prompts(tmp_path / "prompts.jsonl").description
    assert said["revision"].startswith("sha256:")
    assert said["versions"]["transformers"] == transformers.__version__
    assert (said["calibration"], said["sampling"], said["dtype"]) == ("none", "temperature 0.8", "bfloat16")
    assert said["text"] == "generated"
    assert trace.shape.weight_bits == 16
    assert trace.shape.name == "model"
    assert load(folder, "float32").weight_bits == 16, "of the file, whatever the model runs in"


def save_tiny(folder: Path) -> Path:
    from tokenizers import Tokenizer

    from tools.mini_data import train_tokenizer

    (folder / "a.train.txt").write_text("the cat sat on the mat\n" * 20)
    (folder / "a.eval.txt").write_text("the cat\n")
    train_tokenizer(folder, 300).save(str(folder / "tokenizer.json"))
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    export(build_model("mini-moe", seed=1, vocab=vocab, layers=2), folder)
    return folder / "model"


@pytest.mark.parametrize(("settings", "message"), [
    ({"prompt_tokens": 0}, "prompt_tokens: expected a whole number from 1 to"),
    ({"temperature": -1}, "temperature: expected a number from 0 to 1000"),
    ({"temperature": float("nan")}, "temperature: expected a number from 0 to 1000, got nan"),
    ({"temperature": float("inf")}, "temperature: expected a number from 0 to 1000, got inf"),
    ({"forecasts": ("gate@0",)}, "forecast 'gate@0': expected gate@1"),
    ({"forecasts": ("residual@2",)}, "residual@1"),
    ({"forecasts": ("crystal@1",)}, "crystal@1"),
    ({"prompts": ["1 2", OTHER[0]]}, "calibrate on other text"),
])
def test_wrong_settings_are_named(loaded: Loaded, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        run(loaded, tmp_path, **settings)


def test_residual_forecasts_need_calibration_prompts(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    with pytest.raises(CaptureError, match="calibration_prompts=FILE"):
        capture_loaded(loaded, read_prompts(tmp_path / "prompts.txt"), tmp_path / "t", CaptureSettings(**PLAIN))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("p.jsonl", '{"text": "a"}\n{"text": 3}\n', "line 2"),
    ("p.jsonl", "not json\n", "line 1"),
    ("p.txt", "\n\n", "at least one prompt"),
])
def test_a_prompt_file_is_checked(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CaptureError, match=message):
        read_prompts(tmp_path / name)


def test_numbers_of_texts_may_have_64_bits(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": 18446744073709551615, "text": "a"}\n')
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl").prompts] == ["a"]


def test_calibration_prompts_are_compared_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    with pytest.raises(CaptureError, match="calibrate on other text"):
        capture(FOLDER / "mini-moe", tmp_path / "p.txt", tmp_path / "t", calibration_prompts=tmp_path / "p.txt")


def test_a_router_s_own_tokens_are_replaced_and_nothing_else() -> None:
    tokens, weights = torch.tensor([[7]]), torch.ones(1)
    record = LayerRecord(weights, weights, True, (torch.tensor([[1]]), weights), {"ids": torch.tensor([[2]])})
    now = reading(record, tokens)
    assert (now.extra_args, now.extra_kwargs) == ((tokens, weights), {"ids": tokens})


def test_a_model_of_the_hub_has_its_commit() -> None:
    assert revision_of(SimpleNamespace(_commit_hash="abc"), Path("no/folder")) == "abc"


def test_latent_attention_keeps_a_vector_and_a_rotary_key() -> None:
    assert _kv_width(SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64), 2048, 16) == 576


def test_attention_whose_config_names_no_groups_keeps_keys_and_values_of_every_head() -> None:
    assert _kv_width(SimpleNamespace(head_dim=8), 32, 4) == 2 * 4 * 8


def test_a_missing_prompt_file_and_a_missing_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="expected a file of prompts"):
        read_prompts(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\nthr\xe9\n")
    with pytest.raises(CaptureError, match=r"latin\.txt line 3: expected prompts as UTF-8 text, got the byte 0xe9"):
        read_prompts(tmp_path / "latin.txt")
    (tmp_path / "p.txt").write_text("a\n")
    with pytest.raises(CaptureError, match=r"^absent: no such folder"):
        capture("absent", tmp_path / "p.txt", tmp_path / "t.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptureError, match="could not load"):
        capture(tmp_path / "empty", tmp_path / "p.txt", tmp_path / "t.safetensors")
