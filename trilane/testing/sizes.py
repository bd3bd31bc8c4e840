"""Models, memories and batches at the edge of what can be: every policy must cope, or be refused for a reason."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from policies.registry import System
from trilane.testing.random_worlds import costs_with_copies, random_costs, scored_trace, with_forecasts
from trilane.testing.strategies import toy_shape
from trilane.testing.worlds import World, composition_of

SLOT = 100  # bytes of an expert, where all are alike


@dataclass(frozen=True)
class Size:
    """A model, a memory and a batch. ``expert_bytes`` by layer, repeated; ``cache_bytes`` None: room for all."""

    name: str
    layers: int = 3
    experts: int = 6
    top_k: int = 2
    sequences: int = 1
    prompt: int = 3
    decode: int = 3
    chunk: int | None = None
    cache_bytes: int | None = 7 * SLOT
    expert_bytes: tuple[int, ...] = (SLOT,)

    def __str__(self) -> str:
        return self.name

    @property
    def uniform(self) -> bool:
        return len(set(self.expert_bytes)) == 1

    def world(self, system: System, **parameters: object) -> World:
        """The system at this size, on a machine that is the same in every process."""
        rng = random.Random(f"{system.name} at {self.name}")
        shape = toy_shape(self.layers, self.experts, self.top_k)
        sizes = [self.expert_bytes[layer % len(self.expert_bytes)] for layer in range(self.layers)]
        cache = sum(sizes) * self.experts if self.cache_bytes is None else self.cache_bytes
        trace = scored_trace(np.random.default_rng(1), shape, self.sequences, self.prompt, self.decode)
        costs = costs_with_copies(random_costs(sizes, rng, rng.random() < 0.5), system.needs, self.experts)
        world = World(
            system, trace, costs, self.sequences, cache,
            prefill_chunk_tokens=self.chunk, parameters=parameters,
        )
        return replace(world, trace=with_forecasts(trace, composition_of(world).needs, rng))


ORDINARY = Size("ordinary")
SIZES = (
    ORDINARY,
    Size("no slot", cache_bytes=0),
    Size("one byte short of a slot", cache_bytes=SLOT - 1),
    Size("one slot", cache_bytes=SLOT),
    Size("one slot a layer", cache_bytes=3 * SLOT),
    Size("all resident", cache_bytes=None),
    Size("more room than experts", cache_bytes=10**6),
    Size("one expert", experts=1, top_k=1, cache_bytes=SLOT),
    Size("one expert, no slot", experts=1, top_k=1, cache_bytes=0),
    Size("all experts chosen", experts=4, top_k=4, cache_bytes=5 * SLOT),
    Size("one chosen", top_k=1),
    Size("one layer", layers=1, cache_bytes=3 * SLOT),
    Size("one of everything", layers=1, experts=1, top_k=1, prompt=1, decode=1, cache_bytes=0),
    Size("many layers", layers=7, prompt=2, decode=2, cache_bytes=20 * SLOT),
    Size("batch", sequences=3),
    Size("prefill only", decode=0),
    Size("decode only", prompt=0),
    Size("long prompt", prompt=14, decode=1),
    Size("chunked prefill", prompt=7, chunk=2),
    Size("chunked prefill of a batch", sequences=2, prompt=5, chunk=3),
    Size("sizes by layer", expert_bytes=(SLOT, 160, 40)),
    Size("sizes by layer, one slot", expert_bytes=(SLOT, 160, 40), cache_bytes=160),
)


def unsuited(system: System, size: Size) -> str | None:
    """Why the simulator must refuse the system at this size, in its words; None if it must run."""
    needs = system.needs
    if needs.max_batch is not None and size.sequences > needs.max_batch:
        return f"takes batches of at most {needs.max_batch}, got {size.sequences}"
    if needs.uniform_sizes and not size.uniform:
        return "needs experts of one size"
    return None
