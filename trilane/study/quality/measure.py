"""Quality of a model under policies: every text is played under every policy, next to the exact run of the same text.

The routing is the model's, the times are the simulator's: quality and time per token are of one run. What is on the GPU
when a layer is routed, and with it what a policy changes, follows from the times of the machine in the scenario, and of
the model ``sizes_of`` (a mini model's experts are too small to be worth a copy).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from policies.registry import system
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from trilane.study.journal import Journal, Study, checksum_of, journal_of
from trilane.study.player import Progress, Watch
from trilane.study.policy_choice import PolicyChoice, policy_in
from trilane.study.quality.summary import SHARES, QualityError
from trilane.study.quality.texts import digest_of
from trilane.study.sweep.code_fingerprint import code_fingerprint, own_source

if TYPE_CHECKING:
    from realrun.generation.hosted_model import HostedModel
    from realrun.quality.played_model import GivenText, PlayedModel, Said

Row = dict[str, Any]  # of one text under one policy, JSON-ready

STUDY = Study("quality", QualityError)


@dataclass(frozen=True)
class QualitySetting:
    """Model, texts and scenario, common to all policies. ``sizes_of``: a model of the catalogue, of whose layers and
    experts times are; None: the model's own. ``vectors``: file for forecasts that need one."""

    model: HostedModel
    texts: Sequence[GivenText]
    scenario: Scenario
    sizes_of: str | None = None
    vectors: str | None = None
    exact: dict[int, Said] = field(default_factory=dict, repr=False)  # by text, once it is known

    def shape(self) -> ModelShape:
        """The shape of which times are: the model's topology, and the sizes of ``sizes_of``."""
        own = self.model.shape
        if self.sizes_of is None:
            return own
        topology = {name: getattr(own, name) for name in ("name", "moe_layers", "experts", "top_k", "norm_topk")}
        one_kind: dict[str, Any] = {"attention": None, "attention_layers": None, "moe_blocks": None, "expert_bytes": ()}
        return replace(load_model(self.sizes_of), **topology, **one_kind)

    def said_exactly(self, number: int) -> Said:
        """The output of the model for a text with its own routing."""
        from realrun.quality.played_model import said_exactly

        if number not in self.exact:
            self.exact[number] = said_exactly(self.model, self.texts[number])
        return self.exact[number]


class PolicyAt(NamedTuple):
    """A policy and its own parameters."""

    policy: str
    parameters: Mapping[str, Any]


def measure(
    setting: QualitySetting, policies: Sequence[PolicyChoice], output: Path | None = None, watch: Watch | None = None
) -> list[Row]:
    """One row for every text under every policy. With ``output``, rows are kept in its journal until all are there,
    and those that it has are not measured again. Raises QualityError, and what a simulation raises.
    """
    choices = [PolicyAt(name, own) for name, own in map(policy_in, policies)]
    for choice in choices:
        check(choice)
    if output is None:
        return list(_rows(setting, choices, None, watch))
    with journal_of(journal_path(output), STUDY) as journal:
        return list(_rows(setting, choices, journal, watch))


def journal_path(output: Path) -> Path:
    """The journal of an output, which stays: the table has means, the journal every text."""
    return output.with_name(f"{output.name}.journal")


def check(choice: PolicyAt) -> None:
    """Raises QualityError for a policy that cannot run with a model that runs, ChoiceError for its parameters."""
    needs = system(choice.policy).needs
    system(choice.policy).parse(choice.parameters)
    if needs.future or any(kind == "token" for kind, _ in needs.forecasts):
        raise QualityError(
            f"policy {choice.policy!r} needs the routing of later layers or tokens, which is not known while a model "
            f"runs; expected a policy without (trilane policies lists what each needs)"
        )


def _rows(
    setting: QualitySetting, choices: Sequence[PolicyAt], journal: Journal | None, watch: Watch | None
) -> Iterator[Row]:
    kept = {} if journal is None else journal.entries
    keys = {(c, n): key_of(setting, choices[c], n) for c in range(len(choices)) for n in range(len(setting.texts))}
    earlier = done = sum(key in kept for key in keys.values())
    for c, choice in enumerate(choices):
        missing = [n for n in range(len(setting.texts)) if keys[c, n] not in kept]
        measured = _measured(setting, choice, missing)
        for number in range(len(setting.texts)):
            if number not in missing:
                yield kept[keys[c, number]]
                continue
            row = next(measured)
            if journal is not None:
                journal.add(keys[c, number], row)
            done += 1
            if watch is not None:
                watch(Progress(len(keys), done, earlier))
            yield row


def key_of(setting: QualitySetting, choice: PolicyAt, number: int) -> str:
    """A digest of all that a row depends on."""
    model, scenario = setting.model.loaded, setting.scenario
    facts = (
        model.revision, str(model.model.dtype), choice.policy, str(sorted(choice.parameters.items())),
        str(own_source(choice.policy)), str(sorted(scenario.to_dict().items())), str(setting.sizes_of),
        str(setting.vectors), digest_of([setting.texts[number]]), code_fingerprint("realrun.quality"),
    )
    return checksum_of(*(fact.encode() for fact in facts))


def _measured(setting: QualitySetting, choice: PolicyAt, numbers: Sequence[int]) -> Iterator[Row]:
    """Rows of some texts under one policy."""
    from realrun.generation.generate import GenerateRequest
    from realrun.quality.played_model import PlayedModel

    if not numbers:
        return
    scenario = setting.scenario.with_(policy=choice.policy, parameters=dict(choice.parameters))
    prepared = _prepared(setting, scenario, setting.texts[numbers[0]])
    request = GenerateRequest(setting.model.loaded.name, [[0]], scenario, vectors=setting.vectors)
    with PlayedModel(setting.model, prepared.composition.needs, request) as played:
        for number in numbers:
            yield _row(setting, scenario, played, number, choice)


def _row(setting: QualitySetting, scenario: Scenario, played: PlayedModel, number: int, choice: PolicyAt) -> Row:
    """One text under one policy: the differences, token by token, and what the run took and changed."""
    from realrun.quality.differences import differences
    from realrun.quality.played_model import DrivingSession

    text = setting.texts[number]
    on_text = played.on(text)
    try:
        prepared = _prepared(setting, scenario, text).over(on_text.demand)
        session = prepared.session_of(DrivingSession)
        session.listener = on_text
        run = play(prepared, session)
        said = on_text.said()
    finally:
        on_text.close()
    found = differences(setting.said_exactly(number), said, text)
    told = run.to_dict()
    return {
        "model": setting.model.loaded.name, "policy": choice.policy, "parameters": dict(choice.parameters),
        "cached_share": scenario.cached_share, "text": number, "tpot_ms": told["tpot_ms"],
        **{name: told.get(name) or 0.0 for name in SHARES},
        "kl": found.kl.tolist(), "agrees": found.agrees.astype(int).tolist(), "nats": found.nats.tolist(),
        "exact_nats": found.exact_nats.tolist(), "drift_by_layer": found.drift.mean(0).tolist(),
    }


def _prepared(setting: QualitySetting, scenario: Scenario, text: GivenText) -> Prepared:
    """The scenario over a text whose routing is not known yet."""
    from policies.protocols import Needs
    from realrun.generation.generated_trace import blank_trace

    blank = blank_trace(setting.shape(), (0,), text.prompt_tokens, text.given_tokens, Needs())
    own = {"trace": "generated", "model": None, "batch": 1, "prompt_tokens": None, "sequences": None}
    return prepare(scenario.with_(**own, generated_tokens=text.given_tokens), blank)


