"""Records of the page: an answer's numbers next to the same words that the verbs print. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trilane.common.units import in_gb
from trilane.engines.accuracy.errors import ErrorToExpect
from trilane.engines.gains import in_short, owner_of
from trilane.engines.memory import SplitMemory
from trilane.engines.recommend import Recommended, RecommendQuestion, Unable
from trilane.engines.row_table import TableReads
from trilane.engines.tune.tuned import Tuned
from trilane.engines.upgrades import Upgrade
from trilane.output.figures.families import LIMIT_COLOURS, MEMORY_COLOURS, TIME_COLOURS
from trilane.output.figures.marks import GREY
from trilane.output.pages.fit_engine import PARTS, duration, milliseconds
from trilane.output.pages.flags import explained
from trilane.output.pages.output import number, percent
from trilane.output.pages.recommend import lack_text
from trilane.output.pages.upgrades import gain_text

Record = dict[str, Any]


def speed_record(tuned: Tuned) -> Record:
    """Speeds, memory and the command line of one setting."""
    return {
        "tokens_per_s": tuned.tokens_per_s, "speed": number(tuned.tokens_per_s),
        "first_ms": tuned.ttft_ms, "first": duration(tuned.ttft_ms),
        "answer_ms": tuned.answer_ms, "answer": duration(tuned.answer_ms),
        "memory": memory_record(tuned.memory, tuned.table), "command": tuned.command,
        "words": [word._asdict() for word in explained(tuned.arguments)],
        "decode": _times(tuned.decode_ms, milliseconds), "prompt": _times(tuned.prompt_ms, duration),
    }


def _times(parts: Mapping[str, float], text: Any) -> list[Record]:
    return [{"name": PARTS[name], "ms": ms, "text": text(ms), "colour": TIME_COLOURS[name]}
            for name, ms in parts.items() if ms]


def memory_record(memory: SplitMemory, reads: TableReads | None) -> list[Record]:
    """Memories that fill: of the card, of the host, what is read from a disk, and a table of rows. In bytes and GB."""
    name = "memory" if memory.one_memory else "GPU memory"
    bars = [_memory_bar(name, memory.gpu_bytes, memory.gpu_parts)]
    if not memory.one_memory:
        bars.append(_memory_bar("RAM", memory.ram_bytes, memory.host_parts))
    if memory.disk_bytes:
        bars.append(_memory_bar("disk", None, {"experts": memory.disk_bytes}))
    if reads is not None:
        parts = {"rows in memory": reads.in_memory_bytes, "rows in the file": reads.on_disk_bytes}
        bars.append(_memory_bar(reads.name, None, parts))
    return bars


def _memory_bar(name: str, size: int | None, parts: Mapping[str, int]) -> Record:
    used = sum(parts.values())
    text = in_gb(used) if size is None else f"{in_gb(used)} of {in_gb(size)}"
    return {
        "name": name, "bytes": size, "used": used, "text": f"{text} GB",
        "parts": [{"name": part, "bytes": taken, "text": f"{in_gb(taken)} GB", "colour": MEMORY_COLOURS[part]}
                  for part, taken in parts.items() if taken],
    }


def band_record(error: ErrorToExpect | None, tokens_per_s: float) -> Record:
    """The band of such speeds; nothing where none is known."""
    if error is None:
        return {"low": None, "high": None, "band": "not known"}
    low, high = error.within(tokens_per_s)
    sure = not error.few and error.like_models is not None
    return {"low": low, "high": high, "band": f"{number(low)} to {number(high)}", "sure": sure,
            "within": percent(error.band)}


# --- a row of all models ----------------------------------------------------------------------------------------------


def recommended_record(one: Recommended, question: RecommendQuestion) -> Record:
    """A model that runs, in its best format."""
    return {
        "kind": "runs", **_facts(one), **speed_record(one.tuned), **band_record(one.error, one.tuned.tokens_per_s),
        "limit": in_short(one.limit), "colour": LIMIT_COLOURS.get(one.limit or "", GREY),
        "limited_by": owner_of(one.limit), "drawback": question.has_drawback(one.tuned),
        "slow_first": one.tuned.ttft_ms > question.patience_ms,
    }


def unable_record(one: Unable) -> Record:
    """A model that does not run, and what it lacks."""
    return {"kind": "lacks", **_facts(one), "lack": lack_text(one)}


def _facts(one: Recommended | Unable) -> Record:
    return {"model": one.model, "also": list(one.also), "params": one.params, "size": in_gb(one.params),
            "weights": one.weights, "bits": number(one.bits)}


def upgrade_record(one: Upgrade) -> Record:
    """A part to buy, and what the model does then."""
    return {
        "title": one.step.title, "part": one.step.part, "watts": number(one.step.watts, 0), "gain": gain_text(one),
        "pays": one.pays, "tokens_per_s": one.tuned.tokens_per_s, "speed": number(one.tuned.tokens_per_s),
        "first": duration(one.tuned.ttft_ms), "changes": dict(one.step.changes),
    }
