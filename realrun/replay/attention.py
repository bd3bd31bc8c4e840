"""Attention with random weights over a real KV cache: with grouped queries, or one latent for all heads (DeepSeek).

The places of a step's tokens (rows of the KV cache, positions, masks) are the same for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from realrun.errors import RefusedError
from realrun.machine.cuda_memory import upload
from traces.models.shape import ModelShape


@dataclass(frozen=True)
class Block:
    """Sequences that attend in one call: all of them if each has the same number of new tokens, otherwise a single one.
    """

    rows: slice  # their tokens, sequence by sequence
    sequences: slice  # in the cache
    new: int  # tokens of each
    keys: int  # of the sequence with the longest context
    causal: bool  # without earlier context: token i attends to 0..i
    mask: Tensor | None  # otherwise: bool [sequences, 1, sharing x new, keys]; None if all attend to all keys


@dataclass(frozen=True)
class StepPlaces:
    """The T tokens of a step: ``positions`` [T] and ``cells`` [T], their rows in a cache of batch x context rows."""

    positions: Tensor
    cells: Tensor
    blocks: tuple[Block, ...]
    last_rows: tuple[int, ...]  # the last token of each sequence


def places_of(
    tokens: Sequence[int], earlier: Sequence[int], sharing: int, batch: int, context: int, device: torch.device,
    least_keys: int = 0,
) -> StepPlaces:
    """The step of ``tokens[i]`` new tokens of sequence i after ``earlier[i]`` others. Never waits for the device.

    ``sharing`` query heads use one key; they follow one another in a block's mask. ``least_keys``: the least number of
    keys in a decode step that is recorded, which always has a mask. Raises RefusedError if a cache for ``batch``
    sequences of ``context`` tokens cannot hold the step.
    """
    _check(tokens, earlier, batch, context)
    steps = [torch.arange(start, start + new) for start, new in zip(earlier, tokens, strict=True)]
    cells = [sequence * context + step for sequence, step in enumerate(steps)]
    positions, rows = upload(torch.stack([torch.cat(steps), torch.cat(cells)]), device).unbind()
    ends = tuple(accumulate(tokens))
    if len(set(tokens)) == 1:
        blocks = [_block(slice(0, ends[-1]), slice(0, len(tokens)), tokens[0], earlier, sharing, positions, least_keys)]
    else:
        blocks = [
            _block(slice(end - new, end), slice(i, i + 1), new, (earlier[i],), sharing, positions)
            for i, (new, end) in enumerate(zip(tokens, ends, strict=True))
        ]
    return StepPlaces(positions, rows, tuple(blocks), tuple(end - 1 for end in ends))


def _block(
    rows: slice, sequences: slice, new: int, earlier: Sequence[int], sharing: int, positions: Tensor,
    least_keys: int = 0,
) -> Block:
    keys = max(max(earlier) + new, least_keys)
    causal = new > 1 and keys == new
    if causal or (new == 1 and len(set(earlier)) == 1 and not least_keys):
        return Block(rows, sequences, new, keys, causal, None)
    seen = torch.arange(keys, device=positions.device) <= positions[rows].view(-1, 1, new, 1)
    return Block(rows, sequences, new, keys, False, seen.repeat(1, 1, sharing, 1))


def _check(tokens: Sequence[int], earlier: Sequence[int], batch: int, context: int) -> None:
    if not 1 <= len(tokens) == len(earlier) <= batch:
        raise RefusedError(
            f"replayed step: expected new tokens and earlier context of 1 to {batch} sequences, "
            f"got {len(tokens)} and {len(earlier)}"
        )
    for sequence, (new, before) in enumerate(zip(tokens, earlier, strict=True)):
        if new < 1 or before < 0 or before + new > context:
            raise RefusedError(
                f"replayed step, sequence {sequence}: expected >= 1 new token and at most {context} tokens in all, "
                f"got {new} after {before}; build the model with a larger context"
            )


ROTARY_BASE = 10000.0


class RandomWeights:
    """Creates the tensors of a model on one device, the same for the same seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        generator_device = "cpu" if device.type == "meta" else device
        self._generator = torch.Generator(device=generator_device).manual_seed(seed)

    def matrix(self, *sizes: int) -> Tensor:
        """Normal weights [..., out, in], which preserve the magnitude of their input."""
        empty = torch.empty(sizes, device=self.device, dtype=self.dtype)
        return empty.normal_(0.0, max(sizes[-1], 1) ** -0.5, generator=self._generator)

    def ones(self, width: int) -> Tensor:
        """The weights of a norm."""
        return torch.ones(width, device=self.device, dtype=self.dtype)


class Rotary:
    """Rotates vectors by their positions; vectors of odd width, which no model has, stay as they are."""

    def __init__(self, width: int, context: int, weights: RandomWeights) -> None:
        self._half = half = width // 2 if width % 2 == 0 else 0
        rates = ROTARY_BASE ** -(torch.arange(half, device=weights.device) / max(half, 1))
        angles = torch.outer(torch.arange(context, device=weights.device), rates)
        still = torch.zeros(context, width - 2 * half, device=weights.device)
        self._cos = torch.cat((angles, angles, still), 1).cos().to(weights.dtype)
        self._sin = torch.cat((-angles, angles, still), 1).sin().to(weights.dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, width] of a step, for ``turned``."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def turned(self, vectors: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """``vectors`` [T, heads, width], rotated; three kernels."""
        cos, sin = at
        return torch.addcmul(vectors * cos, vectors.roll(self._half, -1), sin)


class KeyValueCache:
    """One layer's keys, or values, of all sequences: [batch x context, heads, width]; random at first."""

    def __init__(self, batch: int, context: int, heads: int, width: int, weights: RandomWeights) -> None:
        self._cells = weights.matrix(batch * context, heads, width)
        self._by_sequence = self._cells.view(batch, context, heads, width)

    def write(self, new: Tensor, places: StepPlaces) -> None:
        """Store ``new`` [T, heads, width]."""
        self._cells.index_copy_(0, places.cells, new)

    def read(self, block: Block) -> Tensor:
        """A view [sequences, heads, keys, width]."""
        return self._by_sequence[block.sequences, : block.keys].transpose(1, 2)


class GroupedAttention:
    """Attention in which queries of several heads share a key and a value; q, k and v are one product."""

    def __init__(self, shape: ModelShape, batch: int, context: int, weights: RandomWeights) -> None:
        if shape.heads % shape.kv_heads:
            raise RefusedError(
                f"replay of {shape.name}: expected heads to be a multiple of kv_heads, "
                f"got {shape.heads} and {shape.kv_heads}"
            )
        self._heads, self._kv_heads, self._width = shape.heads, shape.kv_heads, shape.head_dim
        self.enter = weights.matrix((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden)
        self.leave = weights.matrix(shape.hidden, shape.heads * shape.head_dim)
        self.keys = KeyValueCache(batch, context, shape.kv_heads, shape.head_dim, weights)
        self.values = KeyValueCache(batch, context, shape.kv_heads, shape.head_dim, weights)
        self.turning_width, self.sharing = shape.head_dim, shape.heads // shape.kv_heads
        self.params = self.enter.numel() + self.leave.numel()

    def __call__(self, normed: Tensor, places: StepPlaces, rotary: Rotary, at: tuple[Tensor, Tensor]) -> Tensor:
        """Apply it: [T, H] -> [T, H]."""
        projected = functional.linear(normed, self.enter).view(len(normed), -1, self._width)
        turning, values = torch.split(projected, [self._heads + self._kv_heads, self._kv_heads], 1)
        queries, keys = torch.split(rotary.turned(turning, at), [self._heads, self._kv_heads], 1)
        self.keys.write(keys, places)
        self.values.write(values, places)
        return functional.linear(attended(queries, self.keys, self.values, places), self.leave)


class LatentAttention:
    """Attention in which one vector of ``kv_width`` per token is key and value of all heads: queries are lifted to it.

    This is the absorbed form of DeepSeek's attention. A shape does not contain the widths of queries and values, so
    both are the largest that ``attention_params`` allows, in multiples of 8.
    """

    def __init__(self, shape: ModelShape, batch: int, context: int, weights: RandomWeights) -> None:
        self._heads, self._latent = shape.heads, shape.kv_width
        self._width = _width_within(shape)
        self.enter = weights.matrix(shape.heads * self._width + shape.kv_width, shape.hidden)
        self.lift = weights.matrix(shape.heads, self._width, shape.kv_width)
        self.drop = weights.matrix(shape.heads, shape.kv_width, self._width)
        self.leave = weights.matrix(shape.hidden, shape.heads * self._width)
        self.cache = KeyValueCache(batch, context, 1, shape.kv_width, weights)
        self.turning_width, self.sharing = shape.kv_width, shape.heads
        self.params = sum(w.numel() for w in (self.enter, self.lift, self.drop, self.leave))

    def __call__(self, normed: Tensor, places: StepPlaces, rotary: Rotary, at: tuple[Tensor, Tensor]) -> Tensor:
        """Apply it: [T, H] -> [T, H]."""
        tokens, narrow = len(normed), self._heads * self._width
        queries, latent = torch.split(functional.linear(normed, self.enter), [narrow, self._latent], 1)
        lifted = torch.bmm(queries.view(tokens, self._heads, self._width).transpose(0, 1), self.lift)
        self.cache.write(rotary.turned(latent.unsqueeze(1), at), places)
        mixed = attended(rotary.turned(lifted.transpose(0, 1), at), self.cache, self.cache, places)
        dropped = torch.bmm(mixed.view(tokens, self._heads, self._latent).transpose(0, 1), self.drop)
        return functional.linear(dropped.transpose(0, 1).reshape(tokens, narrow), self.leave)


class AttentionPart:
    """The part of a layer before its feed-forward part: norm, attention, residual, second norm.

    It has 11 kernels, 16 with a latent. The projections have ``attention_params`` weights in all, if that is > 0: those
    that q, k, v and o leave over form one more matrix on the normed hidden states, whose product is discarded (an
    incomplete last row is not read). A shape with too few weights for q, k, v and o has latent attention. Windows are
    not modelled: every layer attends to the whole context.
    """

    def __init__(self, shape: ModelShape, batch: int, context: int, weights: RandomWeights) -> None:
        kind = LatentAttention if 0 < shape.attention_params < _grouped_params(shape) else GroupedAttention
        self.mix = kind(shape, batch, context, weights)
        left_over = max(shape.attention_params - self.mix.params, 0)
        spare, rows = weights.matrix(left_over), left_over // shape.hidden
        self.spare = spare[: rows * shape.hidden].view(rows, shape.hidden)
        self.norm, self.second_norm = weights.ones(shape.hidden), weights.ones(shape.hidden)
        self.params = self.mix.params + left_over
        self.turning_width, self.sharing = self.mix.turning_width, self.mix.sharing

    def __call__(
        self, hidden: Tensor, places: StepPlaces, rotary: Rotary, at: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Apply it to hidden states [T, H]: (residual, normed), both [T, H]."""
        normed = normalised(hidden, self.norm)
        if len(self.spare):
            functional.linear(normed, self.spare)
        residual = hidden + self.mix(normed, places, rotary, at)
        return residual, normalised(residual, self.second_norm)


def normalised(hidden: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension."""
    return functional.rms_norm(hidden, weight.shape, weight, 1e-6)


def attended(queries: Tensor, keys: KeyValueCache, values: KeyValueCache, places: StepPlaces) -> Tensor:
    """Attention of ``queries`` [T, heads, width] over the caches, [T, heads x width]."""
    parts = [_attended(queries[b.rows], keys.read(b), values.read(b), b) for b in places.blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attended(queries: Tensor, keys: Tensor, values: Tensor, block: Block) -> Tensor:
    """Attention in one block. Unless it starts from nothing, heads that share a key are further queries of it, so that
    the key is read once."""
    sequences, kv_heads, _, width = keys.shape
    if block.causal:
        by_head = queries.view(sequences, block.new, -1, width).transpose(1, 2)
        return _from_nothing(by_head, keys, values).transpose(1, 2).reshape(len(queries), -1)
    grouped = queries.view(sequences, block.new, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, attn_mask=block.mask)
    return mixed.view_as(grouped).permute(0, 3, 1, 2, 4).reshape(len(queries), -1)


def _from_nothing(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of [sequences, heads, tokens, width]; a single key is expanded to all heads, as a view."""
    if keys.shape[1] == 1:
        keys, values = keys.expand(-1, queries.shape[1], -1, -1), values.expand(-1, queries.shape[1], -1, -1)
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=keys.shape[1] != queries.shape[1]
    )


def attention_params_of(shape: ModelShape) -> int:
    """The number of weights in one layer's projections."""
    return shape.attention_params or _grouped_params(shape)


def _grouped_params(shape: ModelShape) -> int:
    """The number of weights of q, k, v and o if every key-value head has its own key and value."""
    return 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.hidden


def _width_within(shape: ModelShape) -> int:
    """The width of queries and values for which all projections fit into ``attention_params``."""
    a_width = 2 * shape.heads * (shape.hidden + shape.kv_width)  # weights for each element of the width
    width = (shape.attention_params - shape.hidden * shape.kv_width) // a_width
    if shape.kv_width < 1 or width < 1:
        raise RefusedError(
            f"replay of {shape.name}: its {shape.attention_params} attention_params are neither enough for "
            f"{_grouped_params(shape)} weights of q, k, v and o, nor for a latent of kv_width {shape.kv_width} and "
            f"{shape.heads} heads; give at least {shape.hidden * shape.kv_width + a_width}, or 0 for q, k, v and o"
        )
    return width if width < 8 else width - width % 8
