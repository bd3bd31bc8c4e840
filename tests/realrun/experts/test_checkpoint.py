"""Experts out of a model in memory, or straight from a checkpoint: the same bytes, never all of them twice."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from realrun.errors import RefusedError
from realrun.experts import checkpoint
from realrun.experts.checkpoint import load_streamed, move, take_experts
from realrun.experts.store import ExpertStore
from realrun.machine.host_memory import host_memory_given
from realrun.machine.pinned import plain
from tests.kit.tiny_models import ALL, COMMON, LOCAL, build, model_of
from traces.capture.layers import MoeLayer, find_moe_layers

Experts = list[dict[str, Tensor]]  # of every layer: all experts, by parameter
FAMILIES = pytest.mark.parametrize("family", ALL)


def experts_of(layers: Iterable[MoeLayer]) -> Experts:
    return [{n: p.detach().clone() for n, p in layer.experts.named_parameters() if p.ndim > 1} for layer in layers]


def assert_holds(store: ExpertStore, experts: Experts) -> None:
    assert len(store.layouts) == len(experts)
    for layer, parameters in enumerate(experts):
        assert {part.name for part in store.layouts[layer].parts} == set(parameters)
        for expert in range(len(next(iter(parameters.values())))):
            for name, view in store.layouts[layer].views(store.buffer(layer, expert)).items():
                assert torch.equal(view, parameters[name][expert]), (layer, expert, name)


def assert_same_rest(found: Any, expected: Any) -> None:
    state = {name: value for name, value in found.state_dict().items() if not value.is_meta}
    others = expected.state_dict()
    assert len(state) < len(others)
    for name, value in state.items():
        assert value.dtype == others[name].dtype, name
        assert torch.equal(value, others[name]), name


def never(size_bytes: int) -> Tensor:
    raise AssertionError("memory for experts was asked for")


@FAMILIES
def test_a_checkpoint_in_shards_gives_the_bytes_of_the_model_in_memory(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    found, layers, store = load_streamed(tmp_path, torch.float32, "cpu", plain)
    assert_holds(store, experts_of(find_moe_layers(model)))
    assert_same_rest(found, model)
    assert [layer.path for layer in layers] == [layer.path for layer in find_moe_layers(model)]
    assert not found.training


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "gpt_oss"])
def test_other_types_are_converted_as_the_library_does(family: str, tmp_path: Path) -> None:
    model_of(family).save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found, layers, store = load_streamed(tmp_path, torch.bfloat16, "cpu", plain)
    assert_holds(store, experts_of(find_moe_layers(expected)))
    assert_same_rest(found, expected)  # among it routing weights that stay in float32
    assert {p.dtype for layer in layers for p in layer.experts.parameters()} == {torch.bfloat16}


class Noting:
    """A shard that notes how many elements were read at once."""

    def __init__(self, shard: Any, read: list[int]) -> None:
        self._shard, self._read = shard, read

    def __enter__(self) -> Noting:
        return self

    def __exit__(self, *error: object) -> None:
        self._shard.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._shard.keys())

    def get_tensor(self, key: str) -> Tensor:
        return self._noted(self._shard.get_tensor(key))

    def get_slice(self, key: str) -> Any:
        whole = self._shard.get_slice(key)
        described = {"get_shape": lambda _: whole.get_shape(), "get_dtype": lambda _: whole.get_dtype()}
        return type("Slice", (), {**described, "__getitem__": lambda _, rows: self._noted(whole[rows])})()

    def _noted(self, value: Tensor) -> Tensor:
        self._read.append(value.numel())
        return value


@pytest.mark.parametrize(("family", "largest"), [("qwen3_moe", 48 * 32), ("gpt_oss", 2 * 48 * 32)])
def test_no_more_than_one_matrix_of_one_expert_is_read_at_once(
    family: str, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(checkpoint, "safe_open", lambda *given, **named: Noting(safe_open(*given, **named), read))
    model_of(family).save_pretrained(tmp_path)
    _, layers, store = load_streamed(tmp_path, torch.float32, "cpu", plain)
    assert max(read) == largest
    assert sum(read) == sum(layer.expert_elements * layer.experts_count for layer in layers) == store.size_bytes // 4


def test_weights_that_are_not_experts_lie_in_aligned_memory(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    model, _, _ = load_streamed(tmp_path, torch.float32, "cpu", plain)
    assert {value.data_ptr() % 64 for value in model.parameters() if not value.is_meta} == {0}


@FAMILIES
def test_taking_experts_out_of_a_model_in_memory(family: str) -> None:
    model = model_of(family)
    layers = find_moe_layers(model)
    before = experts_of(layers)
    store = take_experts(model, layers, plain)
    assert_holds(store, before)
    assert [layer.experts_count for layer in find_moe_layers(model)] == [len(b["down_proj"]) for b in before]
    assert [layer.experts.has_gate for layer in layers] == ["gate_up_proj" in b for b in before]


def test_layers_leave_the_model_one_by_one() -> None:
    model = model_of("mixtral")
    layers = find_moe_layers(model)
    weights = [weakref.ref(layer.experts.down_proj) for layer in layers]
    alive: list[int] = []

    def allocate(size_bytes: int) -> Tensor:
        alive.append(sum(weight() is not None for weight in weights))
        return plain(size_bytes)

    take_experts(model, layers, allocate)
    assert alive == [4, 3, 2, 1]
    assert [weight() for weight in weights] == [None] * 4


def test_a_model_without_its_experts_does_not_run_by_accident() -> None:
    loaded = build("mixtral")
    take_experts(loaded.model, loaded.layers, plain)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.mlp\.experts: its weights are in an expert store"):
        loaded.model(torch.tensor([[3, 4]]))


def test_what_is_left_can_be_moved() -> None:
    loaded = build("mixtral")
    take_experts(loaded.model, loaded.layers, plain)
    before = loaded.model.lm_head.weight.clone()
    move(loaded.model, "cpu")
    assert torch.equal(loaded.model.lm_head.weight, before)
    assert loaded.layers[0].down.is_meta


def llama4() -> Any:
    settings = {**COMMON, **LOCAL, "intermediate_size_mlp": 40, "head_dim": 8}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama4_text", **settings))


def test_a_family_that_cannot_be_computed_is_refused_before_anything_moves(tmp_path: Path) -> None:
    model = llama4()
    with pytest.raises(RefusedError, match="Llama4TextExperts: expected an experts module of the library's registry"):
        take_experts(model, find_moe_layers(model), never)
    assert not any(value.is_meta for value in model.parameters())
    model.save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match="Llama4TextExperts"):
        load_streamed(tmp_path, torch.float32, "cpu", never)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path, max_shard_size="40KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[3]
    lost.unlink()
    with pytest.raises(RefusedError, match=rf"{lost.name}: expected a shard .* no such file \(model.safetensors.index"):
        load_streamed(tmp_path, torch.float32, "cpu", never)


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(RefusedError, match=r"model\.safetensors: expected a whole safetensors file"):
        load_streamed(tmp_path, torch.float32, "cpu", never)


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
FUSED = "model.layers.1.mlp.experts.down_proj"
Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(("family", "change", "reason"), [
    ("qwen3_moe", lambda w: w.pop(EXPERT), r"no tensor mlp\.experts\.5\.up_proj\.weight for expert 5 of model"),
    ("qwen3_moe", lambda w: w.update({EXPERT: torch.ones(40, 32)}), rf"expected \[96, 32\].*{EXPERT} \[40, 32\]"),
    ("qwen3_moe", lambda w: w.update({EXPERT: w[EXPERT].to(torch.float8_e4m3fn)}), rf"{EXPERT} has type F8_E4M3"),
    ("qwen3_moe", lambda w: w.pop("model.norm.weight"), r"no tensor for \['model\.norm\.weight'\]"),
    ("gpt_oss", lambda w: w.pop(FUSED), rf"{FUSED}: the checkpoint has no tensor for it"),
    ("gpt_oss", lambda w: w.update({FUSED: torch.ones(8, 32, 48)}), rf"of shape \[8, 48, 32\], found {FUSED}"),
])
def test_a_tensor_that_is_missing_or_wrong_is_refused(family: str, change: Change, reason: str, tmp_path: Path) -> None:
    model_of(family).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedError, match=reason):
        load_streamed(tmp_path, torch.float32, "cpu", never)


def test_a_tensor_that_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / json.loads(index.read_text())["weight_map"][EXPERT]
    save_file({k: v for k, v in load_file(shard).items() if k != EXPERT}, shard, {"format": "pt"})
    with pytest.raises(RefusedError, match=rf"{shard.name}: expected tensor {EXPERT}"):
        load_streamed(tmp_path, torch.float32, "cpu", never)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(RefusedError, match=r"config\.json: expected plain weights, found quantization_config .*fp8"):
        load_streamed(tmp_path, torch.float32, "cpu", never)


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    with host_memory_given(1e-6), pytest.raises(RefusedError, match="short"):
        load_streamed(tmp_path, torch.float32, "cpu", never)


def test_what_is_no_mixture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"config\.json: expected a folder with a model"):
        load_streamed(tmp_path, torch.float32, "cpu", never)
    config = transformers.AutoConfig.for_model("llama", **{**COMMON, "intermediate_size": 40})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match="not a mixture of experts"):
        load_streamed(tmp_path, torch.float32, "cpu", never)


def test_the_library_is_left_as_it_was(tmp_path: Path) -> None:
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    verbosity = transformers.logging.get_verbosity()
    load_streamed(tmp_path, torch.float32, "cpu", plain)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert transformers.logging.get_verbosity() == verbosity
    tokens = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
