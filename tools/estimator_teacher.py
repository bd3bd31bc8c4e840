"""What an estimator is trained with: its settings, and the frozen model that teaches it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.mini_data import Corpus
from traces.capture.forecasts import quasi_hidden
from traces.capture.passes import Batch, HookedModel, Probe
from traces.capture.record import LayerRecord, probabilities
from traces.capture.residual_stream import ResidualStream
from traces.capture.settings import CaptureError
from traces.capture.vectors import Vectors


@dataclass(frozen=True)
class Settings:
    """How an estimator is trained."""

    tokens: int = 300_000
    width: int = 96
    mlp: int = 384
    seed: int = 17
    peak_lr: float = 1e-3
    batch: int = 4  # windows
    length: int = 128  # tokens of a window
    calibration_tokens: int = 40_000  # for residual and default vectors
    held_out_windows: int = 8  # of each domain

    def __post_init__(self) -> None:
        """Raises CaptureError naming a setting that cannot be."""
        for name in ("width", "mlp", "batch"):
            if getattr(self, name) < 1:
                raise CaptureError(f"{name} must be >= 1, got {getattr(self, name)}")
        step = self.batch * self.length
        if self.calibration_tokens < step:
            raise CaptureError(
                f"batch: expected at most {self.calibration_tokens // self.length} windows of {self.length} tokens, as "
                f"vectors are taken over {self.calibration_tokens} tokens, got {self.batch}"
            )
        if self.tokens and self.tokens < step:
            raise CaptureError(
                f"tokens: expected 0 (no estimator) or at least one batch of {self.batch} x {self.length} = {step} "
                f"tokens, got {self.tokens}"
            )

    @property
    def calibration_steps(self) -> int:
        """Batches from which vectors are taken."""
        return self.calibration_tokens // (self.batch * self.length)

    @property
    def steps(self) -> int:
        """Optimizer steps, one a batch."""
        return self.tokens // (self.batch * self.length)

    def calibration_batch(self, corpus: Corpus, step: int) -> Tensor:
        """Windows [B, S] that vectors are taken from."""
        return corpus.batch(self.seed + 1, step, self.batch, self.length)

    def training_batch(self, corpus: Corpus, step: int) -> Tensor:
        """Windows [B, S] that the estimator learns from."""
        return corpus.batch(self.seed, step, self.batch, self.length)


class Teacher:
    """The frozen model: what its layers' gates will see is guessed, what its routers then say is taught."""

    def __init__(self, run: HookedModel, stream: ResidualStream | None, probe: Probe) -> None:
        self.run, self.stream, self.probe = run, stream, probe

    def read(self, tokens: Tensor) -> list[LayerRecord]:
        """One pass over windows [B, S]."""
        [(_, records)] = self.run.passes(Batch(tuple(range(len(tokens))), tokens), new_tokens=0)
        return records

    def lesson(self, records: list[LayerRecord], default: Tensor) -> tuple[Tensor, Tensor]:
        """Of the pass just read: quasi-hidden states [L-1, N, H] and the next routers' probabilities [L-1, N, E]."""
        scores = torch.stack([probabilities(record.logits, self.probe.rule) for record in records[1:]])
        return self.quasi_hidden(records, default).float(), scores / scores.sum(-1, keepdim=True)

    def guesses(self, records: list[LayerRecord], vectors: Vectors) -> dict[str, Tensor]:
        """Of the pass just read, by forecast: guesses [L-1, N, H] at what the next gates will see."""
        seen = torch.stack([record.gate_input for record in records[:-1]])
        residual = torch.from_numpy(vectors.residual).to(seen).unsqueeze(1)
        guesses = {"gate@1": seen, "residual@1": seen + residual}
        if vectors.default is None:
            return guesses
        return {**guesses, "quasi_hidden@1": self.quasi_hidden(records, torch.from_numpy(vectors.default))}

    def quasi_hidden(self, records: list[LayerRecord], default: Tensor) -> Tensor:
        """Of the pass just read: quasi-hidden states [L-1, N, H]."""
        assert self.stream is not None
        return torch.stack([quasi_hidden(self.stream, default, at) for at in range(len(records) - 1)])
