"""Train the estimator of a model's next router on text, and write it with the vectors that its forecasts need.

``python -m tools.train_estimator --model DIR --corpus FOLDER -o FILE [--tokens N --width H --mlp M --seed S]``, where
FOLDER holds ``<domain>.train.txt`` and ``<domain>.eval.txt``. The distillation is that of Speculating Experts (Est-PF):
the model is frozen and reads text; AdamW with a cosine minimises KL(router's probabilities || estimator's). With
``--tokens 0`` the file has no estimator, only vectors: mean residuals (which ``dali`` needs) of every model, default
vectors of those with the usual residual stream.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.mini_data import Corpus, CorpusError, domains_of, load_corpus
from traces.capture.forecasts import CalibrationSums, quasi_hidden, stream_if_any
from traces.capture.layers import MoeLayer
from traces.capture.load import Loaded, load
from traces.capture.passes import Batch, HookedModel, Probe
from traces.capture.prompts import sketch
from traces.capture.record import LayerRecord, RouterRecorder, probabilities
from traces.capture.residual_stream import ResidualStream
from traces.capture.router_forecast import Estimator, check_forecastable, run_router
from traces.capture.settings import CaptureError, CaptureSettings, check_model
from traces.capture.vectors import Vectors, write_vectors
from trilane.common.files import check_folder_of

TRAINED_ON = 0.8  # of each training text, from its start; the rest is left to calibration traces


@dataclass(frozen=True)
class Settings:
    """Settings of an estimator's training."""

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
        """Raise CaptureError naming a setting that cannot be."""
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
    """The frozen model: guesses at its gates' inputs, and its routers' probabilities to be learnt."""

    def __init__(self, run: HookedModel, stream: ResidualStream | None, probe: Probe) -> None:
        self.run, self.stream, self.probe = run, stream, probe

    def read(self, tokens: Tensor) -> list[LayerRecord]:
        """Run one pass over windows [B, S]."""
        [(_, records)] = self.run.passes(Batch(tuple(range(len(tokens))), tokens), new_tokens=0)
        return records

    def lesson(self, records: list[LayerRecord], default: Tensor) -> tuple[Tensor, Tensor]:
        """Quasi-hidden states [L-1, N, H] of the pass just read, and the next routers' probabilities [L-1, N, E]."""
        scores = torch.stack([probabilities(record.logits, self.probe.rule) for record in records[1:]])
        return self.quasi_hidden(records, default).float(), scores / scores.sum(-1, keepdim=True)

    def guesses(self, records: list[LayerRecord], vectors: Vectors) -> dict[str, Tensor]:
        """Guesses [L-1, N, H] at the next gates' inputs in the pass just read, by forecast."""
        seen = torch.stack([record.gate_input for record in records[:-1]])
        residual = torch.from_numpy(vectors.residual).to(seen).unsqueeze(1)
        guesses = {"gate@1": seen, "residual@1": seen + residual}
        if vectors.default is None:
            return guesses
        return {**guesses, "quasi_hidden@1": self.quasi_hidden(records, torch.from_numpy(vectors.default))}

    def quasi_hidden(self, records: list[LayerRecord], default: Tensor) -> Tensor:
        """Quasi-hidden states [L-1, N, H] of the pass just read."""
        assert self.stream is not None
        return torch.stack([quasi_hidden(self.stream, default, at) for at in range(len(records) - 1)])


class Recall:
    """Sums over tokens: of the ``top_k`` experts that each is routed to in layer l + 1, how many were forecast at l."""

    def __init__(self, top_k: int) -> None:
        self._top_k, self._tokens = top_k, 0
        self._hits: dict[str, list[int]] = {}

    def add(
        self, layers: list[MoeLayer], records: list[LayerRecord], guesses: Mapping[str, Tensor],
        estimator: Estimator | None,
    ) -> None:
        """Take in one pass with ``guesses`` [L-1, N, H] at the next gates' input, by forecast."""
        self._tokens += len(records[0].gate_input)
        for at, (layer, record) in enumerate(zip(layers[1:], records[1:], strict=True)):
            for kind, guess in guesses.items():
                self._note(kind, at, record, self._routed(layer, record, guess[at].to(record.gate_input)))
            if estimator:
                best = estimator(guesses["quasi_hidden@1"][at].float(), at).topk(self._top_k, -1).indices
                self._note("estimator@1", at, record, best)

    def by_layer(self) -> dict[str, list[float]]:
        """Recall in 0..1 by kind, for every source layer 0..L-2."""
        return {kind: [n / (self._tokens * self._top_k) for n in hits] for kind, hits in self._hits.items()}

    def _routed(self, layer: MoeLayer, record: LayerRecord, hidden: Tensor) -> Tensor:
        logits, chosen = run_router(layer, record, hidden)
        return logits.topk(self._top_k, -1).indices if chosen is None else chosen

    def _note(self, kind: str, at: int, record: LayerRecord, guessed: Tensor) -> None:
        assert record.ids is not None
        hits = self._hits.setdefault(kind, [])
        hits.extend([0] * (at + 1 - len(hits)))
        hits[at] += int((guessed.unsqueeze(-1) == record.ids.unsqueeze(-2)).any(-1).sum())


def table(recall: Recall) -> str:
    """A table of recalls: one line a layer, and their mean."""
    kinds = recall.by_layer()
    rows = [(str(at), *values) for at, values in enumerate(zip(*kinds.values(), strict=True))]
    rows.append(("mean", *(sum(values) / len(values) for values in kinds.values())))
    head = "layer" + "".join(f"{kind:>16}" for kind in kinds)
    return "\n".join([head, *(f"{name:>5}" + "".join(f"{value:>16.1%}" for value in row) for name, *row in rows)])


def calibrate(teacher: Teacher, corpus: Corpus, settings: Settings) -> Vectors:
    """Residual and default vectors, popularity and residents of windows of training text."""
    sums = CalibrationSums(teacher.stream)
    for step in range(settings.calibration_steps):
        sums.add(teacher.read(settings.calibration_batch(corpus, step)))
    domains = ", ".join(corpus.domains)
    text = f"{settings.length}-token windows of the first {TRAINED_ON:.0%} of training text ({domains})"
    facts = {**teacher.run.loaded.describe(), "prompts": text, "seed": settings.seed}
    calibration = (settings.calibration_batch(corpus, step) for step in range(settings.calibration_steps))
    training = (settings.training_batch(corpus, step) for step in range(settings.steps))
    decode = teacher.run.loaded.tokenizer.batch_decode
    return sums.vectors(facts, sketch(text for batch in chain(calibration, training) for text in decode(batch)))


def train(teacher: Teacher, corpus: Corpus, vectors: Vectors, settings: Settings) -> tuple[Estimator, list[float]]:
    """The estimator, and its KL in nats a token and layer before every step."""
    default = torch.from_numpy(vectors.default)
    estimator, optimizer = _fresh(teacher, settings)
    losses: list[float] = []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for step in range(settings.steps):
        tokens = settings.training_batch(corpus, step)
        with torch.no_grad():
            states, scores = teacher.lesson(teacher.read(tokens), default)
        loss = distance(estimator, states, scores)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        _tell(losses, settings)
    return estimator, losses


def distance(estimator: Estimator, states: Tensor, scores: Tensor) -> Tensor:
    """KL(teacher || estimator), the mean over layers and tokens, for states [L-1, N, H] and scores [L-1, N, E]."""
    log_probabilities = functional.log_softmax(estimator(states, slice(None)), -1).flatten(0, 1)
    return functional.kl_div(log_probabilities, scores.flatten(0, 1), reduction="batchmean")


def _fresh(teacher: Teacher, settings: Settings) -> tuple[Estimator, torch.optim.AdamW]:
    layers = teacher.run.loaded.layers
    torch.manual_seed(settings.seed)
    estimator = Estimator(len(layers) - 1, layers[0].hidden, layers[0].experts_count, settings.width, settings.mlp)
    estimator = estimator.to(teacher.run.loaded.model.device)
    return estimator, torch.optim.AdamW(estimator.parameters(), lr=settings.peak_lr)


@torch.no_grad()
def measure(
    teacher: Teacher, corpus: Corpus, vectors: Vectors, estimator: Estimator | None, settings: Settings
) -> Recall:
    """Recall@k on held-out text, by layer, of the estimator and of what needs no training."""
    recall = Recall(teacher.probe.top_k)
    for domain in range(len(corpus.domains)):
        records = teacher.read(corpus.held_out_windows(domain, settings.held_out_windows, settings.length))
        recall.add(teacher.run.loaded.layers, records, teacher.guesses(records, vectors), estimator)
    return recall


def train_file(loaded: Loaded, folder: Path, output: Path, settings: Settings) -> Recall:
    """Calibrate, train, measure, and write the file of vectors to ``output``. Raises CaptureError and CorpusError."""
    check_folder_of(output, CaptureError)
    corpus = training_head(load_corpus(folder, loaded.tokenizer.backend_tokenizer))
    with ExitStack() as stack:
        run = HookedModel(loaded, CaptureSettings(), stack.enter_context(RouterRecorder(loaded.layers)))
        with torch.no_grad():
            probe = run.probe(corpus.batch(settings.seed, 0, 1, settings.length)[0].tolist())
            check_forecastable(loaded.layers, probe.records, probe.prompt)
            teacher = Teacher(run, _stream(run, probe, settings, stack), probe)
            vectors = calibrate(teacher, corpus, settings)
        estimator, losses = train(teacher, corpus, vectors, settings) if settings.steps else (None, [])
        recall = measure(teacher, corpus, vectors, estimator, settings)
    facts = _training(settings, losses, recall)
    if estimator:
        known = {**vectors.provenance, "estimator": facts}
        vectors = replace(vectors, estimator=estimator.tensors(), provenance=known)
    write_vectors(vectors, output)
    return recall


def _stream(run: HookedModel, probe: Probe, settings: Settings, stack: ExitStack) -> ResidualStream | None:
    """The residual stream until ``stack`` closes. An estimator cannot do without it, residual vectors can."""
    stream, reason = stream_if_any(run, probe, "estimator@1" if settings.steps else "quasi_hidden@1")
    if stream is not None:
        return stack.enter_context(stream)
    if settings.steps:
        raise CaptureError(reason)
    print(f"default vectors are left out: {reason}", file=sys.stderr)
    return None


def training_head(corpus: Corpus) -> Corpus:
    """The corpus with that part of its training texts alone that may be read here."""
    return replace(corpus, train=tuple(tokens[: int(TRAINED_ON * len(tokens))] for tokens in corpus.train))


def _tell(losses: list[float], settings: Settings) -> None:
    if len(losses) % 25 == 0 or len(losses) == settings.steps:
        recent = losses[-25:]
        print(f"step {len(losses)}/{settings.steps}: KL {sum(recent) / len(recent):.4f}", file=sys.stderr, flush=True)


def _training(settings: Settings, losses: list[float], recall: Recall) -> dict[str, Any]:
    """Settings, losses and recall of the training, for the provenance."""
    recent = losses[-25:]
    return {
        **asdict(settings),
        "optimiser": "AdamW, cosine",
        "loss": "KL(router || estimator), nats a token and layer",
        "first_loss": round(losses[0], 4) if losses else None,
        "last_loss": round(sum(recent) / len(recent), 4) if losses else None,
        "held_out_recall": {kind: round(sum(hits) / len(hits), 4) for kind, hits in recall.by_layer().items()},
    }


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    for name in ("tokens", "width", "mlp", "batch", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        settings = Settings(options.tokens, options.width, options.mlp, options.seed, batch=options.batch)
        check_model(options.model, options.dtype)
        check_folder_of(options.output, CaptureError)
        domains_of(options.corpus)
        print(table(train_file(load(options.model, options.dtype), options.corpus, options.output, settings)))
    except (CaptureError, CorpusError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
