"""Train a mini model on a folder of text, on one CPU thread, within a number of minutes or of steps.

``python -m tools.mini_train --model mini-moe --corpus FOLDER -o DIR --minutes 50``. Run again to resume: DIR holds the
checkpoint, the log (``log.jsonl``) and, in ``DIR/model``, the model as the Hugging Face library loads it.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tools.mini_data import PAD, Corpus, load_corpus, train_tokenizer
from tools.mini_eval import RouterTap, evaluate
from tools.mini_models import VOCAB, build_model
from trilane.common.files import atomic_path


@dataclass(frozen=True)
class TrainingSettings:
    """What a training run is. With ``minutes`` the schedule follows the clock; with ``steps`` it is reproducible."""

    model: str
    minutes: float = 50.0
    steps: int | None = None
    batch: int = 8
    length: int = 160
    peak_lr: float = 3e-3
    warmup: float = 0.02  # share of the run
    final_lr: float = 0.02  # of the peak
    weight_decay: float = 0.05
    clip: float = 1.0
    balance: float = 0.005  # Switch Transformer's load-balance loss (arXiv 2101.03961, eq. 4), summed over layers
    z_loss: float = 1e-4  # ST-MoE's router z-loss (arXiv 2202.08906, eq. 5), summed over layers
    seed: int = 17
    vocab: int = VOCAB
    checkpoint_minutes: float = 4.0
    eval_windows: int = 24


def learning_rate(settings: TrainingSettings, progress: float) -> float:
    """Linear warm-up, then a cosine down to ``final_lr`` of the peak; ``progress`` is 0..1 of the run."""
    if progress < settings.warmup:
        return settings.peak_lr * max(progress / settings.warmup, 0.01)
    angle = math.pi * min((progress - settings.warmup) / (1 - settings.warmup), 1.0)
    return settings.peak_lr * (settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(angle)))


class Trainer:
    """One training run in ``folder``: everything that a checkpoint must bring back is a field of it."""

    def __init__(
        self,
        settings: TrainingSettings,
        corpus: Corpus,
        folder: Path,
        model: PreTrainedModel,
        clock: Callable[[], float],
    ) -> None:
        self.settings, self.corpus, self.folder, self.model, self.clock = settings, corpus, folder, model, clock
        model.set_experts_implementation("grouped_mm")
        self.tap = RouterTap(model)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=0.0, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds = 0, 0.0
        self._resume()

    def _groups(self) -> list[dict[str, Any]]:
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim <= 1]
        return [{"params": decay, "weight_decay": self.settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1."""
        if self.settings.steps is not None:
            return self.step / self.settings.steps
        return self.seconds / (60 * self.settings.minutes)

    def run(self) -> None:
        """Train to the end of the budget, with a checkpoint every few minutes and one at the end."""
        saved = self.seconds
        while self.progress < 1.0:
            began = self.clock()
            losses = self._train_step()
            self.step += 1
            self.seconds += self.clock() - began
            if self.step % 25 == 0:
                self._log(losses)
            if self.seconds - saved >= 60 * self.settings.checkpoint_minutes:
                saved = self.seconds
                self._checkpoint()
        self._checkpoint()

    def _train_step(self) -> dict[str, float]:
        """One optimizer step. Returns the language loss (nats per token), balance (1 = even) and z-loss."""
        lr = learning_rate(self.settings, self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens = self.corpus.batch(self.settings.seed, self.step, self.settings.batch, self.settings.length)
        self.model.train()
        language = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        balance, z = self.tap.losses()
        (language + self.settings.balance * balance + self.settings.z_loss * z).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        layers = self.tap.layers
        return {"loss": language.item(), "balance": balance.item() / layers, "z": z.item() / layers, "lr": lr}

    def _log(self, values: dict[str, Any]) -> None:
        tokens = self.step * self.settings.batch * self.settings.length
        line = {"step": self.step, "tokens": tokens, "seconds": round(self.seconds, 1), **values}
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _checkpoint(self) -> None:
        """Evaluate, and write model, optimizer and progress; each file is replaced whole or not at all."""
        began = self.clock()
        self._log({"held_out": evaluate(self.model, self.tap, self.corpus, self.settings.eval_windows)})
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.seconds += self.clock() - began
        with atomic_path(self.folder / "checkpoint.pt") as aside:
            torch.save({**state, "step": self.step, "seconds": self.seconds}, aside)
        export(self.model, self.folder)

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]


def export(model: PreTrainedModel, folder: Path) -> None:
    """Write ``folder/model``: bfloat16 weights and the tokenizer, as ``from_pretrained`` reads them."""
    aside, final = folder / "model.new", folder / "model"
    shutil.rmtree(aside, ignore_errors=True)
    copy.deepcopy(model).bfloat16().save_pretrained(aside)
    wrapped: Any = PreTrainedTokenizerFast
    wrapped = wrapped(tokenizer_file=str(folder / "tokenizer.json"), pad_token=PAD)
    wrapped.save_pretrained(aside)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)


def load_tokenizer(folder: Path, corpus: Path, vocab: int) -> Tokenizer:
    """The tokenizer of ``folder``, learnt from ``corpus`` where there is none yet."""
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(corpus, vocab).save(str(path))
    return Tokenizer.from_file(str(path))


def train(
    settings: TrainingSettings, corpus: Path, folder: Path, clock: Callable[[], float] = time.monotonic
) -> Trainer:
    """Train, or go on training, in ``folder``. Returns the finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = load_corpus(corpus, load_tokenizer(folder, corpus, settings.vocab))
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=1) + "\n")
    trainer = Trainer(settings, tokens, folder, build_model(settings.model, settings.seed, vocab=settings.vocab), clock)
    trainer.run()
    return trainer


def main(
    model: Annotated[str, typer.Option()], corpus: Annotated[Path, typer.Option()],
    output: Annotated[Path, typer.Option("-o", "--output")], minutes: float = TrainingSettings.minutes,
    steps: int | None = None, peak_lr: float = TrainingSettings.peak_lr,
) -> None:
    """Train a mini model, or go on training it."""
    torch.set_num_threads(1)
    train(TrainingSettings(model, minutes, steps, peak_lr=peak_lr), corpus, output)


if __name__ == "__main__":
    typer.run(main)
