"""Parameters of synthetic routing, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from traces.layout import TraceError, parse_forecast_name
from trilane.common.hints import NOT_EMPTY, Share
from trilane.common.schema import check, from_dict, to_dict
from trilane.common.yaml_files import read_bundled, read_yaml

STORED = Path(__file__).with_name("routing_models.yaml")
PUBLISHED = Path(__file__).with_name("published_models.yaml")
KINDS = Path(__file__).with_name("routing_kinds.yaml")
_MOST = 0.98  # of a share that is scaled


class Residual(NamedTuple):
    """One statistic of a trace, and of synthetic routing with the parameters that were fitted to it."""

    statistic: str
    real: float
    synthetic: float
    fitted: bool  # False: a check, not fitted


@dataclass(frozen=True)
class RoutingModel:
    """Parameters of synthetic routing; :mod:`traces.synthesis.latent` explains them.

    Shares are of the variance of a router's logits, 0 to 1.
    """

    name: str
    model: str  # whose trace it was, by its name in the catalogue
    source: str  # of the trace that it was fitted to, or the rule by which it was put together
    moe_layers: int
    experts: int
    top_k: int
    preference_share: tuple[Share, ...]  # by layer: the same for all tokens of a text; the rest changes with the token
    preference_tail: float  # above 0: the lower tail of preferences is longer than the upper
    prompt_preference_share: float  # of the prompt's preferences, relative to the above
    prompt_likeness: Share  # correlation between the preferences of the prompt and of the answer
    model_share: Share  # of the preferences: the same for all texts
    autocorrelation: Annotated[tuple[float, ...], NOT_EMPTY]  # of what changes, 1, 2, ... tokens apart; then none
    state_width: int  # numbers that a token's state has, which all layers see
    layer_drift: Share  # share of that state which is new from one layer to the next
    noise_share: Share  # of what changes with the token: each layer's and expert's own
    sharpness: float  # scores are softmax(sharpness x logits)
    forecast_accuracy: Mapping[str, Share]  # accuracy@k by forecast, such as gate@1
    residuals: tuple[Residual, ...] = ()  # of the trace that it was fitted to
    text: Literal["generated", "given"] = "generated"  # of the answers in that trace: generated text repeats more

    def __post_init__(self) -> None:
        check(self, TraceError)
        if len(self.preference_share) != self.moe_layers:
            raise TraceError(f"{self.name!r}: expected {self.moe_layers} preference_shares, one per layer")
        invalid = [name for name in self.forecast_accuracy if parse_forecast_name(f"forecast/{name}/ids") is None]
        if invalid:
            raise TraceError(f"{self.name!r}: expected forecasts such as gate@1, got {invalid}")

    def __hash__(self) -> int:
        """A hash of names and sizes: mappings have none, and equal models have these in common."""
        return hash((self.name, self.source, self.moe_layers, self.experts, self.top_k, self.preference_share))

    def to_dict(self) -> dict[str, Any]:
        """YAML- and JSON-ready; ``from_dict`` is the inverse."""
        return to_dict(self)

    def rounded(self, digits: int) -> RoutingModel:
        """A copy with parameters rounded to ``digits`` decimal places."""

        def round_off(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: round_off(part) for key, part in value.items()}
            if isinstance(value, list):
                return [round_off(part) for part in value]
            return round(value, digits) if isinstance(value, float) else value

        return self.from_dict(round_off(self.to_dict()))

    @classmethod
    def from_dict(cls, values: object) -> RoutingModel:
        """Raises TraceError."""
        return from_dict(cls, values, "routing model", TraceError)


def scaled(fit: RoutingModel, preference: float, change: float) -> RoutingModel:
    """``fit`` with its preferences, and the autocorrelation of what changes, times a factor each, below 1."""
    return replace(
        fit, preference_share=tuple(min(share * preference, _MOST) for share in fit.preference_share),
        autocorrelation=tuple(min(max(one * change, -_MOST), _MOST) for one in fit.autocorrelation),
    )


@cache
def stored_models() -> Mapping[str, RoutingModel]:
    """The models that come with the package, by the name of their trace or their model: of traces, bundled ones and two
    that are not, and of published statistics. ``python -m tools.refit_routing`` and ``python -m tools.fit_published``
    wrote the files; their order is kept."""
    entries = {**read_yaml(STORED), **read_yaml(PUBLISHED)}
    return {name: RoutingModel.from_dict({"name": name, **entry}) for name, entry in entries.items()}


class Kind(NamedTuple):
    """A kind of text: its factors of a model's preferences and of the autocorrelation of what changes."""

    preference: float
    change: float
    source: str


@cache
def text_kinds() -> Mapping[str, Mapping[str, Kind]]:
    """Published kinds of text by the name of their model. Raises TraceError for a faulty file."""
    kinds: Mapping[str, Mapping[str, Kind]] = read_bundled(Mapping[str, Mapping[str, Kind]], KINDS, TraceError)
    return kinds
