"""The replay model: attention as one would write it by hand, a cache that lasts, the weights that a shape asks for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from realrun.errors import RefusedError
from realrun.replay.attention import AttentionPart
from realrun.replay.model import ReplayModel
from sim.costs.roofline_costs import _estimator_params
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape

GROUPED = ModelShape(
    "grouped", moe_layers=2, dense_layers=1, experts=6, top_k=2, hidden=24, expert_width=16, shared_experts=1,
    shared_width=20, dense_width=28, heads=4, kv_heads=2, head_dim=8, kv_width=32, attention_params=24 * 8 * 12,
    vocab=50,
)
# 24 x 20 for the latent, 2 x 4 x (24 + 20) for each element of a width of 8, and 48 left over.
LATENT = replace(GROUPED, name="latent", kv_heads=4, head_dim=24, kv_width=20, attention_params=480 + 8 * 352 + 53)
BOTH = pytest.mark.parametrize("shape", [GROUPED, LATENT], ids=lambda shape: shape.name)
STEPS = {  # new tokens and earlier context of every sequence, step by step
    "one prefill": [((5, 5), (0, 0))],
    "prompts of unequal length": [((5, 2, 1), (0, 0, 0))],
    "prefill in chunks": [((3, 3), (0, 0)), ((4, 4), (3, 3))],
    "unequal chunks": [((3, 1), (0, 0)), ((2, 5), (3, 1))],
    "chunks of equal length behind unequal contexts": [((3, 1), (0, 0)), ((4, 4), (3, 1))],
    "decode": [((4, 4), (0, 0)), ((1, 1), (4, 4)), ((1, 1), (5, 5))],
    "decode behind unequal contexts": [((6, 2), (0, 0)), ((1, 1), (6, 2)), ((1, 1), (7, 3))],
    "fewer sequences than the batch": [((4, 4, 4), (0, 0, 0)), ((1, 1), (4, 4))],
}
Step = tuple[tuple[int, ...], tuple[int, ...]]


def model_of(shape: ModelShape, dtype: torch.dtype = torch.float64, **options: object) -> ReplayModel:
    return ReplayModel(shape, device="cpu", dtype=dtype, **{"batch": 3, "context": 12, **options})


def histories(sequences: int, hidden: int, seed: int = 1) -> Tensor:
    """Hidden states with which every token of every sequence enters a layer."""
    return torch.randn(sequences, 12, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(inputs: Tensor, step: Step) -> Tensor:
    """The step's tokens [T, H], sequence by sequence."""
    return torch.cat([inputs[i, before : before + new] for i, (new, before) in enumerate(zip(*step, strict=True))])


def residuals(model: ReplayModel, inputs: Tensor, steps: list[Step], layer: int = 1) -> Tensor:
    """The attention's result in the last of ``steps``."""
    for step in steps:
        model.begin_step(*step)
        result, _ = model.attention(layer, rows_of(inputs, step))
    return result


def normed(hidden: Tensor) -> Tensor:
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(vector: Tensor, position: int) -> Tensor:
    """Element i and i + half are one complex number, turned by position / 10000^(i / half)."""
    half = len(vector) // 2
    angles = [position / 10000 ** (i / half) for i in range(half)]
    points = torch.complex(vector[:half], vector[half:]) * torch.polar(
        torch.ones(half, dtype=vector.dtype), torch.tensor(angles, dtype=vector.dtype)
    )
    return torch.cat((points.real, points.imag))


def by_hand(keys: list[Tensor], values: list[Tensor], query: Tensor) -> Tensor:
    weights = [math.exp(float(query @ key) / math.sqrt(len(query))) for key in keys]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def grouped_by_hand(part: AttentionPart, shape: ModelShape, sequence: Tensor) -> Tensor:
    """The residual of the last token of ``sequence`` [n, H], head by head."""
    count, width = shape.heads + 2 * shape.kv_heads, shape.head_dim
    vectors = [(part.mix.enter @ normed(hidden)).reshape(count, width) for hidden in sequence]
    heads = []
    for head in range(shape.heads):
        key = shape.heads + head // (shape.heads // shape.kv_heads)
        keys = [turned(vector[key], position) for position, vector in enumerate(vectors)]
        values = [vector[key + shape.kv_heads] for vector in vectors]
        heads.append(by_hand(keys, values, turned(vectors[-1][head], len(vectors) - 1)))
    return sequence[-1] + part.mix.leave @ torch.cat(heads)


def latent_by_hand(part: AttentionPart, shape: ModelShape, sequence: Tensor) -> Tensor:
    """The residual of the last token of ``sequence`` [n, H], head by head."""
    vectors = [part.mix.enter @ normed(hidden) for hidden in sequence]
    cache = [turned(vector[-shape.kv_width :], position) for position, vector in enumerate(vectors)]
    queries = vectors[-1][: -shape.kv_width].reshape(shape.heads, -1)
    heads = []
    for query, lift, drop in zip(queries, part.mix.lift, part.mix.drop, strict=True):
        heads.append(by_hand(cache, cache, turned(query @ lift, len(vectors) - 1)) @ drop)
    return sequence[-1] + part.mix.leave @ torch.cat(heads)


BY_HAND = {"grouped": grouped_by_hand, "latent": latent_by_hand}


class TestAttention:
    @BOTH
    @pytest.mark.parametrize("name", STEPS)
    def test_is_what_one_computes_head_by_head(self, shape: ModelShape, name: str) -> None:
        model, inputs, steps = model_of(shape), histories(3, shape.hidden), STEPS[name]
        part = model._attention[shape.dense_layers + 1]
        expected = [
            BY_HAND[shape.name](part, shape, inputs[i, : before + n + 1])
            for i, (new, before) in enumerate(zip(*steps[-1], strict=True))
            for n in range(new)
        ]
        torch.testing.assert_close(residuals(model, inputs, steps), torch.stack(expected), rtol=0, atol=1e-6)

    @BOTH
    def test_prefill_and_decode_give_what_one_longer_prefill_gives(self, shape: ModelShape) -> None:
        inputs = histories(2, shape.hidden)
        steps = [((7, 7), (0, 0)), ((1, 1), (7, 7)), ((1, 1), (8, 8))]
        at_once = residuals(model_of(shape), inputs, [((9, 9), (0, 0))]).view(2, 9, -1)[:, -1]
        torch.testing.assert_close(residuals(model_of(shape), inputs, steps), at_once)

    @BOTH
    def test_layers_have_weights_and_caches_of_their_own(self, shape: ModelShape) -> None:
        inputs, steps = histories(2, shape.hidden), STEPS["decode"]
        model = model_of(shape)
        alone = residuals(model, inputs, steps, layer=1)
        assert not torch.allclose(alone, residuals(model, inputs, steps, layer=0))
        model.attention(0, rows_of(2 * inputs, steps[-1]))
        torch.testing.assert_close(model.attention(1, rows_of(inputs, steps[-1]))[0], alone)

    def test_returns_the_normed_residual_beside_it(self) -> None:
        model = model_of(GROUPED)
        model.begin_step((3, 2), (0, 0))
        residual, after = model.attention(0, histories(1, 24)[0, :5])
        torch.testing.assert_close(after, normed(residual))

    def test_a_context_that_was_never_computed_can_be_attended_to(self) -> None:
        model = model_of(LATENT, dtype=torch.bfloat16)
        model.begin_step((1, 1, 1), (11, 4, 0))
        assert all(part.isfinite().all() for part in model.attention(0, model.embed()))


def bytes_of(model: ReplayModel) -> int:
    """Bytes of all tensors that a model holds for longer than a step; views of others are not counted."""
    found: dict[int, int] = {}

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for each in value:
                look(each)
        elif isinstance(value, torch.nn.Module):
            look(list(value.state_dict().values()))
        elif type(value).__module__.startswith("realrun.replay"):
            look(list(vars(value).values()))

    look([value for name, value in vars(model).items() if name not in ("_places", "_turn")])
    return sum(found.values())


class TestWeights:
    @BOTH
    def test_attention_has_the_weights_of_the_shape(self, shape: ModelShape) -> None:
        assert model_of(shape)._attention[0].params == shape.attention_params

    def test_what_the_projections_leave_over_is_one_more_matrix(self) -> None:
        more = replace(GROUPED, attention_params=GROUPED.attention_params + 2 * 24 + 5)
        part = model_of(more)._attention[0]
        assert (part.params, tuple(part.spare.shape)) == (more.attention_params, (2, 24))

    def test_without_a_count_q_k_v_and_o_have_what_their_widths_say(self) -> None:
        assert model_of(replace(GROUPED, attention_params=0))._attention[0].params == GROUPED.attention_params

    @pytest.mark.parametrize(("name", "cache_elements"), [
        ("mixtral-8x7b", 2048), ("phi-3.5-moe", 2048), ("qwen3-30b-a3b", 1024), ("deepseek-v2-lite", 576),
        ("glm-4.7-flash", 576), ("gemma-4-26b-a4b", 4096), ("gpt-oss-20b", 1024),
    ])
    def test_catalogue_models_have_their_sizes(self, name: str, cache_elements: int) -> None:
        shape = load_model(name)
        build = {"device": "meta", "dtype": torch.bfloat16, "batch": 1}
        model, longer = ReplayModel(shape, context=64, **build), ReplayModel(shape, context=65, **build)
        width = model._attention[0].turning_width
        assert model._attention[0].params == shape.attention_params
        assert bytes_of(longer) - bytes_of(model) == 2 * (
            shape.layers * cache_elements + 2 * width
        )  # cos and sin for all layers
        norms = (2 * shape.layers + 1) * shape.hidden
        elements = shape.non_expert_params + norms + 64 * (shape.layers * cache_elements + 2 * width)
        assert bytes_of(model) == pytest.approx(2 * elements, abs=shape.layers)  # a mean of layers is rounded

    def test_a_model_cut_to_one_layer_runs(self) -> None:
        shape = replace(load_model("deepseek-v2-lite:1"), vocab=64)
        model = ReplayModel(shape, device="cpu", dtype=torch.bfloat16, batch=2, context=4)
        model.begin_step((3, 3), (0, 0))
        _, after = model.attention(0, model.dense(model.embed()))
        assert model.speculate(0, after)[0].shape == (6, shape.top_k)

    def test_the_same_seed_gives_the_same_weights(self) -> None:
        first, same, other = (model_of(GROUPED, seed=seed).embed() for seed in (3, 3, 4))
        assert torch.equal(first, same)
        assert not torch.equal(first, other)

    def test_tied_embeddings_are_held_once(self) -> None:
        tied = model_of(replace(GROUPED, tied_embeddings=True))
        assert bytes_of(model_of(GROUPED)) - bytes_of(tied) == 50 * 24 * 8

    def test_the_estimator_has_the_weights_that_the_simulator_counts(self) -> None:
        width = round(0.65 * 24)
        small = 4 * width  # bias, norm, and one position
        more = bytes_of(model_of(GROUPED, estimator=True)) - bytes_of(model_of(GROUPED))
        assert more == 8 * (_estimator_params(GROUPED) + small)


class TestStep:
    @BOTH
    def test_hidden_states_stay_finite_over_a_long_generation(self, shape: ModelShape) -> None:
        deep = replace(shape, moe_layers=8)
        model = model_of(deep, dtype=torch.bfloat16, batch=2, context=72, estimator=True)
        for step in [((8, 8), (0, 0)), *(((1, 1), (8 + n, 8 + n)) for n in range(64))]:
            model.begin_step(*step)
            hidden = model.dense(model.embed())
            for layer in range(8):
                residual, after = model.attention(layer, hidden)
                parts = after.repeat_interleave(2, 0).float()
                hidden = model.combine(parts, 2, model.shared(layer, after), residual)
            assert hidden.isfinite().all()
        assert hidden.dtype == torch.bfloat16

    def test_the_head_gives_one_token_for_the_last_row_of_each_sequence(self) -> None:
        model = model_of(GROUPED)
        model.begin_step((2, 3), (0, 0))
        hidden = histories(1, 24)[0, :5]
        expected = (normed(hidden[[1, 4]]) @ model._head.T).argmax(-1)
        assert model.head(hidden).tolist() == expected.tolist()

    def test_dense_layers_are_attention_and_feed_forward_part(self) -> None:
        model, shape = model_of(GROUPED), replace(GROUPED, dense_layers=0)
        model.begin_step((4,), (0,))
        hidden = model.embed()
        residual, after = model.attention(-1, hidden)  # the dense layer stands before the MoE layers
        torch.testing.assert_close(model.dense(hidden), residual + model.dense_ffn(after))
        assert torch.equal(model_of(shape).dense(hidden), hidden)
        with pytest.raises(RefusedError, match="expected a dense layer"):
            model_of(shape).dense_ffn(hidden)

    @pytest.mark.parametrize("sums_to_1", [True, False])
    def test_the_gate_chooses_the_most_probable_experts(self, sums_to_1: bool) -> None:
        model, states = model_of(replace(GROUPED, norm_topk=sums_to_1)), histories(1, 24)[0, :5]
        ids, weights = model.gate(0, states)
        probabilities = (states @ model._gates[0].T).softmax(-1)
        best, expected = probabilities.topk(2)
        assert torch.equal(ids, expected)
        torch.testing.assert_close(weights, (best / best.sum(-1, keepdim=True) if sums_to_1 else best).float())

    def test_speculation_asks_the_gate_of_the_next_layer(self) -> None:
        model, states = model_of(GROUPED), histories(1, 24)[0, :5]
        assert torch.equal(model.speculate(0, states)[1], model.gate(1, states)[1])
        assert torch.equal(model.speculate(1, states)[1], model.gate(0, states)[1])

    def test_the_estimator_names_experts_if_there_is_one(self) -> None:
        states = histories(1, 24)[0, :5]
        ids = model_of(GROUPED, estimator=True).estimate(0, states)
        assert ids.shape == (5, 2)
        assert ((ids >= 0) & (ids < 6)).all()
        with pytest.raises(RefusedError, match="estimator=True"):
            model_of(GROUPED).estimate(0, states)

    def test_combination_adds_parts_shared_experts_and_residual(self) -> None:
        model, parts = model_of(GROUPED), torch.arange(12.0).view(6, 2)
        residual, shared = torch.full((3, 2), 100.0), torch.full((3, 2), 1000.0)
        assert model.combine(parts, 2, None, residual).tolist() == [[102, 104], [110, 112], [118, 120]]
        assert model.combine(parts, 2, shared, residual).tolist() == [[1102, 1104], [1110, 1112], [1118, 1120]]

    def test_shared_experts_are_none_where_the_model_has_none(self) -> None:
        states = histories(1, 24)[0, :5]
        assert model_of(GROUPED).shared(0, states).shape == (5, 24)
        assert model_of(replace(GROUPED, shared_width=0)).shared(0, states) is None


class TestRefusals:
    @pytest.mark.parametrize(("step", "message"), [
        (((6,), (7,)), "at most 12 tokens in all, got 6 after 7"),
        (((0,), (7,)), "expected >= 1 new token"),
        (((1,) * 4, (0,) * 4), "1 to 3 sequences, got 4 and 4"),
        (((1, 1), (0,)), "1 to 3 sequences, got 2 and 1"),
    ])
    def test_a_step_that_does_not_fit(self, step: Step, message: str) -> None:
        with pytest.raises(RefusedError, match=message):
            model_of(GROUPED).begin_step(*step)

    def test_a_shape_whose_attention_is_neither_kind(self) -> None:
        with pytest.raises(RefusedError, match="give at least 832, or 0"):
            model_of(replace(LATENT, attention_params=831))

    def test_heads_that_cannot_share_keys(self) -> None:
        with pytest.raises(RefusedError, match="multiple of kv_heads, got 4 and 3"):
            model_of(replace(GROUPED, kv_heads=3, attention_params=0))

    def test_no_room_at_all(self) -> None:
        with pytest.raises(RefusedError, match="batch and context >= 1, got 0 and 12"):
            model_of(GROUPED, batch=0)
