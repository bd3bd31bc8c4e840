"""A scenario: everything that one question needs, as strict YAML and as a frozen value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from policies.system import fits
from sim.costs.runtimes import RUNTIMES
from sim.machine.strict_yaml import YamlError, load_yaml


class ScenarioError(ValueError):
    """A scenario that cannot be read or cannot be run; the message says which key, what came and what is valid."""


@dataclass(frozen=True)
class Scenario:
    """Trace, model, machine, policy, memory and lengths. Every field can be swept.

    ``cached_share`` is the share of all routed experts that fit the GPU's cache slots; give it or ``gpu_memory_gb``
    (10^9 bytes; what is left after weights, KV cache, staging and reserve holds experts), or neither for the card's own
    memory. ``None`` lengths mean "as recorded". ``noisy_forecast_recall``: recall@k by look-ahead of made-up forecasts,
    which take the place of those that a policy needs and the trace lacks. ``runtime``: how kernels are started, "eager"
    or "graphs" (``sim.costs.runtimes``).
    """

    trace: str = "mini-deepseek"
    model: str | None = "deepseek-v2-lite"  # None: the shape that the trace was recorded from
    hardware: str = "rtx3090-ddr4"
    hardware_overrides: Mapping[str, float] = field(default_factory=dict)
    policy: str = "dali"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    gpu_memory_gb: float | None = None
    cached_share: float | None = None
    batch: int = 1
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    prefill_chunk_tokens: int | None = None
    sequences: tuple[int, ...] | None = None  # which of the trace's sequences, in order; None: from the first
    calibration: str | None = None  # trace to calibrate policies on; None: the bundled one that belongs to ``trace``
    noisy_forecast_recall: tuple[float, ...] | None = None
    runtime: str = "eager"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if not fits(getattr(self, name), hint):
                raise ScenarioError(f"scenario: {name}: expected {_in_words(hint)}, got {getattr(self, name)!r}")
        if self.gpu_memory_gb is not None and self.cached_share is not None:
            raise ScenarioError("scenario: give gpu_memory_gb or cached_share, not both")
        if self.cached_share is not None and not 0 <= self.cached_share <= 1:
            raise ScenarioError(f"scenario: cached_share must lie between 0 and 1, got {self.cached_share}")
        if self.gpu_memory_gb is not None and not 0 < self.gpu_memory_gb < 1e6:
            raise ScenarioError(f"scenario: gpu_memory_gb must be GB (10^9 bytes) above 0, got {self.gpu_memory_gb}")
        if self.runtime not in RUNTIMES:
            raise ScenarioError(f"scenario: runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}")
        recalls = self.noisy_forecast_recall
        if recalls is not None and not (recalls and all(0 <= recall <= 1 for recall in recalls)):
            raise ScenarioError(f"scenario: noisy_forecast_recall must be numbers between 0 and 1, got {list(recalls)}")
        for name in ("batch", "prompt_tokens", "generated_tokens", "prefill_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScenarioError(f"scenario: {name} must be a whole number >= 1, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """A YAML- and JSON-ready dict; ``from_dict`` is its inverse."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def with_(self, **changes: Any) -> Scenario:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "scenario") -> Scenario:
        """Build from a mapping. Raises ScenarioError naming an unknown key and the valid ones."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ScenarioError(f"{where}: unknown key {key!r}{hint}; valid keys: {', '.join(known)}")
        lists: dict[str, Any] = {name: tuple(values[name]) for name in _LISTS if isinstance(values.get(name), list)}
        return cls(**{**values, **lists})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Scenario:
        """Read a scenario file. Raises ScenarioError with the file's name."""
        try:
            values = load_yaml(path)
        except OSError as error:
            raise ScenarioError(f"scenario file {path}: {error.strerror}") from None
        except YamlError as error:
            raise ScenarioError(f"scenario file {error}") from None
        if not isinstance(values, Mapping):
            raise ScenarioError(f"scenario file {path}: expected lines of `key: value`, got {values!r:.40}")
        return cls.from_dict(values, f"scenario file {path}")


_WORDS = {str: "text", int: "a whole number", float: "a number", NoneType: "null"}
_LISTS = ("sequences", "noisy_forecast_recall")
_LIST_WORDS = {int: "a list of whole numbers", float: "a list of numbers"}


def _in_words(hint: Any) -> str:
    """A type as the writer of a scenario would call it."""
    if isinstance(hint, UnionType):
        return " or ".join(_in_words(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return _LIST_WORDS[get_args(hint)[0]]
    return "keys and values" if get_origin(hint) is Mapping else _WORDS.get(hint, str(hint))
