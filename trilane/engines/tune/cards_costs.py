"""Parts of the times of a step and of a prompt on several cards, for many splits of a model at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sim.costs.engine import FittedEngine
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_speed import Floats, StaticSplit, middles, prompt_on_cards, step_on_cards
from trilane.engines.tensor_split import Divided


def step_parts(speed: EngineSpeed, threads: int) -> Floats:
    """The parts of a token's time, in the mean over the answer: a row for each part, with each of the splits."""
    asked, batch = (speed.shape, speed.hardware, speed.engine), speed.question.batch
    weights = middles(speed.shape, speed.decode_lengths)
    steps = [
        _parts(lambda one: step_on_cards(*asked, replace(one, threads=threads), tokens, batch), speed.splitter.splits)  # noqa: B023
        for tokens in weights
    ]
    return np.average(steps, axis=0, weights=[*weights.values()])


def prompt_parts(speed: EngineSpeed, engine: FittedEngine, threads: int) -> Floats:
    """The parts of a prompt's time likewise, with an engine that may read its file in another way."""
    asked, tokens = (speed.shape, speed.hardware, engine), speed.question.prompt_tokens
    return _parts(lambda one: prompt_on_cards(*asked, replace(one, threads=threads), tokens), speed.splitter.splits)


def _parts(costs: Callable[[StaticSplit], Divided], splits: Sequence[StaticSplit]) -> Floats:
    """Rows for each part. ``costs``: those of any split of a mode, which its others share."""
    of_mode = {mode: costs(one) for mode, one in {split.mode: split for split in splits}.items()}
    return np.array([of_mode[split.mode].parts(split.cpu_layers, split.by_card or ()) for split in splits]).T
