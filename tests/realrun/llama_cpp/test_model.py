"""Tokens through llama.cpp: the KV cache, tensors by name, and what is refused."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from realrun.errors import RefusedError
from realrun.llama_cpp.abi import llama_library
from realrun.llama_cpp.model import GraphTensor, LlamaContext, LlamaModel
from tests.kit.tiny_gguf import HIDDEN, LAYERS, TOP_K, VOCABULARY, write_tiny_gguf

pytestmark = pytest.mark.llama
TOKENS = [5, 9, 3, 40, 22, 7]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


class Recorder:
    """Keeps the values of tensors of some names."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.seen: list[tuple[str, np.ndarray]] = []

    def wants(self, name: str) -> bool:
        return name in self.names

    def take(self, tensor: GraphTensor) -> None:
        self.seen.append((tensor.name, tensor.values()))


def test_a_model_tells_its_sizes_and_splits_text(tiny: Path) -> None:
    with LlamaModel(tiny) as model:
        assert model.vocabulary == VOCABULARY
        assert (model.metadata("general.architecture"), model.metadata("no.such")) == ("qwen3moe", None)
        assert model.tokens_of("BAD").tolist() == [1, 4, 3, 6]


def test_text_needs_a_token_for_every_byte(tmp_path: Path) -> None:
    model = LlamaModel(write_tiny_gguf(tmp_path / "letters.gguf", vocabulary="letters"))
    with model, pytest.raises(RefusedError, match=r"expected a token for each of 256 bytes, found 0$"):
        model.tokens_of("A space")


def test_a_model_without_a_vocabulary_takes_ids_alone(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "ids.gguf", vocabulary="ids")
    with LlamaModel(path) as model, pytest.raises(RefusedError, match="the file has none; give prompts as token ids"):
        model.tokens_of("BAD")
    with LlamaModel(path) as model, LlamaContext(model, context=16) as context:
        context.decode(TOKENS)
        assert context.logits().shape == (VOCABULARY,)


@pytest.mark.parametrize("piece", [1, 4, 6])
def test_pieces_and_a_cache_that_is_cut_give_the_same_logits(tiny: Path, piece: int) -> None:
    with LlamaModel(tiny) as model:
        with LlamaContext(model, context=16) as whole:
            whole.decode(TOKENS)
            expected = whole.logits()
        with LlamaContext(model, context=16, piece=piece) as context:
            context.decode([*TOKENS[:4], 30, 31])
            context.keep(4)
            context.decode(TOKENS[4:])
            assert context.tokens == len(TOKENS)
            np.testing.assert_allclose(context.logits(), expected, atol=1e-4)
            context.keep(0)
            context.decode(TOKENS)
            np.testing.assert_allclose(context.logits(), expected, atol=1e-4)


def test_a_cache_of_copies_has_the_keys_and_values_of_the_same_tokens_at_their_new_positions(tiny: Path) -> None:
    """In the first layer they depend on a token and its position alone; the norm after its attention shows them."""
    recorder = Recorder("ffn_norm-0")
    with LlamaModel(tiny) as model:
        with LlamaContext(model, context=256, observer=recorder) as computed:
            computed.decode([*TOKENS, *TOKENS, *TOKENS[:2], 30])
        with LlamaContext(model, context=256, repeats=True, observer=recorder) as context:
            context.decode(TOKENS)
            context.repeat(len(TOKENS))
            context.repeat(2)
            assert context.tokens == 2 * len(TOKENS) + 2
            context.decode([30])
            (_, wanted), *_, (_, found) = recorder.seen
            np.testing.assert_allclose(found[-1], wanted[-1], atol=2e-3)  # keys of 16 bits, turned twice
            context.keep(len(TOKENS))
            context.decode([*TOKENS, *TOKENS[:2], 30])
            np.testing.assert_allclose(recorder.seen[-1][1][-1], wanted[-1], atol=1e-4)
            with pytest.raises(RefusedError, match=r"at most 256 tokens in the context, found 315"):
                context.repeat(300)


def test_copies_need_room_for_themselves_alone(tiny: Path) -> None:
    with LlamaModel(tiny) as model, LlamaContext(model, context=256, repeats=True) as context:
        context.decode(TOKENS * 25)
        context.repeat(100)
        context.decode(TOKENS)
        assert context.tokens == context.length == 256


def test_chosen_experts_are_those_of_the_largest_gate_logits(tiny: Path) -> None:
    recorder = Recorder("ffn_moe_topk-1", "ffn_moe_logits-1", "ffn_norm-1")
    with LlamaModel(tiny) as model, LlamaContext(model, context=16, observer=recorder) as context:
        context.decode(TOKENS, every_output=True)
    seen = dict(recorder.seen)
    assert seen["ffn_norm-1"].shape == (len(TOKENS), HIDDEN)
    logits = seen["ffn_moe_logits-1"]
    assert seen["ffn_moe_topk-1"].tolist() == np.argsort(-logits, axis=1)[:, :TOP_K].tolist()


@pytest.mark.parametrize(("every_output", "rows"), [(False, 1), (True, len(TOKENS))])
def test_the_last_layer_computes_what_the_output_needs(tiny: Path, every_output: bool, rows: int) -> None:
    recorder = Recorder(f"ffn_moe_topk-{LAYERS - 1}")
    with LlamaModel(tiny) as model, LlamaContext(model, context=16, observer=recorder) as context:
        context.decode(TOKENS, every_output=every_output)
    assert [values.shape for _, values in recorder.seen] == [(rows, TOP_K)]


def test_a_product_names_what_it_was_computed_from(tiny: Path) -> None:
    class Sources(Recorder):
        def take(self, tensor: GraphTensor) -> None:
            self.seen += [(tensor.source(i).name, tensor.source(i).values()) for i in (0, 1)]

    sources, inputs = Sources("ffn_moe_logits-2"), Recorder("ffn_norm-2")
    with LlamaModel(tiny) as model:
        for observer in (sources, inputs):
            with LlamaContext(model, context=16, observer=observer) as context:
                context.decode(TOKENS, every_output=True)
    (weights, _), (name, values) = sources.seen
    assert (weights, name) == ("blk.2.ffn_gate_inp.weight", "ffn_norm-2")
    np.testing.assert_array_equal(values, inputs.seen[0][1])


def test_an_error_of_the_observer_ends_the_graph_and_is_raised(tiny: Path) -> None:
    class Broken(Recorder):
        def take(self, tensor: GraphTensor) -> None:
            raise ValueError(tensor.name)

    broken = Broken("ffn_moe_topk-0")
    model = LlamaModel(tiny)
    with model, LlamaContext(model, context=16, observer=broken) as context, pytest.raises(ValueError, match="topk-0"):
        context.decode(TOKENS)


def test_what_llama_cpp_would_end_the_process_for_is_refused_before(tiny: Path) -> None:
    with LlamaModel(tiny) as model, LlamaContext(model, context=256) as context:
        with pytest.raises(RefusedError, match="expected token ids below 300, found 300"):
            context.decode([3, VOCABULARY])
        with pytest.raises(RefusedError, match="expected at most 256 tokens in the context, found 300"):
            context.decode([3] * 300)


def test_a_model_works_on_after_another_file_was_refused(tiny: Path, tmp_path: Path) -> None:
    """The refused one had taken over the log, and is gone."""
    with LlamaModel(tiny) as model:
        (bad := tmp_path / "bad.gguf").write_bytes(b"GGUF")
        with pytest.raises(RefusedError):
            LlamaModel(bad)
        gc.collect()
        with LlamaContext(model, context=16) as context:
            context.decode(TOKENS)


def test_layers_on_a_gpu_that_the_build_does_not_know_are_refused(tiny: Path) -> None:
    if llama_library().llama_supports_gpu_offload():
        pytest.skip("this build knows a GPU")
    with pytest.raises(RefusedError, match=r"expected a llama\.cpp that knows a GPU, this one computes on the CPU"):
        LlamaModel(tiny, gpu_layers=1)


@pytest.mark.parametrize("kept", [0, 100, 3000])
def test_a_file_that_cannot_be_loaded_is_refused_with_a_reason(tiny: Path, kept: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:kept])
    with pytest.raises(RefusedError, match=r"tiny\.gguf: expected a GGUF file that llama\.cpp loads: .*(fail|error)"):
        LlamaModel(tiny)
