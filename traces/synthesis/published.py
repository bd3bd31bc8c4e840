"""Published statistics of the routing of single models, and the same of synthetic routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from traces.layout import TraceError
from traces.statistics import lru_hit_rates
from traces.synthesis.latent import Texts, best, layer_logits
from traces.synthesis.routing_model import RoutingModel
from trilane.common.hints import NOT_EMPTY, Count, Name, Share
from trilane.common.yaml_files import read_bundled

_FILE = Path(__file__).parents[1] / "models" / "published_routing.yaml"
_ALIKE = 8  # layers that are simulated where all are equally skewed


@dataclass(frozen=True)
class PublishedRouting:
    """One statistic of one model; ``published_routing.yaml`` explains the fields."""

    model: Name
    quantity: Literal["lru", "overlap", "pooled", "one_text"]
    values: Annotated[Mapping[str, Share], NOT_EMPTY]
    texts: Count
    tokens: Count
    fitted: bool
    source: Name
    note: Name
    kind: str = ""  # of text, to which alone it belongs
    start: str = ""  # stored routing whose other numbers a fit to it keeps

    @property
    def sizes(self) -> tuple[float, ...]:
        """Shares of the experts, or tokens apart, that the values are of."""
        return tuple(map(float, self.values))


@cache
def published_routing() -> tuple[PublishedRouting, ...]:
    """All of the file, in its order. Raises TraceError for a faulty one."""
    statistics: tuple[PublishedRouting, ...] = read_bundled(tuple[PublishedRouting, ...], _FILE, TraceError)
    return statistics


def made(fit: RoutingModel, statistic: PublishedRouting, seed: int = 0) -> tuple[float, ...]:
    """Values of a statistic in synthetic routing: at the same sizes, of as many texts and tokens."""
    ids = choices(fit, statistic.texts, statistic.tokens, seed)
    if statistic.quantity == "lru":
        return lru_at(ids, fit.experts, statistic.sizes)
    if statistic.quantity == "overlap":
        return tuple(_overlap(ids, int(lag)) for lag in statistic.sizes)
    parts = [ids] if statistic.quantity == "pooled" else list(ids[:, None])
    return tuple(float(np.mean([_popular(part, fit.experts, size) for part in parts])) for size in statistic.sizes)


def choices(fit: RoutingModel, texts: int, tokens: int, seed: int = 0) -> NDArray[np.int16]:
    """Decode tokens' experts [texts, tokens, layers, k]; a prompt has one token. All layers, or some of equal ones."""
    shares = fit.preference_share if len({*fit.preference_share}) > 1 else fit.preference_share[:_ALIKE]
    fewer = replace(fit, moe_layers=len(shares), preference_share=shares)
    logits = layer_logits(fewer, Texts(tuple((seed, text) for text in range(texts)), 1, tokens))
    ids = np.stack([best(layer, fit.top_k) for layer in logits], axis=1)
    return ids.reshape(texts, 1 + tokens, *ids.shape[1:])[:, 1:]


def lru_at(ids: NDArray[np.int16], experts: int, shares: tuple[float, ...]) -> tuple[float, ...]:
    """Hit rates of LRU caches by layer that hold these shares of the experts."""
    rates = lru_hit_rates(ids, experts)
    return tuple(float(rates[_slots(share, experts)]) for share in shares)


def _slots(share: float, experts: int) -> int:
    """The index of a cache of that share: 0 holds one expert."""
    return max(round(share * experts), 1) - 1


def _overlap(ids: NDArray[np.int16], lag: int) -> float:
    return float((ids[:, :-lag, :, :, None] == ids[:, lag:, :, None, :]).any(axis=-1).mean())


def _popular(ids: NDArray[np.int16], experts: int, share: float) -> float:
    """Share of the choices that fall on the most popular experts of each layer."""
    uses = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in np.moveaxis(ids, 2, 0)])
    shares = np.cumsum(-np.sort(-uses, axis=1), axis=1) / uses.sum(axis=1, keepdims=True)
    return float(shares[:, _slots(share, experts)].mean())
