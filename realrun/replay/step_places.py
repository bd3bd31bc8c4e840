"""The places of the tokens of one replayed step: rows of the KV cache, positions, and attention masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from realrun.errors import RefusedError
from realrun.machine.cuda_memory import upload


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
