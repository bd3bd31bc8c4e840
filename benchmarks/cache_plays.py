"""How the measurements of ``expert_caches`` are played: scenarios from ``expert_caches.yaml``, and what each gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from policies.mechanism.session import Session
from policies.mechanism.views import Eviction, ExpertId, LayerInput, LayerView, Routing, Upload
from policies.papers.llama_cpp import OFFLOAD_MIN_TOKENS
from policies.parts.admission import Admission
from policies.parts.assigners import FromTokens, LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import NoPlacement
from policies.parts.upload_cache import CountedSlots, InService, UploadCache
from policies.protocols import Composition, When
from sim.runs.metrics import Metrics
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.layout import DECODE
from traces.library import load_trace
from traces.synthesis.named import with_lengths
from traces.trace import Trace
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
        """Numbers that are compared."""
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


# --- answers one after the other, as a server gives them --------------------------------------------------------------


Facts = Mapping[str, float]


def answers_in_a_row(model: str, texts: Sequence[int], prompt_tokens: int, generated_tokens: int) -> Trace:
    """The prompt of the first of ``texts`` of the synthetic ``model``, and the answers of all of them."""
    trace = load_trace(with_lengths(model, max(texts) + 1, prompt_tokens, generated_tokens, ()))
    decode = trace.phase == DECODE
    answers = [np.flatnonzero(decode & (trace.sequence == text)) for text in texts]
    rows = np.concatenate([np.flatnonzero(~decode & (trace.sequence == texts[0])), *answers])
    tensors = {name: array[rows] for name, array in trace.tensors().items()}
    tensors["sequence"] = np.zeros(len(rows), np.int32)
    tensors["position"] = np.arange(len(rows), dtype=np.int32)
    return Trace.from_tensors(trace.shape, tensors, {"texts": list(texts), "of": model})


def without_the_first(all_: Facts, first: Facts, answers: int) -> dict[str, float]:
    """Speed in all of so many answers but the first, which warms the cache; what is counted runs from its start."""
    ms = answers / all_["tokens_per_s"] - 1 / first["tokens_per_s"]
    return {**all_, "tokens_per_s": round((answers - 1) / ms, 2)}


# --- routing that repeats itself, or does not -------------------------------------------------------------------------


Routed = Literal["same", "other"]


def rerouted(trace: Trace, how: Routed) -> Trace:
    """``same``: those of the answer's first token; ``other``: drawn anew, all equally likely."""
    decode = np.flatnonzero(trace.phase == DECODE)
    ids = trace.topk_ids.copy()
    ids[decode] = ids[decode[0]] if how == "same" else _drawn(len(decode), trace)
    return Trace.from_tensors(trace.shape, {**trace.tensors(), "topk_ids": ids}, {"experts": how, "of": trace.checksum})


def _drawn(tokens: int, trace: Trace) -> np.ndarray:
    layers, top_k = trace.topk_ids.shape[1:]
    order = np.random.default_rng(0).random((tokens, layers, trace.shape.experts)).argsort(axis=-1)
    return order[..., :top_k].astype(trace.topk_ids.dtype)


# --- routing alone: every upload ends within its step -----------------------------------------------------------------


TEXTS, ANSWER = 8, 64


def replayed(scenario: Scenario, prompt_tokens: int) -> dict[str, float]:
    """Hit rate and uploads a token in the answers to ``TEXTS`` prompts, one after the other, with one cache. Tokens of
    prompts, too, are steps of their own, so that the cache is warm when the first answer begins.
    """
    trace = load_trace(f"synthetic:{(scenario.model or '').partition('@')[0]}/{TEXTS}x{prompt_tokens}+{ANSWER}/none")
    session = prepare(scenario).session()
    hits = lookups = uploads = 0
    for step, token in enumerate(_in_order(trace)):
        answer, copied, served = bool(trace.phase[token]), 0, 0
        session.begin_step(step)
        for layer, ids in enumerate(trace.topk_ids[token].tolist()):
            plan = session.plan_layer(LayerInput(step, layer, "decode", Routing(tuple(sorted(ids)), (1,) * len(ids))))
            served += len(plan.gpu)
            session.end_layer()
            copied += len(list(_carried(session)))
        session.end_step()
        if answer:
            hits, lookups, uploads = hits + served, lookups + trace.topk_ids[token].size, uploads + copied
    return {"hit_rate": round(hits / lookups, 4), "uploads_per_token": round(uploads / (TEXTS * ANSWER), 2)}


def _in_order(trace: Trace) -> list[int]:
    """Rows by sequence and position."""
    return sorted(range(len(trace.sequence)), key=lambda row: (trace.sequence[row], trace.position[row]))


def _carried(session: Session) -> Iterator[ExpertId]:
    while (copy := session.next_copy()) is not None:
        session.copied(copy)
        yield copy.key


# --- everett6/moe-prefetch with a perfect forecast (experiments/e5_oracle_ceiling.py there) ---------------------------


INSERTS, DEPTHS = 2, (1, 2, 3)
RoutedTokens = Sequence[Sequence[Sequence[int]]]  # by token of the answer and layer: experts


class NextToken(UploadCache):
    """The cache with a perfect forecast: while a layer is computed, experts that the next token uses in the layer after
    it are uploaded, up to ``depth`` a layer, into free slots beyond those that misses need."""

    def __init__(self, slots: CountedSlots, routed: RoutedTokens, depth: int) -> None:
        super().__init__(LruCache(), Admission(), slots, INSERTS, frees="ahead")
        self._routed, self._depth, self._token = routed, depth, -1

    def swaps(self, view: LayerView, when: When) -> Sequence[Upload | Eviction]:
        """Uploads of the misses, and then those of the next layer."""
        updates = super().swaps(view, when)
        if view.phase != "decode" or when != "routed":
            return updates
        self._token += view.layer == 0
        layer, coming = view.layer + 1, self._routed[self._token + 1 : self._token + 2]
        if not coming or layer == len(coming[0]):
            return updates
        keys = (ExpertId(layer, expert) for expert in coming[0][layer])
        absent = [key for key in keys if key not in self._members.get(layer, ()) and key not in self._waiting]
        chosen = absent[: max(0, min(self._depth, self._room(layer) - INSERTS))]
        self._wait(layer, {key: key for key in chosen})
        return [*updates, *map(Upload, self._waiting_of[layer])] if chosen else updates

    def _kept_free(self) -> int:
        return INSERTS + self._depth


def with_depth(scenario: Scenario, depth: int) -> Prepared:
    """A scenario with this cache, ready to play."""
    prepared = prepare(scenario)
    trace = prepared.trace
    slots = CountedSlots(NoPlacement())
    cache = NextToken(slots, trace.topk_ids[trace.phase == DECODE].tolist(), depth)
    assigner = FromTokens(OFFLOAD_MIN_TOKENS * prepared.shape.top_k, LoadAll(), InService(cache))
    given = Composition(placement=slots, assigner=assigner, cache=cache, demand_slots=1, name="next token")
    return replace(prepared, given=given)
