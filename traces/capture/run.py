"""A model with recording hooks: its passes over prompts, and a first pass that determines its scoring rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from traces.capture.generate import Batch, Pass, Sampler, generate
from traces.capture.load import Loaded
from traces.capture.record import LayerRecord, RouterRecorder
from traces.capture.scores import scoring_rule
from traces.capture.settings import CaptureError, CaptureSettings


@dataclass(frozen=True)
class Probe:
    """Properties of a model found by one pass over one prompt."""

    prompt: list[int]
    top_k: int
    rule: str  # of scores.RULES
    certain: bool
    records: list[LayerRecord]


@dataclass(frozen=True)
class HookedModel:
    """A model, the settings to run it with, and the recorder on it."""

    loaded: Loaded
    settings: CaptureSettings
    recorder: RouterRecorder

    def passes(self, batch: Batch, new_tokens: int) -> Iterator[tuple[Pass, list[LayerRecord]]]:
        """Every forward pass over a batch, with the records of its routers."""
        sampler = Sampler(self.settings.seed, self.settings.temperature)
        for done in generate(self.loaded.model, batch, new_tokens, sampler):
            yield done, self.recorder.take()

    def prefill(self, prompt: list[int]) -> list[LayerRecord]:
        """The records of one pass over one prompt."""
        [(_, records)] = self.passes(Batch((0,), torch.tensor([prompt])), new_tokens=0)
        return records

    def probe(self, prompt: list[int]) -> Probe:
        """Learn k and the scoring rule from one prompt. Raises CaptureError on a model that differs by layer."""
        records = self.prefill(prompt)
        ids = [r.ids for r in records if r.ids is not None]
        widths = {i.shape[1] for i in ids}
        experts = self.loaded.layers[0].experts_count
        if len(widths) > 1 or any(int(i.max()) >= experts for i in ids):
            raise CaptureError(
                f"{self.loaded.name}: expected each token to get the same number of experts 0..{experts - 1} in every "
                f"layer, got {sorted(widths)} with ids up to {max(int(i.max()) for i in ids)}; not supported"
            )
        rule, certain = scoring_rule(records)
        return Probe(prompt, widths.pop(), rule, certain, records)
