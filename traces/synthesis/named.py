"""Synthetic traces by name: ``synthetic:MODEL``, and the calibration trace that belongs to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from traces.layout import TraceError
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from traces.synthesis.nearest import nearest_routing
from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace
from traces.trace import Trace
from trilane.common.quoting import quoted

PREFIX = "synthetic:"
CALIBRATION = "-calibration"
_NO_FORECAST = "none"
_NAME = re.compile(
    r"synthetic:(?P<model>[^/]+?|.+\.(?:json|gguf))(?P<calibration>-calibration)?"
    rf"(?:/(\d{{1,9}})x(\d{{1,9}})\+(\d{{1,9}})(?:/(?P<forecasts>{_NO_FORECAST}|[a-z_]+@\d+(?:,[a-z_]+@\d+)*))?)?"
)
_EVALUATION_SEED, _CALIBRATION_SEED = 0, 1


def is_synthetic(name: str) -> bool:
    return name.startswith(PREFIX)


def load_synthetic(name: str) -> Trace:
    """``synthetic:qwen3-30b-a3b``: 20 sequences of 64 + 64 tokens; ``.../4x4096+32``: 4 of 4,096 + 32;
    ``.../4x4096+32/gate@1,residual@1``: with these forecasts only, as far as the routing model has them (``none``:
    without any), which takes less time. The same name is always the same trace.

    Raises ShapeError for an unknown model and TraceError for lengths that cannot be read.
    """
    return _made(name, load_model(_parsed(name)[0]))


@lru_cache(maxsize=4)
def _made(name: str, shape: ModelShape) -> Trace:
    _, calibration, counts, forecasts = _parsed(name)
    seed = _CALIBRATION_SEED if calibration else _EVALUATION_SEED
    lengths = dict(zip(("sequences", "prompt_tokens", "generated_tokens"), counts, strict=bool(counts)))
    return synthetic_trace(shape, Synthesis(nearest_routing(shape), seed=seed, forecasts=forecasts, **lengths))


def synthetic_calibration_of(name: str) -> str | None:
    """The name of the calibration trace: other texts of the same model, of the default lengths."""
    model, calibration, *_ = _parsed(name)
    return None if calibration else f"{PREFIX}{model}{CALIBRATION}"


def with_lengths(name: str, sequences: int, prompt_tokens: int, generated_tokens: int, forecasts: Iterable[str]) -> str:
    """The name of the same model's trace with these lengths and these forecasts only."""
    return f"{name}/{sequences}x{prompt_tokens}+{generated_tokens}/{','.join(forecasts) or _NO_FORECAST}"


def _parsed(name: str) -> tuple[str, bool, tuple[int, ...], tuple[str, ...] | None]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise TraceError(
            f"trace {quoted(name)}: expected synthetic:MODEL, or synthetic:MODEL/SEQUENCESxPROMPT+GENERATED such as "
            f"synthetic:qwen3-30b-a3b/4x256+32"
        )
    counts = tuple(int(count) for count in match.groups()[2:5] if count)
    forecasts = None if match["forecasts"] is None else tuple(match["forecasts"].split(","))
    return match["model"], bool(match["calibration"]), counts, forecasts
