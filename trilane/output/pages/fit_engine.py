"""The section of ``trilane fit`` on an engine that people run: speeds, the command line, and what better parts give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sim.costs.engine import engine_names, load_fitted
from trilane.common.units import in_gb, in_gb_and_gib
from trilane.engines.accuracy.errors import ErrorToExpect, Regime, RegimeAccuracy
from trilane.engines.card_memory import CardMemory
from trilane.engines.disk import hidden_from_gbps
from trilane.engines.memory import SplitMemory
from trilane.engines.parallel import takes_cards
from trilane.engines.question import USUAL_POLICIES, Question
from trilane.engines.row_table import TableReads
from trilane.engines.shortage import Way
from trilane.engines.speed import EngineAnswer, EngineGain
from trilane.output.pages.caveats import full_warning, limit_fact, limit_notes
from trilane.output.pages.output import Part, heading, number, pairs, percent, table
from trilane.output.pages.widths import Command

if TYPE_CHECKING:
    from trilane.fit.fit import Fit

PARTS = {  # of a time
    "attention": "attention", "others": "gates, shared experts, head", "gpu_experts": "experts on the GPU",
    "cpu_experts": "experts on the CPU", "handing_over": "handing over to the CPU", "copies": "copies of experts",
    "disk": "waiting for the disk", "sums": "sums over the cards",
    "others_and_sums": "gates, shared experts, head, sums over the cards",
}
_LEAST = 0.005  # of the whole; less is not told
_BIASED = 0.05  # smaller biases are not told
_NEAR = 256  # tokens: --prompt max comes so near the length that a model was trained for
_LONG_MS = 120e3  # longer times are in minutes
ONE_TOKEN = "- (an answer of one token)"  # in place of a time per token


def first_part(fit: Fit) -> list[Part]:
    """The question, the machine, and the engine's answer: all that is printed before policies are simulated."""
    about = filter(None, [fit.about, _length(fit.question.tokens, fit.trained_tokens)])
    title = heading(f"{fit.model} on {fit.machine}: {question_text(fit.question)}")
    warnings = [] if fit.engine is None else [f"! {text}" for text in full_warning(fit.engine.memory)]
    return [title, *about, *warnings, *engine_section(fit)]


def last_part(fit: Fit) -> list[Part]:
    """The end of the page where no policies were simulated."""
    hint = f"policies that decide at run time: --policies {USUAL_POLICIES} simulates what they could reach"
    if fit.policies_refused is not None:
        told: list[Part] = ["", heading("policies"), *fit.policies_refused.split("\n")]
        return [*(told if fit.question.policies else []), *caveats([*limit_notes(fit.question), *fit.notes])]
    return [*caveats([*limit_notes(fit.question), *fit.notes]), *(["", hint] if fit.offloads else [])]


def _length(tokens: int, trained: int | None) -> str:
    """Sentence on the length that the model was trained for, where the question comes near it or goes beyond."""
    if trained is None or tokens <= trained - _NEAR:
        return ""
    if tokens <= trained:
        return f"This is the length that the model was trained for, {trained:,} tokens with the answer."
    return f"The model was trained for {trained:,} tokens, and here are {tokens:,}: answers may be of little use."


def engine_section(fit: Fit) -> list[Part]:
    """Nothing where times come from a profile."""
    if fit.engine_refused is not None:
        return ["", heading("with an engine of today"), f"no answer: {fit.engine_refused}"]
    return [] if fit.engine is None else _answered(fit.engine, fit)


def seconds(ms: float | None) -> str:
    """A time in seconds."""
    return number(None if ms is None else ms / 1e3, 2)


def duration(ms: float) -> str:
    """A time with its unit: long ones in minutes."""
    return f"{number(ms / 60e3, 1)} min" if ms > _LONG_MS else f"{number(ms / 1e3, 2)} s"


def milliseconds(ms: float) -> str:
    """A short time with its unit."""
    return f"{number(ms, 2)} ms"


def _answered(answer: EngineAnswer, fit: Fit) -> list[Part]:
    question = fit.question
    facts = [
        ("decode", _decode(answer, question)),
        ("first token", _first(answer, question)),
        *faster_disk_fact(question.disk, answer.prompt_ms, answer.memory),
        *_larger(answer, question),
        ("experts", _experts(answer)),
        ("memory", _memory(answer)),
        *cards_fact(answer.memory),
        *table_fact(answer.table),
        *roomier_fact(fit.roomier),
    ]
    if question.generated > 1:
        facts += [("limit", limit_fact(answer.gains, question)), ("error to expect", _error(answer, question))]
    title = heading(f"with {answer.engine}: {answer.about}")
    return ["", title, pairs(facts), "", Command(answer.command)]


def explained_part(fit: Fit) -> list[Part]:
    """Gains of better parts with the engine, where it has an answer of more than one token."""
    if fit.engine is None or fit.question.generated == 1:
        return []
    return gains_section(fit.engine.engine, fit.engine.gains)


def faster_disk_fact(
    disk: str | None, prompt_ms: Mapping[str, float], memory: SplitMemory
) -> list[tuple[str, str]]:
    """Row on the rate of a disk for which a prompt would not wait."""
    missing = memory.disk_bytes / max(memory.host_bytes, 1)
    rate = hidden_from_gbps(disk, prompt_ms, missing) if disk else None
    return [("disk", f"from {number(rate)} GB/s on, prompts wait for the link again, not for the disk")] if rate else []


def roomier_fact(ways: Iterable[Way]) -> list[tuple[str, str]]:
    """Row on changes that leave room, where a memory is nearly full."""
    texts = [f"{way.options} ({number(way.tokens_per_s)} tokens/s)" for way in ways]
    return [("more room", f"with {', or with '.join(texts)}")] if texts else []


def _decode(answer: EngineAnswer, question: Question) -> str:
    if question.generated == 1:
        return ONE_TOKEN
    rate, parts = speed(answer.tpot_ms, question.batch), parts_text(answer.decode_ms, milliseconds)
    return f"{rate}, {number(answer.tpot_ms, 2)} ms a token in the mean of the answer: {parts}"


def speed(tpot_ms: float, batch: int) -> str:
    """Speed of one sequence, and of all where there are several."""
    of_one = f"{number(1000 / tpot_ms)} tokens/s"
    return of_one if batch == 1 else f"{of_one} per sequence, {number(batch * 1000 / tpot_ms)} in all"


def _first(answer: EngineAnswer, question: Question) -> str:
    pieces = f"{answer.pieces} pieces of {answer.piece_tokens}" if answer.pieces > 1 else "one piece"
    whose = "the prompt" if question.batch == 1 else "the prompts of all sequences"
    return f"{duration(answer.ttft_ms)}, {whose} in {pieces}: {parts_text(answer.prompt_ms, duration)}"


def _larger(answer: EngineAnswer, question: Question) -> list[tuple[str, str]]:
    """Row on what larger pieces of the prompt give."""
    if (larger := answer.larger_pieces) is None:
        return []
    decode = f" and {speed(larger.tpot_ms, question.batch)}" if question.generated > 1 else ""
    return [("larger pieces", f"first token in {duration(larger.ttft_ms)}{decode} with {larger.arguments}")]


def question_text(question: Question) -> str:
    """The lengths, and the batch where it is not 1."""
    batch = "" if question.batch == 1 else f", batch {question.batch}"
    return f"a prompt of {question.prompt_tokens:,} tokens and {question.generated:,} generated{batch}"


def gains_section(engine: str, gains: Iterable[EngineGain]) -> list[Part]:
    """Table of what better parts of the machine give with an engine."""
    rows = [[gain.part, percent(gain.tpot), percent(gain.ttft)] for gain in gains]
    return ["", table((f"25% better, {engine}", "more tokens/s", "more prompt tokens/s"), rows)] if rows else []


def sizes_text(parts: Mapping[str, float]) -> str:
    """The parts of a memory that there are, in GB."""
    return " + ".join(f"{name} {in_gb(size)}" for name, size in parts.items() if size)


def host_text(parts: Mapping[str, float], disk_bytes: int = 0) -> str:
    """The host's memory, of sizes in bytes, and experts for which it has no room."""
    of = ', '.join(f'{name} {in_gb(size)}' for name, size in parts.items())
    return f"{in_gb(sum(parts.values()))} GB: {of}{disk_text(disk_bytes)}"


def disk_text(disk_bytes: int) -> str:
    """Experts that are read from a disk, in words; nothing where none are."""
    return f"; {in_gb(disk_bytes)} GB of experts stay on the disk" if disk_bytes else ""


# Of ``trilane.engines.accuracy.apart``, whose rows take too long to ask for an answer
ON_SEVERAL = "11% in the median of 7 machines with several GPUs (30 speeds), those of AMD up to 35%"
ON_DISK = (
    "19 speeds of 5 machines with experts on a disk were predicted 36% off in the median, 84% of them within a factor "
    "of 1.5, most of them too fast"
)
PARTS_OF_LAYERS = (
    f"{ON_SEVERAL}; 4 of these with a part of each layer on every card, on NVIDIA's alone and without experts on the "
    "host, 26% too slow to 7% too fast"
)
CARDS_TOGETHER = (
    "33% in the median of 5 machines whose cards work together (8 speeds of vLLM); those of cards without NVLink or "
    "peer access are predicted a third to a half too slow, one with a build of 2025 2.8 times too fast"
)
WITH_VLLM = (
    "31% in the median of 4 machines with vLLM (12 speeds), most too fast: up to 14% with versions of 2026 (48% after "
    "131,072 tokens), 24% to twice with those of 2025; none with experts in the host's memory"
)


def caveats(sentences: Sequence[str]) -> list[Part]:
    """A line for each, if there are any."""
    return ["", heading("caveats"), *(f"- {line}" for line in sentences)] if sentences else []


def parts_text(parts: Mapping[str, float], unit: Callable[[float], str]) -> str:
    """The parts of a time that matter, largest first."""
    whole = sum(parts.values())
    shown = sorted((part for part in parts.items() if part[1] > _LEAST * whole), key=lambda part: -part[1])
    return ", ".join(f"{PARTS[name]} {unit(ms)}" for name, ms in shown)


def _error(answer: EngineAnswer, question: Question) -> str:
    rate, apart = 1e3 / answer.tpot_ms, apart_text(answer.engine, answer.memory)
    return error_text(answer.error, answer.regime, question.batch, rate, answer.measured, apart)


def apart_text(engine: str, memory: SplitMemory) -> str | None:
    """Errors of an answer to which rows of their own are like; None: of any other."""
    bundled = load_fitted(engine) if engine in engine_names() else None
    if bundled and memory.cards and takes_cards(bundled):
        return CARDS_TOGETHER
    if bundled and bundled.by_name:
        return WITH_VLLM
    if not memory.cards_alone:
        return None
    return PARTS_OF_LAYERS if memory.cards[0].part else ON_SEVERAL


def error_text(
    error: ErrorToExpect | None, regime: Regime, batch: int, tokens_per_s: float, measured: bool = False,
    apart: str | None = None,
) -> str:
    """Errors of decode speeds, in words, and where the speed then is; those of prompts are larger."""
    if measured:
        return "that of the engine's file on the machine where it was measured: trilane validate --engine llama.cpp"
    if batch > 1:
        return "not known: others measured one sequence at a time"
    if apart:
        return apart
    if error is None:
        return f"not known: {ON_DISK}"
    low, high = map(number, error.within(tokens_per_s))
    within = f"four of five such speeds are within {percent(error.band)}: {low} to {high} tokens/s"
    texts = [_like_models(error, regime), _like_machines(error, regime)]
    if error.like_models and error.like_models.alone:
        texts = [texts[1], f"{texts[0]}, too few to go by"]
    return "; ".join((*texts, within))


def _like_models(error: ErrorToExpect, regime: Regime) -> str:
    """The error of the model's architecture, where it was measured."""
    own, card = error.like_models, error.like_card
    if own is None:
        return "models of this architecture were never measured"
    where = f"on such machines ({regime})" if own.regime else f"on all machines, few or none of them such ({regime})"
    text = f"{percent(own.median)} with {own.architecture} models, by {_speeds(own)} {where}{_bias(own)}"
    if card is None or card.machines == own.machines:
        return text
    return f"{text}; {percent(card.median)} with such models on {card.gpu}, by {_speeds(card)}{_bias(card)}"


def _bias(own: RegimeAccuracy) -> str:
    if abs(own.bias) < _BIASED:
        return ""
    return f", predicted too {'fast' if own.bias > 0 else 'slow'} by {percent(abs(own.bias))}"


def _like_machines(error: ErrorToExpect, regime: Regime) -> str:
    like = error.like_machines
    if like is None:
        return f"no such machine ({regime}) was measured"
    engine = like.engine or "all engines"
    text = f"{percent(like.median)} with all models on such machines, by {_speeds(like)} ({engine})"
    if not error.few:
        return text
    return f"{text}, measured on {like.machines} machine{'s' * (like.machines > 1)} only"


def _speeds(errors: RegimeAccuracy) -> str:
    machines = f"{errors.machines} machine{'s' * (errors.machines > 1)}"
    return f"{errors.rows} speed{'s' * (errors.rows > 1)} of {machines}"


def _experts(answer: EngineAnswer) -> str:
    if not answer.cpu_layers:
        return "all on the CPU" if answer.cpu_only else "all on the GPU"
    if answer.gpu_experts:
        return f"{answer.gpu_experts} of each of {answer.cpu_layers} layers on the GPU"
    where = "on the CPU" if answer.decode_ms["cpu_experts"] else "in the host's memory, read over the link"
    return f"those of {answer.cpu_layers} of {answer.layers} layers {where}"


def cards_fact(memory: SplitMemory) -> list[tuple[str, str]]:
    """Row on the layers and the memory of each of several cards."""
    texts = [
        f"{card.name}: {_on_card(card)}, {in_gb(sum(card.parts.values()))} of {in_gb_and_gib(card.gpu_bytes)}"
        for card in memory.cards
    ]
    return [("GPUs, GB", "; ".join(texts))] if texts else []


def table_fact(reads: TableReads | None) -> list[tuple[str, str]]:
    """Row on a table of rows, which no other row counts."""
    if reads is None:
        return []
    rows = f"{reads.rows_per_token} rows of {number(reads.row_bytes, 0)} bytes"
    size = f"{in_gb(reads.size_bytes)} GB more, of which a token reads {rows}"
    if not reads.on_disk_bytes:
        return [(reads.name, f"{size}: the memory that is left has room")]
    return [(reads.name, f"{size}: {in_gb(reads.on_disk_bytes)} GB stay in the file, whose reads ({reads.disk}) take "
                         f"{milliseconds(reads.token_ms)} a token at most, of prompts too; no time above counts them")]


def _on_card(card: CardMemory) -> str:
    if card.part:
        return f"{percent(card.part)} of each layer"
    return f"{card.blocks} layers" if card.blocks else "unused"


def _memory(answer: EngineAnswer) -> str:
    memory = answer.memory
    held = sum(memory.gpu_parts.values())
    whole = "" if answer.cpu_only else f" of {in_gb_and_gib(memory.gpu_bytes)}"
    return f"{in_gb(held)} GB{whole} = {sizes_text(memory.gpu_parts)}{disk_text(memory.disk_bytes)}"
