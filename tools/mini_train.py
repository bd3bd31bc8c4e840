"""Train a mini model on a folder of text, on one CPU thread, within a number of minutes or of steps.

``python -m tools.mini_train --model mini-moe --corpus FOLDER -o DIR --minutes 50``. Run again to resume: DIR holds the
checkpoint, the log (``log.jsonl``) and, in ``DIR/model``, the model as the Hugging Face library loads it. The models
have real routing topologies, and are small enough for one core.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tools.mini_data import PAD, Corpus, load_corpus, train_tokenizer
from trilane.common.files import atomic_path

VOCAB = 2048
COMMON: Mapping[str, Any] = {  # token 0 is padding, and nothing ends a text
    "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "initializer_range": 0.04, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}


def deepseek_config(vocab: int = VOCAB, layers: int = 27) -> DeepseekV2Config:
    """DeepSeek-V2-Lite's routing, layer for layer (its config.json: 27 layers of which the first is dense, 64 routed
    experts, 2 shared, top-6 of a plain softmax, weights not renormalised), at 1/16 of its hidden width. Values are as
    wide as keys, so that fused attention kernels apply.
    """
    return DeepseekV2Config(
        vocab_size=vocab, num_hidden_layers=layers, intermediate_size=352, moe_intermediate_size=32,
        first_k_dense_replace=1, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, topk_method="greedy",
        n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0, num_key_value_heads=4,
        q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, **COMMON,
    )


def moe_config(vocab: int = VOCAB, layers: int = 8, finer: int = 1) -> Qwen3MoeConfig:
    """A model to run in tests and on small machines: 8 MoE layers, 16 experts, top-2 renormalised, 5.5 M weights.

    ``finer``: the same weights in so many times the experts, of which a token gets so many times more.
    """
    return Qwen3MoeConfig(
        vocab_size=vocab, num_hidden_layers=layers, intermediate_size=256, moe_intermediate_size=96 // finer,
        num_experts=16 * finer, num_experts_per_tok=2 * finer, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], num_key_value_heads=2,
        **{"head_dim": 32, **COMMON},
    )


MODELS: Mapping[str, tuple[Any, Callable[..., Any]]] = {
    "mini-deepseek": (DeepseekV2ForCausalLM, deepseek_config),
    "mini-deepseek-8": (DeepseekV2ForCausalLM, partial(deepseek_config, layers=9)),  # 8 MoE layers, to be run often
    "mini-moe": (Qwen3MoeForCausalLM, moe_config),
    "mini-moe-32": (Qwen3MoeForCausalLM, partial(moe_config, finer=2)),  # 32 experts, top-4, as gpt-oss-20b
}


def build_model(name: str, seed: int, **sizes: int) -> PreTrainedModel:
    """A freshly initialised float32 model. ``sizes``: ``vocab`` and ``layers``, where they differ from the default.
    Raises KeyError, naming the known models, on another name.
    """
    if name not in MODELS:
        raise KeyError(f"no mini model {name!r}; known: {sorted(MODELS)}")
    model_class, config = MODELS[name]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config(**sizes)).float()
    return model


class RouterTap:
    """Forward hooks that keep the logits and ids of every router in the last pass, in layer order."""

    def __init__(self, model: PreTrainedModel) -> None:
        routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        self.layers = len(routers)
        self._logits: list[Tensor] = [torch.empty(0)] * self.layers
        self._ids: list[Tensor] = [torch.empty(0)] * self.layers
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, _module: nn.Module, _inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        self._logits[layer], self._ids[layer] = output[0].flatten(0, -2), output[-1].flatten(0, -2)

    def losses(self) -> tuple[Tensor, Tensor]:
        """(load balance, z-loss), each summed over layers; balance is 1 a layer when all experts are used alike."""
        pairs = [_router_losses(logits.float(), ids) for logits, ids in zip(self._logits, self._ids, strict=True)]
        balance, z = (torch.stack(values).sum() for values in zip(*pairs, strict=True))
        return balance, z

    def counts(self) -> Tensor:
        """Tokens that each expert got in the last pass, [layers, experts]."""
        pairs = zip(self._logits, self._ids, strict=True)
        return torch.stack([torch.bincount(ids.flatten(), minlength=logits.shape[1]) for logits, ids in pairs])


def _router_losses(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    experts = logits.shape[1]
    share = torch.bincount(ids.flatten(), minlength=experts) / ids.numel()
    balance = experts * (share * logits.softmax(-1).mean(0)).sum()
    return balance, logits.logsumexp(-1).square().mean()


@torch.no_grad()
def evaluate(model: PreTrainedModel, tap: RouterTap, corpus: Corpus, windows: int, length: int = 128) -> dict[str, Any]:
    """Held-out loss by domain, with that of the unigram on the same tokens, and the load balance on all of them."""
    model.train(False)
    results = [_domain(model, tap, corpus, d, windows, length) for d in range(len(corpus.domains))]
    counts = torch.stack([c for _, c in results]).double()
    losses = {name: loss for name, (loss, _) in zip(corpus.domains, results, strict=True)}
    return {"loss": losses, "balance": _balance(counts)}


def _domain(
    model: PreTrainedModel, tap: RouterTap, corpus: Corpus, domain: int, windows: int, length: int
) -> tuple[dict[str, float], Tensor]:
    tokens = corpus.held_out_windows(domain, windows, length)
    nats, counts = 0.0, torch.zeros(())
    for rows in torch.split(tokens, 8):
        nats += model(input_ids=rows, labels=rows, use_cache=False).loss.item() * rows[:, 1:].numel()
        counts = counts + tap.counts()
    scored = tokens[:, 1:].numpy()
    size = corpus.token_bytes[scored].sum()
    unigram = corpus.unigram_nats()[scored].sum()
    return {
        "nats_per_token": round(nats / scored.size, 4),
        "bits_per_byte": round(nats / size / math.log(2), 4),
        "unigram_nats_per_token": round(float(unigram) / scored.size, 4),
        "unigram_bits_per_byte": round(float(unigram) / size / math.log(2), 4),
    }, counts


def _balance(counts: Tensor) -> dict[str, Any]:
    """Unevenness of the experts' shares, and difference of domains, from counts [domains, layers, experts]."""
    by_domain = counts / counts.sum(-1, keepdim=True)
    share = by_domain.mean(0)
    experts = share.shape[1]
    apart = 0.5 * (by_domain - share).abs().sum(-1).mean(0)
    return {
        "max_over_mean": np.round((share.amax(1) * experts).tolist(), 2).tolist(),
        "dead_fraction": np.round((share == 0).double().mean(1).tolist(), 4).tolist(),
        "domain_distance": np.round(apart.tolist(), 3).tolist(),  # total variation between a domain's use and the mean
    }


@dataclass(frozen=True)
class TrainingSettings:
    """A training run. With ``minutes`` the schedule follows the clock; with ``steps`` it can be repeated."""

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
        self, settings: TrainingSettings, corpus: Corpus, folder: Path, model: PreTrainedModel,
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
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_file=str(folder / "tokenizer.json"), pad_token=PAD).save_pretrained(aside)
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
