"""The page of ``trilane tune --engine colibri``, or of another program that reads experts by itself."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.common.units import GB
from trilane.engines.streamed.speed import StreamedSpeed
from trilane.engines.streamed.tune import StreamedTuning, command_of
from trilane.output.pages.output import Part, heading, number, pairs, percent, table
from trilane.output.pages.widths import Command

# Rows, machines, median error and share within a factor of 1.5, of each program and model that
# ``trilane.engines.streamed.rows`` has; they take too long to ask for an answer
ERRORS = {
    ("colibri", "glm-5"): (23, 16, 0.24, 0.65), ("colibri-metal", "glm-5"): (4, 3, 0.54, 0.50),
    ("colibri-deepseek-v4", "deepseek-v4-flash"): (4, 3, 0.38, 0.50),
    ("ds4-metal", "deepseek-v4-flash"): (5, 1, 0.04, 1.00), ("ds4-cuda", "deepseek-v4-flash"): (8, 1, 0.12, 1.00),
    ("slotstream", "qwen3.8-flash-next"): (4, 1, 0.09, 1.00),
}


def streamed_tune_page(found: StreamedTuning) -> list[Part]:
    """Everything that is printed."""
    best = found.best
    facts = {
        "decode": f"{_speed(best)} tokens/s: {number(best.token_ns / 1e6, 0)} ms; {number(best.read_ns / 1e6, 0)} ms "
                  "are reads, some of them hidden",
        "experts": f"{best.slots_bytes / GB:.1f} GB in memory; {percent(best.hit_rate)} of what a token asks for",
        "disk": f"{best.disk_bytes / GB:.2f} GB a token",
        "error": _error(found),
    }
    return [
        heading(f"{best.shape.name} in {best.engine.title}"), "",
        Command(command_of(best)), "", pairs(facts.items()), "",
        heading("Other settings"), _others(found),
    ]


def readers_part(found: Sequence[StreamedTuning]) -> list[Part]:
    """Table for the pages of other engines; nothing where no such program runs."""
    if not found:
        return []
    columns = ("\nmodel", "\nprogram", "tokens\n/s", "GB in\nmemory", "\nhits", "GB read\na token", "median\nerror",
               "within\nx1.5")
    rows = [
        [one.best.shape.name, one.name, _speed(one.best), f"{one.best.slots_bytes / GB:.1f}",
         percent(one.best.hit_rate), f"{one.best.disk_bytes / GB:.2f}", *_errors(one)]
        for one in found
    ]
    return [
        "", heading("programs that read experts from the disk by themselves, in formats of their own"),
        table(columns, rows, (0, 1)), "",
        "of one sequence; a command line: trilane tune MODEL --engine PROGRAM --disk ...; times to the first token are "
        "not known; errors are those of the program's measured speeds of that model; -: there are none",
    ]


def _errors(found: StreamedTuning) -> tuple[str, ...]:
    errors = ERRORS.get((found.name, found.model))
    return tuple(map(percent, errors[2:])) if errors else ("-", "-")


def _error(found: StreamedTuning) -> str:
    errors = ERRORS.get((found.name, found.model))
    if errors is None:
        return "not known: no measured speed of this model was compared"
    rows, machines, median, within = errors
    own = "one machine" if machines == 1 else f"{machines} machines"
    return (
        f"its {rows} speeds of {own} were predicted {percent(median)} off in the median, {percent(within)} of them "
        "within a factor of 1.5, with a form that was changed once they had been compared; a GPU's own slots are not "
        "counted"
    )


def _others(found: StreamedTuning) -> Part:
    rows = [[command_of(one), _speed(one), percent(one.hit_rate), f"{one.disk_bytes / GB:.2f}"] for one in found.speeds]
    return table(["command", "tokens/s", "hits", "GB from the disk"], rows)


def _speed(speed: StreamedSpeed) -> str:
    return f"{1e9 / speed.token_ns:.2g}"
