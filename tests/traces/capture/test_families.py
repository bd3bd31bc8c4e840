"""Capture on tiny random models of many families: what is recorded is what the experts were called with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.kit.tiny_models import COMMON, EXPERTS, FAMILIES, HIDDEN, LAYERS, LOCAL, VOCAB, WIDTH, Numbers, build  # noqa: E402
from traces.capture.capture import CaptureSettings, capture_loaded  # noqa: E402
from traces.capture.layers import find_moe_layers, shape_of  # noqa: E402
from traces.capture.load import Loaded  # noqa: E402
from traces.capture.prompts import read_prompts  # noqa: E402
from traces.capture.record import RouterRecorder, scoring_rule  # noqa: E402
from traces.capture.router_forecast import RouterForecaster  # noqa: E402
from traces.capture.settings import CaptureError  # noqa: E402
from traces.file import read_trace  # noqa: E402

PROMPTS = ["3 4 5 6 7", "8 9 10 11 12", "13 14 15"]
SETTINGS = CaptureSettings(prompt_tokens=5, generated_tokens=3, batch_size=2, forecasts=("gate@1",))


def spy(loaded: Loaded) -> list[list[tuple[Any, Any]]]:
    """Replace every experts module's forward by one that notes ids and weights, by layer, before it runs."""
    calls: list[list[tuple[Any, Any]]] = [[] for _ in loaded.layers]
    for notes, layer in zip(calls, loaded.layers, strict=True):
        original = layer.experts.forward

        def noting(hidden: Any, ids: Any, weights: Any, notes: Any = notes, original: Any = original) -> Any:
            notes.append((ids.numpy().copy(), weights.numpy().copy()))
            return original(hidden, ids, weights)

        layer.experts.forward = noting  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_holds_what_the_experts_got(family: str, tmp_path: Path) -> None:
    loaded = build(family)
    _, moe_layers, shared, rule = FAMILIES[family]
    calls = spy(loaded)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    trace = read_trace(
        capture_loaded(loaded, read_prompts(tmp_path / "prompts.txt"), tmp_path / "t.safetensors", SETTINGS)
    )

    shape = trace.shape
    assert (shape.moe_layers, shape.dense_layers) == (moe_layers, LAYERS - moe_layers)
    assert (shape.experts, shape.top_k, shape.hidden, shape.expert_width) == (EXPERTS, 2, HIDDEN, WIDTH)
    assert shape.shared_experts == shared
    size = sum(p.nbytes for p in loaded.model.parameters())
    slack = 0.1 if family == "jamba" else 0.01  # norms; Jamba's Mamba layers count as attention layers
    assert shape.routed_bytes + shape.non_expert_bytes == pytest.approx(size, rel=slack)
    assert trace.provenance["scores"].startswith(rule)
    assert len(trace.sequence) == (5 + 3) * 2 + (3 + 3)  # never a pad token
    for layer, notes in enumerate(calls):
        ids, weights = (np.concatenate([note[part] for note in notes[1:]]) for part in (0, 1))  # the first is the probe
        order = np.argsort(-weights.astype(np.float16), axis=1, kind="stable")
        np.testing.assert_array_equal(trace.topk_ids[:, layer], np.take_along_axis(ids, order, 1))
        np.testing.assert_array_equal(
            trace.topk_weights[:, layer], np.take_along_axis(weights, order, 1).astype(np.float16)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_asked_about_its_own_input_chooses_the_same_again(family: str) -> None:
    loaded = build(family)
    with torch.inference_mode(), RouterRecorder(loaded.layers) as recorder:
        loaded.model(input_ids=torch.arange(3, 19).view(2, 8))
        records = recorder.take()
        rule, _ = scoring_rule(records)
        forecaster = RouterForecaster(loaded.layers, (), 4, rule, {})
        for layer, record in zip(loaded.layers, records, strict=True):
            best, values = forecaster.rank(layer, record, record.gate_input)
            assert torch.equal(best[:, :2].sort().values, record.ids.sort().values)
            assert (values[:, :-1] >= values[:, 1:]).all()


def attempt(loaded: Loaded, folder: Path) -> None:
    loaded = replace(loaded, layers=find_moe_layers(loaded.model))
    capture_loaded(loaded, read_prompts(folder / "prompts.txt"), folder / "t.safetensors", SETTINGS)


@pytest.mark.parametrize("family", ["dbrx", "llama4_text", "jetmoe", "qwen2"])
def test_other_models_are_refused_with_one_clear_error(family: str, tmp_path: Path) -> None:
    settings = {
        "dbrx": {
            "d_model": HIDDEN,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": VOCAB,
            "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2},
            "ffn_config": {"ffn_hidden_size": WIDTH, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        },
        "llama4_text": {**COMMON, **LOCAL, "head_dim": 8, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 1},
        "jetmoe": {**COMMON, **LOCAL, "kv_channels": 8},
        "qwen2": {**COMMON, "intermediate_size": 40},
    }
    config = transformers.AutoConfig.for_model(family, **settings[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    with pytest.raises(CaptureError, match=r"expected|not supported"):
        attempt(Loaded(family, "random", model, Numbers(), [], 32), tmp_path)
    assert not (tmp_path / "t.safetensors").exists()


def test_a_config_may_name_the_hidden_size_otherwise() -> None:
    loaded = build("mixtral")
    values = loaded.model.config.to_dict()
    values["d_model"] = values.pop("hidden_size")
    loaded.model.config = SimpleNamespace(**values)  # type: ignore[assignment]
    assert shape_of(loaded.model, loaded.layers, "toy", 2, 32).hidden == HIDDEN
