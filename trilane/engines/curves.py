"""Speeds of one answer of ``trilane tune`` along one number: tokens in the KV cache, layers whose experts the CPU has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from traces.models.catalogue import trained_tokens
from trilane.engines.command_line import cpu_layers_of
from trilane.engines.model_formats import Bench
from trilane.engines.tune.tune import TuneStart

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)  # tokens of a prompt
_MOST_SPLITS = 24  # that are told of a model with more layers


class SpeedAt(NamedTuple):
    """Decode speed of one sequence at a place of the curve, and the time to its first token."""

    at: int
    tokens_per_s: float
    ttft_ms: float


def by_context(bench: Bench) -> Iterator[SpeedAt]:
    """Yield the speed with the best setting for each length of prompt, as far as there is room, and as far as the model
    was trained; the window has room for prompt and answer."""
    most = trained_tokens(bench.shape.name) or CONTEXTS[-1]
    generated = bench.question.fit.generated
    for tokens in CONTEXTS:
        longer = bench.with_parts(prompt_tokens=tokens, window=None)
        if tokens + generated > most or not longer.runs:
            return
        best = longer.best
        yield SpeedAt(tokens, best.tokens_per_s, best.ttft_ms)


def by_cpu_layers(start: TuneStart) -> Iterator[SpeedAt]:
    """Yield the speed by N of ``--n-cpu-moe``, with the other settings of the best one, where there is room; nothing of
    several cards and of one memory."""
    bench, best = start.search.bench, start.search.best
    shape = bench.shapes[best.kv]
    if bench.hardware.one_memory or bench.hardware.further or not best.gpu:
        return
    step = -(-shape.moe_layers // _MOST_SPLITS)
    layers = {*range(0, shape.moe_layers + 1, step), shape.moe_layers, start.best.host_layers}
    for count in sorted(layers):
        speed = bench.speed(best._replace(host_layers=count, ts=None))
        if speed.has_room and speed.splitter.has_room(speed.split):
            yield SpeedAt(cpu_layers_of(shape, count), 1e9 / speed.decode.total_ns, speed.prompt.total_ns / 1e6)
