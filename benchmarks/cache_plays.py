"""How the measurements of ``expert_caches`` are played: scenarios from ``expert_caches.yaml``, and what each gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.answers_in_a_row import Facts, answers_in_a_row, without_the_first
from benchmarks.perfect_prefetch import DEPTHS, with_depth
from benchmarks.rerouted import Routed, rerouted
from benchmarks.without_time import replayed
from sim.runs.metrics import Metrics
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.library import load_trace
from traces.synthesis.named import with_lengths
from trilane.common.yaml_files import read_yaml

HERE = Path(__file__).parent
_ABOUT = ("what", "method", "over", "both", "quantity")  # keys of an experiment that no play has
UPLOADS_US = (90, 200, 281, 350)
MEAN_EXPERT = 2.857e6  # bytes, of Qwen3-30B-A3B in Q4_K_M


class Play(NamedTuple):
    """A scenario, and how it is played."""

    scenario: Scenario
    replayed: int = 0  # tokens of a prompt
    perfect: bool = False
    answers: tuple[int, ...] = ()  # texts
    routed: Routed | None = None
    formula: bool = False

    def facts(self) -> Facts:
        """What is compared of it."""
        return by_formula(self._played()) if self.formula else self._played()

    def _played(self) -> Facts:
        if self.replayed:
            return replayed(self.scenario, self.replayed)
        if self.answers:
            all_, first = (_of_answers(self.scenario, texts) for texts in (self.answers, self.answers[:1]))
            return without_the_first(all_, first, len(self.answers))
        if self.perfect:
            plays = (play(with_depth(self.scenario, depth)).metrics for depth in DEPTHS)
            return _facts(prepare(self.scenario), min(plays, key=lambda metrics: metrics.tpot_ms))
        prepared = prepare(self.scenario)
        if self.routed is not None:
            prepared = prepared.with_trace(rerouted(prepared.trace, self.routed))
        return _facts(prepared, play(prepared).metrics)


def by_formula(facts: Facts) -> Facts:
    """With the speed of a step of Qwen3-30B-A3B by everett6/moe-prefetch, artifacts/cost_model.json: 4.18 ms, 47 us a
    miss and 142 us an upload, fitted to five speeds."""
    ms = 4.184 + 0.0469 * 48 * 8 * (1 - facts["hit_rate"]) + 0.1416 * facts["uploads_per_token"]
    return {**facts, "tokens_per_s": round(1e3 / ms, 2)}


def _of_answers(scenario: Scenario, texts: tuple[int, ...]) -> Facts:
    given, model = scenario.with_(generated_tokens=len(texts) * scenario.generated_tokens), str(scenario.model)
    lengths = (given.prompt_tokens, scenario.generated_tokens)
    trace = answers_in_a_row(f"synthetic:{model.partition('@')[0]}", texts, *lengths)
    prepared = prepare(given, trace)
    return _facts(prepared, play(prepared).metrics)


@cache
def settings() -> dict[str, Any]:
    """The file that says how they are played."""
    return dict(read_yaml(HERE / "expert_caches.yaml"))


def plays() -> Iterator[tuple[str, str, Play]]:
    """(machine, method, play) of all."""
    for machine, about in settings()["machines"].items():
        for method in about["methods"]:
            yield machine, method, play_of(machine, method)


def experiments() -> Iterator[tuple[str, dict[str, Any], Facts, float]]:
    """(machine, the experiment, what it gives, and its ``quantity`` by that of ``over``; ``both`` are changed, or one).
    """
    for machine, about in settings()["machines"].items():
        for given in about.get("experiments", ()):
            changes = changes_of(given)
            facts = play_of(machine, given["method"], changes).facts()
            shared = changes if given.get("both") else {key: changes[key] for key in ("tokens",) if key in changes}
            quantity = given.get("quantity", "tokens_per_s")
            over = play_of(machine, given["over"], shared).facts()
            yield machine, given, facts, round(facts[quantity] / over[quantity], 3)


def changes_of(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that it changes."""
    return {key: value for key, value in experiment.items() if key not in _ABOUT}


def play_of(machine: str, method: str, changes: Mapping[str, Any] | None = None) -> Play:
    """A method of a machine, with some of its fields changed."""
    about, changes = settings()["machines"][machine], dict(changes or {})
    fields = {**settings()["setting"], **about["setting"], **about["methods"][method], **changes}
    fields["generated_tokens"] = fields.pop("tokens", fields["generated_tokens"])
    given = (about["setting"], {"hardware_overrides": about["pageable"] if fields.pop("pageable", False) else {}})
    layers = (*given, about["methods"][method], changes)
    overrides = [each.get("hardware_overrides", {}) for each in layers]
    fields["hardware_overrides"] = {key: value for each in overrides for key, value in each.items()}
    fields["cached_share"] = fields.pop("slots") / about["experts"]
    if (HERE / fields["engine"]).is_file():
        fields["engine"] = str(HERE / fields["engine"])
    how = {name: fields.pop(name) for name in ("replayed", "perfect", "routed", "formula") if name in fields}
    answers = fields.pop("answers", ())
    how["answers"] = tuple(range(answers)) if isinstance(answers, int) else tuple(answers)
    lengths = (fields.get("sampled_prompt_tokens") or fields["prompt_tokens"], fields["generated_tokens"])
    model = f"synthetic:{fields['model'].partition('@')[0]}"
    fields["trace"] = with_lengths(model, 1, *lengths, fields.pop("forecasts", ()))
    return Play(Scenario(**fields), **how)


def _facts(prepared: Prepared, metrics: Metrics) -> Facts:
    scenario = prepared.scenario
    facts = {"hit_rate": round(metrics.decode_served_hit_rate or 0.0, 4)}
    if metrics.ttft_ms and scenario.generated_tokens == 1:
        return {"prompt_tokens_per_s": round((scenario.prompt_tokens or 0) / metrics.ttft_ms * 1e3, 1)}
    facts["tokens_per_s"] = round(1e3 / metrics.tpot_ms, 2)
    facts["uploads_per_token"] = round(metrics.pcie_swap_bytes_per_token / prepared.costs.experts[0].expert_bytes, 2)
    if scenario.policy == "llama.cpp@cache":
        layers = prepared.shape.moe_layers
        own = 1 - scenario.parameters.get("host_layers", layers) / layers
        facts["pool_hit_rate"] = round((facts["hit_rate"] - own) / (1 - own), 4)
    return facts


def upload_costs() -> list[tuple[float, ...]]:
    """(us of an upload, tokens/s and hit rate of the patch as shipped, and as repaired) on the first machine."""
    found = []
    for us in UPLOADS_US:
        row = [float(us)]
        for method in ("shipped-66", "repaired-66"):
            link = {"link.h2d_bytes_per_s": MEAN_EXPERT / (us * 1e-6)}
            facts = play_of("moe-prefetch", method, {"hardware_overrides": link}).facts()
            row += [facts["tokens_per_s"], facts["hit_rate"]]
        found.append(tuple(row))
    return found


def window_hits() -> dict[str, float]:
    """By machine that states ``windows``: the hit rate of a cache of the most used experts of the window before."""
    found = {}
    for machine, about in settings()["machines"].items():
        if "windows" not in about:
            continue
        given, model = about["windows"], about["setting"]["model"].partition("@")[0]
        slots, interval = given["slots"], given["interval"]
        trace = load_trace(with_lengths(f"synthetic:{model}", 1, interval, given["tokens"], ()))
        routed = trace.topk_ids.transpose(1, 0, 2).tolist()  # by layer and token; the prompt is the first window
        found[machine] = round(sum(_window_hits(layer, slots, interval) for layer in routed) / len(routed), 4)
    return found


def _window_hits(tokens: list[list[int]], slots: int, interval: int) -> float:
    hits = lookups = 0
    for start in range(interval, len(tokens), interval):
        uses = [expert for token in tokens[start - interval : start] for expert in token]
        kept = sorted(set(uses), key=lambda expert: (-uses.count(expert), expert))[:slots]
        now = [expert for token in tokens[start : start + interval] for expert in token]
        hits, lookups = hits + sum(expert in set(kept) for expert in now), lookups + len(now)
    return hits / lookups
