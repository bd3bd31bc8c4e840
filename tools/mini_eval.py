"""What a mini model learnt and how evenly it uses its experts: router losses, held-out loss, load balance."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tools.mini_data import Corpus


class RouterTap:
    """Keeps what every router returned in the last forward pass, in layer order, by forward hooks."""

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
        return torch.stack([b for b, _ in pairs]).sum(), torch.stack([z for _, z in pairs]).sum()

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
    """From counts [domains, layers, experts]: how uneven the experts' shares are, and how much domains differ."""
    by_domain = counts / counts.sum(-1, keepdim=True)
    share = by_domain.mean(0)
    experts = share.shape[1]
    apart = 0.5 * (by_domain - share).abs().sum(-1).mean(0)
    return {
        "max_over_mean": np.round((share.amax(1) * experts).tolist(), 2).tolist(),
        "dead_fraction": np.round((share == 0).double().mean(1).tolist(), 4).tolist(),
        "domain_distance": np.round(apart.tolist(), 3).tolist(),  # total variation between a domain's use and the mean
    }
