"""The page of ``trilane tune``: the line to paste, what it gives, what it was chosen from, and what would be faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trilane.common.units import GB, MIB, in_gb, in_gb_and_gib
from trilane.engines.question import KV_BITS
from trilane.engines.routing import statistics_text
from trilane.engines.tune.drafts import MEASURED_LESS, WORTH_DRAFTING, DraftAnswer, Drafted
from trilane.engines.tune.settings import WORTH_CACHING, WORTH_FEWER_BITS, WORTH_SETTING
from trilane.engines.tune.tune import Rival, TuneStart, Tuning
from trilane.engines.tune.tuned import Tuned
from trilane.output.pages.caveats import limit_fact, tune_caveats, tune_warnings
from trilane.output.pages.fit_engine import (
    ONE_TOKEN,
    PARTS,
    apart_text,
    cards_fact,
    caveats,
    disk_text,
    duration,
    error_text,
    faster_disk_fact,
    gains_section,
    host_text,
    milliseconds,
    parts_text,
    question_text,
    roomier_fact,
    seconds,
    sizes_text,
    speed,
    table_fact,
)
from trilane.output.pages.output import Part, heading, number, pairs, percent, signed_percent, table
from trilane.output.pages.widths import Command

if TYPE_CHECKING:
    from trilane.study.validation.tune_check import Checked  # runs llama.cpp


_COMPARED = {
    "decode": "by the time per token alone", "prompt": "by the time to the first token alone",
    "both": "by the time until the last token",
}
_SAME = 0.005  # of a time; smaller differences are not told
_TIMES = ("tokens/s", "first token s", "last token s")
_TEXTS = (0, 4, 5)  # columns before and behind them
_DRAFTS_ABOUT = (
    "accepted: drafts that the model would have written, of those behind accepted ones; it depends on the text, and is "
    f"not predicted. On the one machine with published figures drafts gave {MEASURED_LESS} less than this predicts"
)
_DRAFTS_PUBLISHED = (
    "; 76% (Gemma 4 31B) and 88% (Qwen3.6-35B-A3B) were published of llama.cpp; --draft-acceptance names yours"
)
_BAR = 40  # letters of the longest bar


def tune_page(tuning: Tuning) -> list[Part]:
    """Everything that is printed, without the timeline."""
    return [*line_part(tuning), *facts_part(tuning)]


def line_part(tuning: TuneStart | Tuning) -> list[Part]:
    """The line to paste, which is known before everything else."""
    warnings = [f"! {text}" for text in tune_warnings(tuning)]
    return [*_title(tuning), *warnings, "", Command(tuning.best.command), ""]


def facts_part(tuning: Tuning) -> list[Part]:
    """Speeds and memory of the line, and what it was chosen from."""
    drafts = drafts_section(tuning.drafts, tuning.question.draft_acceptance is not None)
    return [*_best(tuning), *_rivals(tuning), *drafts, *_other_engines(tuning),
            *caveats(tune_caveats(tuning))]


def _title(tuning: TuneStart | Tuning) -> list[Part]:
    question = tuning.question.fit
    wider = question.tokens > question.prompt_tokens + question.generated
    window = f", in a window of {question.tokens:,}" if wider else ""
    title = heading(f"{tuning.model} on {tuning.machine}: {question_text(question)}{window}")
    return [title, *filter(None, [tuning.about])]


# --- the best setting -------------------------------------------------------------------------------------------------


def _best(tuning: Tuning) -> list[Part]:
    return [pairs(tune_facts(tuning))]


def tune_facts(tuning: Tuning) -> list[tuple[str, str]]:
    """Names and sentences: speeds, memory, limit, error to expect."""
    best = tuning.best
    return [
        ("decode", _decode(tuning)),
        ("first token", f"{duration(best.ttft_ms)}: {parts_text(best.prompt_ms, duration)}"),
        *faster_disk_fact(tuning.question.fit.disk, best.prompt_ms, best.memory),
        ("last token", duration(best.answer_ms)),
        *_memory(tuning),
        *table_fact(best.table),
        *roomier_fact(tuning.roomier),
        *_of_decode(tuning),
        ("engine", f"{best.engine}: {tuning.engine_about}"),
        *_faster_engine(tuning),
        *_faster_cache(tuning),
    ]


def _of_decode(tuning: Tuning) -> list[tuple[str, str]]:
    """Limit of decoding, and error of its speed; an answer of one token has neither."""
    question = tuning.question.fit
    if question.generated == 1:
        return []
    phase = "" if tuning.question.goal == "decode" else "decode: "
    return [("limit", f"{phase}{limit_fact(tuning.gains, question)}"), ("error to expect", _error(tuning))]


def _decode(tuning: Tuning) -> str:
    best, question = tuning.best, tuning.question.fit
    if question.generated == 1:
        return ONE_TOKEN
    rate = speed(best.tpot_ms, question.batch)
    return f"{rate}, {number(best.tpot_ms, 2)} ms a token: {parts_text(best.decode_ms, milliseconds)}"


def _faster_engine(tuning: Tuning) -> list[tuple[str, str]]:
    """The fastest of the other engines, where it is faster."""
    rival = min(tuning.others, key=lambda rival: rival.reason.slower, default=None)
    if rival is None or rival.reason.slower > -_SAME:
        return []
    return [("other engines", f"{rival.tuned.engine} is predicted to be {_faster(rival.reason.slower)} {_by(tuning)}; "
                              f"its command line is below")]


def _faster_cache(tuning: Tuning) -> list[tuple[str, str]]:
    """The best setting with a cache of experts, where it saves enough to rely on."""
    rival = tuning.cached
    if rival is None or rival.reason.slower > -WORTH_CACHING / (1 + WORTH_CACHING):
        return []
    fit, said = tuning.question.fit, f"{_faster(rival.reason.slower)} {_by(tuning)}"
    share = min((rival.tuned.cache_mib or 0) * MIB / fit.model_shape.routed_bytes, 1.0)
    statistics = statistics_text(fit, share)
    return [
        ("experimental", f"a cache of experts is predicted to be {said}; its costs are estimates, losses were "
                         f"measured, and its error is not known: {rival.tuned.command}"),
        *([("its hit rates", f"from {statistics}")] if statistics else []),
    ]


def _error(tuning: Tuning) -> str:
    """Error of decode."""
    rate = 1e3 / tuning.best.tpot_ms
    apart = apart_text(tuning.best.engine, tuning.best.memory)
    return error_text(tuning.error, tuning.regime, tuning.question.fit.batch, rate, tuning.measured, apart)


def _memory(tuning: Tuning) -> list[tuple[str, str]]:
    """By kind, of the GPU and of the host; of all where there is no GPU."""
    best, memory = tuning.best, tuning.best.memory
    parts = memory.gpu_parts
    of_all = f" of {in_gb_and_gib(memory.gpu_bytes)}" if tuning.memory_known else ""
    whole = f"{in_gb(sum(parts.values()))} GB{of_all} = {sizes_text(parts)}"
    if best.cpu_only or tuning.regime == "unified":
        return [("memory", f"{whole}{disk_text(memory.disk_bytes)}")]
    host = host_text(memory.host_parts, memory.disk_bytes)
    return [("GPU memory", whole), *cards_fact(memory), *_division(best), ("host memory", host)]


def _division(best: Tuned) -> list[tuple[str, str]]:
    """Row on why the layers are divided so over several cards."""
    if not best.memory.cards:
        return []
    if best.memory.cards[0].part:
        return [("layers", "a part of each on every card, with sums over the cards after attention and the experts")]
    if sum(bool(card.blocks) for card in best.memory.cards) == 1:
        return [("layers", "all on the quickest card: on others they would take longer")]
    if best.host_layers:
        return [("layers", "as many as the quickest cards take: experts of the first ones are on the CPU, so that with "
                           "equal numbers the first card would be empty and the last full")]
    return [("layers", "-ts counts them with the output layer, the quickest card first, as CUDA numbers cards")]


# --- what it was chosen from ------------------------------------------------------------------------------------------


def _rivals(tuning: Tuning) -> list[Part]:
    tokens = tuning.question.fit.generated
    about = f"chosen from {number(tuning.settings, 0)} settings, compared {_by(tuning)}"
    rows = [
        [name, *_numbers(rival.tuned, tokens), _loss(tuning.best, rival), _changed(tuning.best, rival.tuned)]
        for name, rival in _named(tuning).items()
    ]
    best = ["best", *_numbers(tuning.best, tokens), "", ""]
    columns = ("setting", *_TIMES, "why it lost", "its arguments")
    return ["", heading(about), table(columns, [best, *rows], _TEXTS, wrap=True), "", _rule(tuning), *_hits(tuning)]


def _named(tuning: Tuning) -> dict[str, Rival]:
    """The settings that lost, by what is said of them; each once."""
    kv = f"KV in {tuning.other_kv.tuned.kv}" if tuning.other_kv else ""
    named = {
        "runner-up": tuning.runner_up, "engine's own": tuning.usual, kv: tuning.other_kv, "with a cache": tuning.cached
    }
    rivals: dict[str, Rival] = {}
    for name, rival in named.items():
        if rival is not None and all(rival.tuned != other.tuned for other in rivals.values()):
            rivals[name] = rival
    return rivals


def _rule(tuning: Tuning) -> str:
    """Sentence on how settings are compared."""
    bits = f", where a KV cache of fewer bits must save {percent(WORTH_FEWER_BITS)}" if tuning.other_kv else ""
    return f"of all within {percent(WORTH_SETTING)} of the least time the nearest to the engine's own{bits}"


def _hits(tuning: Tuning) -> list[str]:
    """Sentence on the hit rate of the cache of experts, and whose statistics it rests on."""
    if tuning.cached is None or tuning.cached.tuned.hit_rate is None:
        return []
    statistics = statistics_text(tuning.question.fit, None)
    return [f"the cache hits {percent(tuning.cached.tuned.hit_rate)}{f' with {statistics}' if statistics else ''}"]


def _by(tuning: Tuning) -> str:
    return _COMPARED[tuning.question.goal]


def _numbers(tuned: Tuned, generated: int) -> list[str]:
    rate = number(1000 / tuned.tpot_ms) if generated > 1 else "-"
    return [rate, seconds(tuned.ttft_ms), seconds(tuned.answer_ms)]


def _loss(best: Tuned, rival: Rival) -> str:
    """By how much it is slower, and the part of the time that grows most."""
    reason = rival.reason
    if reason.slower < -_SAME:
        cached = best.cache_mib is None and rival.tuned.cache_mib is not None
        fewer_bits = KV_BITS[rival.tuned.kv] < KV_BITS[best.kv] and not cached
        return f"{_faster(reason.slower)}, which is too little {'for fewer bits' if fewer_bits else 'to rely on'}"
    if reason.slower < _SAME or reason.part is None or reason.part_ms is None:
        return "as fast"
    unit = milliseconds if reason.phase == "decode" else duration
    where = "a token" if reason.phase == "decode" else "in the prompt"
    return f"{percent(reason.slower)} slower: {PARTS[reason.part]} {unit(reason.part_ms)} more {where}"


def _changed(best: Tuned, other: Tuned) -> str:
    """The arguments that the best setting does not have, or that it alone has."""
    more = " ".join(word for word in other.arguments if word not in best.arguments)
    less = " ".join(word for word in best.arguments if word not in other.arguments)
    return more or (f"without {less}" if less else "")


# --- other engines, better parts --------------------------------------------------------------------------------------


def _other_engines(tuning: Tuning) -> list[Part]:
    tokens = tuning.question.fit.generated
    rows = [[rival.tuned.engine, *_numbers(rival.tuned, tokens), _compared(rival)] for rival in tuning.others]
    lines = ((f"{rival.tuned.engine}:", rival.tuned.command) for rival in tuning.others)
    commands = [part for engine, line in lines for part in ("", engine, Command(line))]
    refused = [f"{name}: {why.removeprefix(f'{name}: ')}" for name, why in tuning.refused.items()]
    if not rows:
        return ["", *refused] if refused else []
    columns = ("other engines", *_TIMES, f"than {tuning.best.engine}")
    return ["", table(columns, rows, _TEXTS, wrap=True), *commands, *refused]


def _compared(rival: Rival) -> str:
    slower = rival.reason.slower
    if abs(slower) < _SAME:
        return "as fast"
    return f"{percent(slower)} slower" if slower > 0 else _faster(slower)


def _faster(slower: float) -> str:
    """Words for a time over another, minus 1, below 0: by how much the speed is higher; twice or more as a factor."""
    ratio = 1 / (1 + slower)
    return f"{percent(ratio - 1)} faster" if ratio < 2 else f"{number(ratio)}x as fast"


# --- predicted and measured -------------------------------------------------------------------------------------------


def check_page(checked: Sequence[Checked]) -> list[Part]:
    """Predicted times and memory next to those that the engine had on this machine."""
    kinds = list(dict.fromkeys(kind for one in checked for kind in one.memory))
    rows = [
        [one.name, *_numbers(one.tuned, 2)[:2], number(one.tpot_ms and 1000 / one.tpot_ms), seconds(one.ttft_ms),
         signed_percent(one.decode_error), signed_percent(one.prompt_error),
         *(_sizes(one.memory.get(kind)) for kind in kinds), _changed(checked[0].tuned, one.tuned)]
        for one in checked
    ]
    times = (*_TIMES[:2], "measured", "measured", "error", "error")
    columns = ("run here", *times, *(f"{kind} GB" for kind in kinds), "its arguments")
    meaning = "error: predicted over measured speed, minus 1; GB: predicted / reported by the engine"
    refused = [f"{one.name} was refused: {one.refused}" for one in checked if one.refused]
    return ["", heading("predicted and measured on this machine"), table(columns, rows), "", meaning, *refused]


def _sizes(sizes: tuple[int, int] | None) -> str:
    return "-" if sizes is None else " / ".join(f"{size / GB:.2f}" for size in sizes)


def drafts_section(answer: DraftAnswer | None, asked: bool) -> list[Part]:
    """Nothing without drafts. ``asked``: whether the acceptance was."""
    if answer is None:
        return []
    rates = tuple(f"tokens/s, {percent(share)} accepted" for share in answer.acceptances)
    if not answer.choices:
        return ["", f"no room for drafts by the model's own layers, which take {in_gb(answer.layer_bytes)} GB"]
    title = f"drafts by the model's own layers (--spec-type draft-mtp), which take {in_gb(answer.layer_bytes)} GB"
    plain = answer.plain_tokens_per_s
    rows = [["none", number(1000 / plain, 2), "", *[number(plain)] * len(rates)]]
    rows += map(_row, answer.choices)
    shown = table(("drafts", "ms a step", "worth it from", *rates), rows)
    return ["", heading(title), shown, "", f"{_DRAFTS_ABOUT}{'' if asked else _DRAFTS_PUBLISHED}", *_line(answer)]


def _row(drafted: Drafted) -> list[str]:
    least = "never" if drafted.break_even is None else percent(drafted.break_even)
    return [number(drafted.drafts, 0), number(drafted.step_ms, 2), least, *map(number, drafted.tokens_per_s.values())]


def _line(answer: DraftAnswer) -> list[str]:
    least = percent(answer.acceptances[0])
    if answer.command is None or answer.best is None:
        return [f"with {least} accepted none saves {percent(WORTH_DRAFTING)}"]
    return ["", f"best with {least} accepted:", Command(answer.command)]


def explained_page(tuning: Tuning) -> list[Part]:
    """The time of one token, part by part, and in how many layers; and what better parts of the machine gain. Nothing
    of an answer of one token."""
    if tuning.question.fit.generated == 1:
        return []
    columns = ("part", "layers", "ms a layer", "ms", "share", "")
    parts = table(columns, _timeline(tuning.best), (0, 5))
    gains = gains_section(tuning.best.engine, tuning.gains)
    return ["", heading("one token, in the mean of the answer"), parts, *gains]


def _timeline(tuned: Tuned) -> Iterator[list[str]]:
    longest = max(tuned.decode_ms.values())
    for part, ms in tuned.decode_ms.items():
        if layers := _layers(tuned, part):
            ms_a_layer = number(ms / layers, 3) if not part.startswith("others") else "-"
            yield [PARTS[part], number(layers, 0), ms_a_layer, number(ms, 2), percent(ms / tuned.tpot_ms),
                   "#" * round(_BAR * ms / longest)]


def _layers(tuned: Tuned, part: str) -> int:
    """In which a part takes time."""
    host, cached = tuned.host_layers, tuned.hit_rate is not None
    whole = tuned.layers
    layers = {
        "gpu_experts": whole if cached or tuned.gpu_experts else whole - host,
        "cpu_experts": (0 if cached else host) if "gpu_experts" in tuned.decode_ms else whole,
        "handing_over": host, "copies": host if cached else 0,
    }
    return layers.get(part, whole)
