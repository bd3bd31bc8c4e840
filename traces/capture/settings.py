"""Settings of capture, checked before torch is imported and a model loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from trilane.common.errors import TrilaneError
from trilane.common.hints import between
from trilane.common.quoting import quoted
from trilane.common.schema import check

FORECASTS = ("gate@1", "gate@2", "gate@3", "residual@1", "quasi_hidden@1", "partial@1")  # estimator@1 needs training
DTYPES = ("auto", "float32", "bfloat16", "float16")


class CaptureError(TrilaneError):
    """A model, a prompt or an option that capture does not support."""


@dataclass(frozen=True)
class CaptureSettings:
    """Settings of a run and of what is kept. Every sequence has prompt + generated rows."""

    prompt_tokens: Annotated[int, between(1, 1e6)] = 64  # a longer prompt is cut
    generated_tokens: Annotated[int, between(0, 1e6)] = 64
    batch_size: Annotated[int, between(1, 1e6)] = 8
    temperature: Annotated[float, between(0, 1e3)] = 0.8  # 0: greedy
    seed: Annotated[int, between(0, 1e18)] = 0
    scores: bool = True
    forecasts: Sequence[str] | None = None  # None: those of ``FORECASTS`` that the model can give

    def __post_init__(self) -> None:
        check(self, CaptureError)

    @property
    def facts(self) -> dict[str, Any]:
        """Origin of the text, for the provenance of a trace."""
        return {
            "seed": self.seed,
            "text": "generated",
            "sampling": f"temperature {self.temperature}" if self.temperature else "greedy",
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
        }


def check_model(model: str | Path, dtype: str = "auto") -> None:
    """Refuse text that is neither a folder nor has the form of a hub id. Raises CaptureError."""
    if dtype not in DTYPES:
        raise CaptureError(f"dtype: expected one of {', '.join(DTYPES)}, got {quoted(dtype)}")
    text = str(model)
    if not Path(text).is_dir() and (text.count("/") != 1 or text.startswith(("/", ".", "~")) or text.endswith("/")):
        raise CaptureError(
            f"{text}: no such folder; name the folder of a model, or a Hugging Face id such as allenai/OLMoE-1B-7B-0924"
        )
