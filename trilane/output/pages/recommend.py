"""The page of ``trilane recommend``: all models on one machine, and the command line of the one that was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.common.units import GB, in_gb
from trilane.engines.accuracy.errors import ErrorToExpect
from trilane.engines.gains import in_short
from trilane.engines.recommend import (
    PATIENCE_S,
    USES,
    Recommendation,
    Recommended,
    RecommendQuestion,
    Sort,
    Unable,
)
from trilane.engines.refusals import FULL
from trilane.engines.tune.tuned import Tuned
from trilane.output.pages.caveats import limit_notes
from trilane.output.pages.fit_engine import caveats, table_fact
from trilane.output.pages.output import Part, heading, legend, number, percent, table
from trilane.output.pages.widths import Command

_COLUMNS = ("\nmodel", "params\n10^9", "\nformat", "\nbits", "tokens\n/s", "first\ns", "GPU\nGB", "host\nGB", "\nerror",
            "\nlimit")
_LEGEND = {
    "format": "as published, if in fewer than 16 bits; else the most bits with which an answer takes at most a quarter "
              "longer than with the fewest, from four on; fewer, to q2_k, where those do not run or take too long",
    "bits": "of a weight of the experts",
    "first": "time to the first token; !: more than {patience} s, which is long for {use}",
    "GB": "10^9 bytes that it takes, with what the system keeps (of the host's memory 4.0); !: more than 95% of what "
          "there is",
    "+": "GB of experts behind it are read from the disk as they are used (--disk); the page cache fills the memory",
    "error": "four of five such tokens/s are within it: x / 1.2 to x * 1.2 for 20%; *: fewer than five such machines "
             "were measured, or this architecture never was; -: not known, trilane tune MODEL says more",
    "limit": "the part that limits tokens/s: memory of the GPU, its bandwidth, that of the RAM, ...",
}
_MODULES = {"GiB": "2^30 bytes, in which modules are sold (--ram-gb); GB: 10^9 bytes"}
_MEMORIES = {"GPU": "GPU memory", "host": "RAM", "only": "memory"}
_UNKNOWN_RAM = "! the size of the host's memory is not named (--ram-gb): it is taken as enough"
_NO_MORE = "more than fits here"
_SORTED = {"size": "largest first", "speed": "most tokens/s first", "first": "soonest first token first"}


def recommend_page(answer: Recommendation, sort: Sort) -> list[Part]:
    """Everything but the upgrades."""
    title = heading(f"models on {answer.machine}, for {answer.question.use}: {_lengths(answer.question)}")
    runs, asked = answer.sorted_by(sort), bool(answer.formats)
    lines = [*_table(answer, runs, sort), *_unable(answer.unable), *_formats(answer)]
    hint = [] if asked else ["", "trilane recommend --for MODEL prints a model's command line, and its other formats"]
    unknown = [] if answer.ram_known else [_UNKNOWN_RAM]
    return [title, answer.about, *unknown, *lines, *_alike(runs), _legend(answer),
            *caveats([*_tables(runs), *limit_notes(answer.asked.fit), *answer.machine_notes]), *hint]


def _tables(runs: Sequence[Recommended]) -> list[str]:
    """Sentences on tables of rows, which no column counts."""
    facts = [(one.model, *fact) for one in runs for fact in table_fact(one.tuned.table)]
    return [f"{model}: {name} of {text}" for model, name, text in facts]


def _legend(answer: Recommendation) -> Part:
    """The columns; of what does not run sizes alone."""
    texts = {name: text for name, text in _LEGEND.items() if answer.runs and (name != "+" or answer.reads_disk)}
    texts = {**texts, **(_MODULES if answer.unable else {})}
    use = answer.question.use
    return legend({name: text.format(patience=PATIENCE_S[use], use=use) for name, text in texts.items()})


def _lengths(question: RecommendQuestion) -> str:
    prompt, generated, window = USES[question.use]
    return f"a prompt of {prompt:,} tokens and {generated:,} generated, in a window of {window:,}"


def _table(answer: Recommendation, runs: Sequence[Recommended], sort: Sort) -> list[Part]:
    if not runs:
        return ["", "no model runs"]
    rows = [
        [one.model, number(one.params / GB), one.weights, number(one.bits), *_numbers(one.tuned, answer.question),
         _error(one.error), in_short(one.limit)]
        for one in runs
    ]
    marks = "; those with ! or + stand last" if 0 < sum(map(answer.has_drawback, runs)) < len(runs) else ""
    return ["", heading(f"what runs, {_SORTED[sort]}{marks}"), table(_COLUMNS, rows, (0, 2, 9), wrap=True)]


def _error(error: ErrorToExpect | None) -> str:
    """The band of such speeds; marked where they are of few machines, or none is of this architecture."""
    if error is None:
        return "-"
    return f"{percent(error.band)}{'*' * (error.few or not error.like_models)}"


def _alike(runs: Sequence[Recommended]) -> list[Part]:
    """The models that a row stands for."""
    lines = [f"{one.model}: {', '.join(one.also)}" for one in runs if one.also]
    return ["", heading("the same numbers hold for models of the same shape"), *lines] if lines else []


def _numbers(tuned: Tuned, question: RecommendQuestion) -> list[str]:
    first = f"{number(tuned.ttft_ms / 1e3)}{_mark(tuned.ttft_ms > question.patience_ms)}"
    return [number(1000 / tuned.tpot_ms), first, *_memories(tuned)]


def _memories(tuned: Tuned) -> list[str]:
    """GB of the GPU's memory and of the host's, or of the only one."""
    memory = tuned.memory
    gpu, host = (number(sum(parts.values()) / GB) for parts in (memory.gpu_parts, memory.host_parts))
    disk = f"+{number(memory.disk_bytes / GB)}" if memory.disk_bytes else ""
    if memory.one_memory:
        only = f"{gpu}{disk or _full(memory.gpu_share)}"
        return ["-", only] if tuned.cpu_only else [only, "-"]
    return [f"{gpu}{_full(memory.gpu_share)}", f"{host}{disk or _full(memory.host_share)}"]


def _full(share: float | None) -> str:
    """The mark of a memory of which little is left."""
    return _mark(share is not None and share > FULL)


def _mark(drawback: bool) -> str:
    return "!" if drawback else ""


def _unable(unable: Sequence[Unable]) -> list[Part]:
    if not unable:
        return []
    rows = [[one.model, number(one.params / GB), one.weights, lack_text(one)] for one in unable]
    columns = (*_COLUMNS[:3], "\nwhat it lacks")
    return ["", heading("what does not run, the least missing first"), table(columns, rows, (0, 2, 3), wrap=True)]


def lack_text(one: Unable) -> str:
    """Memory that is missing, and the speed with it."""
    if one.short is not None:
        kind, there = _MEMORIES[one.short.memory], f"of {in_gb(one.short.there_bytes)}"
        return f"needs {in_gb(one.short.needed_bytes)} GB of {kind}, {_NO_MORE if kind == 'RAM' else there}"
    then = "" if one.then is None else f"; then {number(1000 / one.then.tpot_ms)} tokens/s"
    return f"needs {one.ram_gib} GiB of RAM{then}"


def _formats(answer: Recommendation) -> list[Part]:
    """The command line of the model that was asked for, and its formats."""
    if not answer.formats:
        return []
    command = ["", Command(answer.runs[0].tuned.command)] if answer.runs else []
    rows = [
        [one.weights, number(one.bits), *(_numbers(one.tuned, answer.question) if one.tuned else ["-", "-", "-", "-"])]
        for one in answer.formats
    ]
    return [*command, "", heading("its formats; -: does not run"), table(("\nformat", "\nbits", *_COLUMNS[4:8]), rows)]
