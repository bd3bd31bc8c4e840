"""One memory of the host under the sessions of several GPUs, each of which numbers its own layers from 0."""

from __future__ import annotations

from collections.abc import Iterable

from policies.mechanism.host_keeping import CacheKeeper, OfLayers, of_model
from policies.mechanism.host_tier import HostTier
from policies.mechanism.views import ExpertId
from policies.protocols import Composition


class HostShare:
    """The host's memory as the session of one GPU sees it, whose layers begin with ``first``, up to ``end``.
    ``shared_host.fill_together`` fills it, when it is known what all GPUs hold."""

    def __init__(self, tier: HostTier, first: int, end: int) -> None:
        self.tier, self.layers = tier, range(first, end)
        self.held = OfLayers(tier.held, self.layers)

    def keeper(self, policy: Composition) -> CacheKeeper | None:
        """The keeper of these layers' experts, if the policy keeps the host's memory."""
        if policy.host_cache is None:
            return None
        rooms = self.tier.rooms(self.layers, policy.host_by_layer)
        return CacheKeeper(policy.host_cache, lambda key: self.tier.size_of(of_model(key, self.layers)), rooms)

    def holds(self, key: ExpertId) -> bool:
        """``HostTier.holds``."""
        return key in self.held

    def need(self, keys: Iterable[ExpertId], by_plan: bool = False) -> None:
        """``HostTier.need``."""
        self.tier.need([of_model(key, self.layers) for key in keys], by_plan)

    def end_use(self, key: ExpertId) -> None:
        """``HostTier.end_use``."""
        self.tier.end_use(of_model(key, self.layers))

    def read_ahead(self, keys: Iterable[ExpertId], more: bool = False) -> None:
        """``HostTier.read_ahead``; what other GPUs are to have read ahead follows."""
        self.tier.read_ahead([of_model(key, self.layers) for key in keys], more, self.layers)

    def own(self, key: ExpertId) -> ExpertId | None:
        """An expert of the model as one of this GPU's layers; None if it is not."""
        return ExpertId(key.layer - self.layers.start, key.expert) if key.layer in self.layers else None
