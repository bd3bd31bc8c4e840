"""Forecasts from the residual stream, against loops written another way, on tiny random models of many families."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch.nn import functional  # noqa: E402

from tests.kit.tiny_models import EXPERTS, HIDDEN, build  # noqa: E402
from traces.capture.capture import FORECASTS, CaptureError, CaptureSettings, capture_loaded  # noqa: E402
from traces.capture.forecasts import calibrate, quasi_hidden  # noqa: E402
from traces.capture.load import Loaded  # noqa: E402
from traces.capture.passes import HookedModel  # noqa: E402
from traces.capture.prompts import PromptFile, read_prompts  # noqa: E402
from traces.capture.record import LayerRecord, RouterRecorder  # noqa: E402
from traces.capture.residual_stream import PartialPass, ResidualStream  # noqa: E402
from traces.capture.vectors import Vectors, write_vectors  # noqa: E402
from traces.file import read_trace  # noqa: E402
from traces.trace import Trace  # noqa: E402

SERVED = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe")
ALSO = ("gpt_oss", "phimoe", "glm4_moe", "granitemoe", "ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe")
REFUSED = ("gemma4_text", "jamba")
PROMPTS = ["3 4 5 6 7", "8 9 10 11 12", "13 14 15"]
OTHER = ["33 34 35 36 37 38", "39 40 41 42"]
PLAIN = CaptureSettings(prompt_tokens=6, generated_tokens=4, batch_size=2, seed=3)
TOKENS = torch.arange(3, 15).view(2, 6)


def written(folder: Path, name: str, lines: list[str]) -> PromptFile:
    (folder / name).write_text("\n".join(lines))
    return read_prompts(folder / name)


def run(loaded: Loaded, folder: Path, *forecasts: str, vectors: Path | None = None) -> Trace:
    prompts, other = written(folder, "prompts.txt", PROMPTS), written(folder, "other.txt", OTHER)
    settings = replace(PLAIN, forecasts=forecasts)
    calibration = None if vectors else other
    return read_trace(capture_loaded(loaded, prompts, folder / "t.safetensors", settings, calibration, vectors))


@contextmanager
def watched(loaded: Loaded, resident: Any = None) -> Iterator[tuple[HookedModel, ResidualStream, PartialPass | None]]:
    with torch.inference_mode(), ExitStack() as stack:
        recorder = stack.enter_context(RouterRecorder(loaded.layers))
        stream = stack.enter_context(ResidualStream(loaded.model, recorder, "partial@1"))
        partial = None if resident is None else stack.enter_context(PartialPass(stream, resident))
        yield HookedModel(loaded, PLAIN, recorder), stream, partial


def taken(loaded: Loaded, folder: Path) -> Vectors:
    """Vectors on the other prompts, without what follows them."""
    with watched(loaded) as (now, stream, _):
        now = replace(now, settings=replace(PLAIN, generated_tokens=0))
        return calibrate(now, stream, written(folder, "other.txt", OTHER))


class Reference:
    """One pass without cache, noted by hooks of this test's own: x, r, h, ids, g and outputs of every layer."""

    def __init__(self, loaded: Loaded, tokens: Any) -> None:
        self.layers: list[Any] = [loaded.model.get_submodule(m.path.rpartition(".")[0]) for m in loaded.layers]
        self.mixtures = loaded.layers
        self.notes: list[dict[str, Any]] = [{} for _ in self.layers]
        hooks = [hook for note, layer, m in zip(self.notes, self.layers, self.mixtures, strict=True)
                 for hook in self._hooks(note, layer, m)]
        loaded.model(input_ids=tokens, use_cache=False)
        for hook in hooks:
            hook.remove()

    def _hooks(self, note: dict[str, Any], layer: Any, mixture: Any) -> list[Any]:
        def before(name: str) -> Any:
            return lambda _m, args: note.update({name: args[0]})

        def called(_module: Any, _args: Any, kwargs: Any) -> None:
            note["attention"] = kwargs

        return [
            layer.register_forward_pre_hook(before("x")),
            layer.self_attn.register_forward_pre_hook(called, with_kwargs=True),
            layer.post_attention_layernorm.register_forward_pre_hook(before("r")),
            mixture.experts.register_forward_pre_hook(lambda _m, args: note.update(h=args[0], ids=args[1], g=args[2])),
            mixture.experts.register_forward_hook(lambda _m, _a, output: note.update(routed=output)),
            layer.mlp.register_forward_hook(lambda _m, _a, output: note.update(mixed=output)),
        ]

    def raw(self, at: int, expert: int, hidden: Any) -> Any:
        """One expert's output by its matrices."""
        experts = self.mixtures[at].experts
        gate, up = (experts.gate_up_proj[expert] @ hidden).chunk(2)
        return experts.down_proj[expert] @ (functional.silu(gate) * up)

    def shared(self, at: int) -> Any:
        note = self.notes[at]
        return note["mixed"] - note["routed"].view_as(note["mixed"])

    def attended(self, at: int, state: Any, past: int) -> Any:
        """The gate input of layer ``at`` for the tokens from ``past`` on, had they entered it as ``state`` [B, S, H].

        The tokens before them entered as they did.
        """
        layer, note = self.layers[at], self.notes[at]
        stream = torch.cat([note["x"][:, :past], state], 1)
        call = {**note["attention"], "hidden_states": layer.input_layernorm(stream)}
        return layer.post_attention_layernorm(stream + layer.self_attn(**call)[0])[:, past:]


def test_default_vectors_are_the_means_of_what_experts_gave_their_tokens(tmp_path: Path) -> None:
    for family in SERVED:
        loaded = build(family)
        vectors = taken(loaded, tmp_path)
        sums = np.zeros((len(loaded.layers), EXPERTS, HIDDEN))
        counts = np.zeros(sums.shape[:2], np.int64)
        for text in OTHER:
            with torch.inference_mode():
                seen = Reference(loaded, torch.tensor([[int(word) for word in text.split()]]))
                for at, note in enumerate(seen.notes):
                    for hidden, ids in zip(note["h"], note["ids"].tolist(), strict=True):
                        for expert in ids:
                            sums[at, expert] += seen.raw(at, expert, hidden).numpy()
                            counts[at, expert] += 1
        np.testing.assert_array_equal(vectors.tokens, counts, err_msg=family)
        assert vectors.default is not None
        means = sums / np.maximum(counts, 1)[..., None]
        np.testing.assert_allclose(vectors.default, means, atol=1e-6, err_msg=family)


@pytest.mark.parametrize("family", SERVED)
def test_the_quasi_hidden_state_has_default_vectors_for_experts(family: str) -> None:
    loaded = build(family)
    default = torch.randn(len(loaded.layers), EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    with watched(loaded) as (now, stream, _):
        now.loaded.model(input_ids=TOKENS)
        now.recorder.take()
        states = [quasi_hidden(stream, default, at) for at in range(len(loaded.layers) - 1)]
        stream.after(len(loaded.layers) - 1, lambda own, *call: own(*call))
        with pytest.raises(CaptureError, match="expected router and experts of every layer to run"):
            now.recorder.take()  # what was run again left no records
    with torch.inference_mode():
        seen = Reference(loaded, TOKENS)
        for at, state in enumerate(states):
            note = seen.notes[at]
            routed = torch.stack([
                sum(g * default[at, e] for g, e in zip(gs, es, strict=True))
                for gs, es in zip(note["g"], note["ids"].tolist(), strict=True)
            ])
            total = note["r"] + seen.shared(at) + routed.view_as(note["r"])
            expected = seen.layers[at + 1].post_attention_layernorm(total)
            torch.testing.assert_close(state, expected.flatten(0, 1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", [*SERVED, *ALSO])
def test_with_all_experts_resident_partial_is_the_true_routing(family: str, tmp_path: Path) -> None:
    """In prefill and, with the key-value cache, in decode."""
    loaded = build(family)
    vectors = taken(loaded, tmp_path)
    complete = write_vectors(replace(vectors, resident=np.ones_like(vectors.resident)), tmp_path / "v.safetensors")
    trace = run(loaded, tmp_path, "partial@1", vectors=complete)
    ids = np.asarray(trace.tensors()["forecast/partial@1/ids"])
    np.testing.assert_array_equal(np.sort(ids[:, :-1, :2]), np.sort(trace.topk_ids[:, 1:]))
    assert (ids[:, -1] == -1).all()
    assert set(trace.phase.tolist()) == {0, 1}
    assert trace.scores is not None
    best = np.take_along_axis(np.asarray(trace.scores[:, 1:]), ids[:, :-1].astype(np.int64), 2)
    scores = np.asarray(trace.tensors()["forecast/partial@1/scores"])[:, :-1]
    np.testing.assert_array_equal(scores, np.minimum.accumulate(best, 2))


@pytest.mark.parametrize("share", ["none", "half"])
@pytest.mark.parametrize("family", SERVED)
def test_partial_attends_with_the_resident_experts_alone(family: str, share: str) -> None:
    loaded = build(family)
    resident = torch.zeros(len(loaded.layers), EXPERTS, dtype=torch.bool)
    resident[:, 1::2] = share == "half"
    with watched(loaded, resident) as (now, _, partial):
        assert partial is not None
        first = now.loaded.model(input_ids=TOKENS[:, :4], use_cache=True)
        prefilled = dict(partial._states)
        for at in range(4, TOKENS.shape[1]):
            now.loaded.model(input_ids=TOKENS[:, at : at + 1], past_key_values=first.past_key_values, use_cache=True)
        decoded = dict(partial._states)
    compare(loaded, resident, TOKENS[:, :4], prefilled, past=0)
    compare(loaded, resident, TOKENS, decoded, past=5)


def compare(loaded: Loaded, resident: Any, tokens: Any, states: dict[int, Any], past: int) -> None:
    with torch.inference_mode():
        seen = Reference(loaded, tokens)
        for at, state in states.items():
            note = seen.notes[at]
            kept = torch.stack([
                sum((g * seen.raw(at, e, h) for g, e in zip(gs, es, strict=True) if resident[at, e]), 0 * h)
                for h, gs, es in zip(note["h"], note["g"], note["ids"].tolist(), strict=True)
            ])
            entered = (note["r"] + seen.shared(at) + kept.view_as(note["r"]))[:, past:]
            expected = seen.attended(at + 1, entered, past).flatten(0, 1)
            torch.testing.assert_close(state, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", SERVED)
def test_forecasting_leaves_the_model_its_cache_and_its_tokens_alone(family: str, tmp_path: Path) -> None:
    loaded = build(family)
    watching = run(loaded, tmp_path, "quasi_hidden@1", "partial@1")
    plain = run(loaded, tmp_path)
    for name in ("topk_ids", "topk_weights", "scores", "position"):
        np.testing.assert_array_equal(watching.tensors()[name], plain.tensors()[name], err_msg=name)
    caches = []
    for resident in (None, torch.zeros(len(loaded.layers), EXPERTS, dtype=torch.bool)):
        with watched(loaded, resident) as (now, _, _partial):
            cache = now.loaded.model(input_ids=TOKENS, use_cache=True).past_key_values
            now.loaded.model(input_ids=TOKENS[:, :1], past_key_values=cache, use_cache=True)
            caches.append([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)])
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))
    modules = list(loaded.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)


@pytest.mark.parametrize("family", SERVED)
def test_partial_and_quasi_hidden_find_more_than_chance_would(family: str, tmp_path: Path) -> None:
    trace = run(build(family), tmp_path, "gate@1", "quasi_hidden@1", "partial@1")
    assert {n for n in trace.tensors() if n.endswith("/scores")} == {"forecast/partial@1/scores"}
    for kind in ("quasi_hidden", "partial"):
        guessed = np.asarray(trace.tensors()[f"forecast/{kind}@1/ids"])[:, :-1, :2]
        found = (guessed[..., None] == trace.topk_ids[:, 1:, None]).any(-1).mean()
        assert found > 1.5 * 2 / EXPERTS, kind
    assert "quasi_hidden, partial forecasts: 2 prompts of other.txt" in trace.provenance["calibration"]
    assert "approximate, the true ones depend on the run" in trace.provenance["calibration"]


@pytest.mark.parametrize("forecast", ["quasi_hidden@1", "partial@1", "estimator@1"])
@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_the_forecasts_name_and_keep_the_gate(
    family: str, forecast: str, tmp_path: Path
) -> None:
    loaded = build(family)
    message = "estimator@1 needs" if "estimator" in forecast else f"forecast {forecast} expects .*gate@1,residual@1"
    with pytest.raises(CaptureError, match=message):
        run(loaded, tmp_path, "gate@1", forecast)
    assert not (tmp_path / "t.safetensors").exists()
    assert len(run(loaded, tmp_path, "gate@1", "residual@1").forecasts) == 2


LEFT_OUT = {
    "mixtral": [], "gemma4_text": ["quasi_hidden@1", "partial@1"], "jamba": ["quasi_hidden@1", "partial@1"],
    "dense between": ["partial@1"],
}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_what_nobody_asked_for_and_the_model_cannot_give_is_left_out_with_a_note(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = build("qwen3_moe", mlp_only_layers=[2]) if family == "dense between" else build(family)
    prompts, other = written(tmp_path, "prompts.txt", PROMPTS), written(tmp_path, "other.txt", OTHER)
    trace = read_trace(capture_loaded(loaded, prompts, tmp_path / "t.safetensors", PLAIN, other))
    given = [name for name in FORECASTS if name not in LEFT_OUT[family]]
    assert sorted(str(key) for key in trace.forecasts) == sorted(given)
    notes = trace.provenance.get("left_out", [])
    assert [note.partition(" is left out: ")[0] for note in notes] == LEFT_OUT[family]
    assert capsys.readouterr().err.splitlines() == notes
    assert ("partial takes for resident" in trace.provenance["calibration"]) == (family == "mixtral")
    modules = list(loaded.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)


def test_a_layer_that_computes_something_else_is_found_by_trying(tmp_path: Path) -> None:
    loaded = build("granitemoe", residual_multiplier=0.5)
    with pytest.raises(CaptureError, match=r"expects a layer that computes r \+ mixture\(norm\(r\)\)"):
        run(loaded, tmp_path, "quasi_hidden@1")


def test_attention_that_gives_another_result_the_second_time_is_found_by_trying(tmp_path: Path) -> None:
    loaded = build("mixtral")
    attention = loaded.model.model.layers[2].self_attn
    own, calls = attention.forward, []

    def moody(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        output, weights = own(*args, **kwargs)
        return output * (1 + len(calls) % 2), weights

    attention.forward = moody
    with pytest.raises(CaptureError, match="partial@1 expects attention that can run again"):
        run(loaded, tmp_path, "partial@1")


def test_partial_refuses_a_dense_layer_between_two_mixtures(tmp_path: Path) -> None:
    loaded = build("qwen3_moe", mlp_only_layers=[2])
    with pytest.raises(
        CaptureError, match=r"layers\.3: forecast partial@1 expects a mixture in the decoder layer befo"
    ):
        run(loaded, tmp_path, "partial@1")
    assert run(loaded, tmp_path, "quasi_hidden@1").shape.moe_layers == 3


def test_records_are_of_the_model_not_of_what_was_run_again() -> None:
    loaded = build("qwen2_moe")
    records: list[list[LayerRecord]] = []
    for resident in (None, torch.zeros(len(loaded.layers), EXPERTS, dtype=torch.bool)):
        with watched(loaded, resident) as (now, _, _partial):
            now.loaded.model(input_ids=TOKENS)
            records.append(now.recorder.take())
    for a, b in zip(*records, strict=True):
        assert torch.equal(a.gate_input, b.gate_input)
        assert a.weights is not None
        assert torch.equal(a.weights, b.weights)
