"""Sessions of several GPUs that share the host's memory above a disk: what it holds at first, and what is read."""

from __future__ import annotations

from collections.abc import Sequence

from policies.mechanism.host_keeping import SharedKeeper, of_model
from policies.mechanism.host_share import HostShare
from policies.mechanism.host_tier import HostTier, Read
from policies.mechanism.session import Session
from policies.mechanism.views import ExpertId


def fill_together(tier: HostTier, sessions: Sequence[Session]) -> None:
    """Hold what no GPU does, before the first token. Where policies keep the host's memory themselves, each has the
    part of its layers."""
    on_gpu = [layer for session in sessions for layer in session.residency.resident]
    keepers, starts = [], []
    for share, policy in [(session.host, session.policy) for session in sessions]:
        assert isinstance(share, HostShare)
        keeper = share.keeper(policy)
        if keeper is not None:
            keepers.append((share.layers, keeper))
        if policy.host_start is not None:
            starts.append([of_model(key, share.layers) for key in policy.host_start])
    start = [key for own in starts for key in own] if starts else None
    tier.fill_for(on_gpu, SharedKeeper(keepers) if keepers else None, start)


class SharedReads:
    """The reads of several sessions, of the model's layers in order; what ``Session`` answers for one."""

    def __init__(self, tier: HostTier, sessions: Sequence[Session]) -> None:
        self._tier = tier
        self._owners = [(session, layer) for session in sessions for layer in range(len(session.costs))]

    def next_read(self, in_effect: bool = True) -> Read | None:
        """``Session.next_read``."""
        return self._tier.next_read(in_effect, self._still_read_ahead)

    def has_read(self, read: Read) -> None:
        """``Session.has_read``."""
        self._tier.end_read(read)

    def _still_read_ahead(self, key: ExpertId) -> bool:
        session, layer = self._owners[key.layer]
        return session.still_read_ahead(ExpertId(layer, key.expert))
