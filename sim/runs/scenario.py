"""A scenario: the trace, model, machine, policy, memory and lengths of one run, in strict YAML or in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from policies.mechanism.host_keeping import Keeping
from sim.costs.engine import PLAIN
from sim.runs.vocabulary import MOST_GPUS
from traces.windows import RejectedDrafts
from trilane.common.errors import TrilaneError
from trilane.common.hints import NOT_EMPTY, Count, Name, Share, above, at_least, at_most, between
from trilane.common.schema import check, from_dict, to_dict
from trilane.common.yaml_files import read_yaml

Owners: TypeAlias = Literal["striped", "heat"]


class ScenarioError(TrilaneError):
    """A scenario that cannot be read or cannot be run; the message says which key, what came and what is valid."""


@dataclass(frozen=True)
class Scenario:
    """Trace, model, machine, policy, memory and lengths. Every field can be swept.

    ``cached_share`` is the share of all routed experts for which the GPU has cache slots; give it or ``gpu_memory_gb``
    (10^9 bytes; what is left after weights, KV cache, staging and reserve holds experts), or neither for the card's own
    memory. ``host_expert_gb``: the host's memory for experts, where it has no room for all of them and a ``disk`` (a
    kind, or its GB/s) holds them; ``host_keeps``: what stays in it (``policies.mechanism.host_keeping``). ``gpus``: so
    many of the machine's; None: as many as ``hardware`` names. Each has a block of layers or, with ``split_mode``
    "expert", experts of every layer, of which the first computes all else: dealt out by number or, by ``expert_owners``
    "heat", the most used first. ``layer_split``: their proportions; None: those of free memory (``sim.runs.cards``).
    ``None`` lengths mean "as recorded".
    ``noisy_forecast_recall``: recall@k, by look-ahead, of synthetic forecasts, which replace those that a policy needs
    and the trace lacks (default: that of the trace's header, if it has one). ``engine``: the software, by name or file
    (``sim.costs.engine``), of which ``engine_overrides`` replaces numbers by dotted key. ``sampled_steps`` and
    ``sampled_prompt_tokens``: a long answer from few decode steps, and a long prompt from the routing of few tokens;
    then both may be longer than the trace (``sim.runs.sampling``). ``draft_tokens``: speculative decoding of one
    sequence, of which every decode step verifies so many drafts; ``draft_acceptance``: the share accepted at each
    position, or one number (``traces.windows``; default: that of the trace's header); ``draft_offered``: the share of
    steps that have a draft at each position, or one number, where unsure drafts end a step's; ``draft_windows``:
    [drafted, accepted] of one step after the other, in place of both. ``rejected_drafts``: the experts that these are
    computed with. A draft is made by ``draft_layers`` layers like the model's, whose experts are all on the GPU, and
    its head, or takes ``draft_ns``.
    """

    trace: str = "mini-deepseek"
    model: str | None = "deepseek-v2-lite"  # None: the shape that the trace was recorded from
    hardware: str = "rtx3090-ddr4"
    hardware_overrides: Mapping[str, float | str] = field(default_factory=dict)
    policy: str = "dali"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    gpu_memory_gb: Annotated[float, above(0), at_most(1e6)] | None = None
    cached_share: Share | None = None
    host_expert_gb: Annotated[float, above(0), at_most(1e6)] | None = None
    host_keeps: Keeping = "experts"
    disk: Name | float | None = None  # None: the machine's own, if it has one
    gpus: Annotated[int, between(1, MOST_GPUS)] | None = None
    split_mode: Literal["layer", "expert"] = "layer"
    expert_owners: Owners = "striped"
    layer_split: Annotated[tuple[Annotated[float, above(0), at_most(1e6)], ...], NOT_EMPTY] | None = None  # by memory
    batch: Count = 1
    prompt_tokens: Count | None = None
    generated_tokens: Count | None = None
    prefill_chunk_tokens: Count | None = None
    sequences: tuple[int, ...] | None = None  # which of the trace's sequences, in order; None: from the first
    calibration: str | None = None  # trace to calibrate policies on; None: the bundled one that belongs to ``trace``
    noisy_forecast_recall: Annotated[tuple[Share, ...], NOT_EMPTY] | None = None
    engine: Name = PLAIN
    engine_overrides: Mapping[str, bool | float | str] = field(default_factory=dict)
    threads: Count | None = None  # of the CPU, that compute experts; None: one a fast core. Of engines in common use
    seed: int = 0
    sampled_steps: Count | None = None  # decode steps that are played at most; None: all
    sampled_prompt_tokens: Count | None = None  # tokens of each prompt that are routed one by one at most; None: all
    draft_tokens: Annotated[int, between(0, 64)] = 0
    draft_acceptance: Share | Annotated[tuple[Share, ...], NOT_EMPTY] | None = None
    draft_offered: Share | Annotated[tuple[Share, ...], NOT_EMPTY] | None = None  # None: as many as draft_tokens
    draft_windows: Annotated[tuple[tuple[int, int], ...], NOT_EMPTY] | None = None
    rejected_drafts: RejectedDrafts = "recorded"
    draft_layers: Annotated[float, at_least(0), at_most(1000)] = 1.0  # 0: looked up in the text, which costs nothing
    draft_again: bool = False  # kept tokens are computed again after a rejected draft: states cannot be rolled back
    draft_ns: Annotated[int, at_least(0)] | None = None  # of the GPU, a draft; None: what ``draft_layers`` take

    def __post_init__(self) -> None:
        for name in (
            "sequences", "noisy_forecast_recall", "draft_acceptance", "draft_offered", "draft_windows", "layer_split",
        ):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(tuple(one) if isinstance(one, list) else one for one in value))
        check(self, ScenarioError)
        if self.gpu_memory_gb is not None and self.cached_share is not None:
            raise ScenarioError("give gpu_memory_gb or cached_share, not both")
        if self.prefill_chunk_tokens is not None and self.sampled_prompt_tokens is not None:
            raise ScenarioError("give prefill_chunk_tokens or sampled_prompt_tokens, not both")
        if self.draft_tokens and self.batch > 1:
            raise ScenarioError(f"draft_tokens: expected batch 1, whose drafts a step verifies, got {self.batch}")
        for name, does in (("draft_acceptance", "is accepted"), ("draft_offered", "is made")):
            if isinstance(shares := getattr(self, name), tuple) and list(shares) != sorted(shares, reverse=True):
                raise ScenarioError(
                    f"{name}: expected shares that do not rise from one position to the next, since a draft {does} "
                    f"only if all before it are, got {', '.join(f'{share:g}' for share in shares)}"
                )
        for drafted, accepted in self.draft_windows or ():
            if not 0 <= accepted <= drafted <= self.draft_tokens:
                raise ScenarioError(
                    f"draft_windows: expected 0 <= accepted <= drafted <= draft_tokens ({self.draft_tokens}), got "
                    f"[{drafted}, {accepted}]"
                )

    @property
    def sampled(self) -> bool:
        """True if some steps or prompt tokens stand for others (``sim.runs.sampling``)."""
        return self.sampled_steps is not None or self.sampled_prompt_tokens is not None

    def to_dict(self) -> dict[str, Any]:
        """A YAML- and JSON-ready dict; ``from_dict`` is its inverse."""
        return to_dict(self)

    def with_(self, **changes: Any) -> Scenario:
        return replace(self, **changes)

    def with_header(self, provenance: Mapping[str, Any]) -> Scenario:
        """Fill in what a trace's header states of noisy forecasts and drafts, unless the scenario states its own."""
        names = ("noisy_forecast_recall", "draft_acceptance")
        return self.with_(**{name: provenance.get(name) for name in names if getattr(self, name) is None})

    @classmethod
    def from_dict(cls, values: object, where: str = "scenario") -> Scenario:
        """Build from a mapping. Raises ScenarioError for an unknown key, and a value that its key cannot have."""
        return from_dict(cls, values, where, ScenarioError)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Scenario:
        """Read a scenario file. Raises ScenarioError with the file's name."""
        return cls.from_dict(read_yaml(path, ScenarioError), str(path))
