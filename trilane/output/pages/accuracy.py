"""The accuracy table, and one measured row explained, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from trilane.engines.accuracy.apart import WITHIN
from trilane.engines.accuracy.errors import QUANTITIES, Quantity, Speeds, error_of, factor, measured, regime_of_row
from trilane.engines.accuracy.measured_rows import MeasuredRow
from trilane.engines.accuracy.pairs import MOVED
from trilane.engines.accuracy.scores import DATA_SHEET, HELD_OUT, LLMFIT, SHIPPED, Explanation, Scores, TimePart
from trilane.engines.accuracy.slow_machines import SlowCause
from trilane.output.pages.output import Part, heading, legend, number, percent, reasons_table, signed_percent, table
from trilane.output.pages.slow_machine import slow_part

FAR_OFF = 0.5
_MOST_FAR = 8
_MOST_ROWS = 100
_ROW_COLUMNS = ("row", "speed", "model", "machine", "regime", "measured", "predicted")
_TITLES: Mapping[Quantity, str] = {
    "decode": "Tokens a second of one sequence, predicted / measured - 1",
    "prompts": "Prompt tokens a second, predicted / measured - 1",
}
_NAMES = {
    HELD_OUT: "the fit of the engine's numbers left out the rows of the row's own machine; their starts did not",
    SHIPPED: "with the numbers that come with the program, which know all bundled rows",
    DATA_SHEET: "bytes over data-sheet bandwidths; of prompts 16-bit products and copies over the link",
    LLMFIT: "0.8 / (active bytes in DRAM / its bandwidth + those in GPU memory / 0.55 of its bandwidth)",
}
_MEANINGS = {
    "median": "of the errors without their signs, over rows; machine: over machines, of each the median of its rows",
    "bias": "median of the errors with their signs; above 0 is predicted too fast",
    "p90": "nine of ten rows have a smaller error",
    "in band": "rows inside the band that is printed with such speeds, which rows of other machines give; aim: 80 %",
}
_PAIR_COLUMNS = ("speed", "setting", "pairs", "machines", "right", "ratio")
_PAIR_MEANINGS = {
    "right": "share of pairs of which the faster one is predicted to be that",
    "ratio": "predicted gain over the measured one, as ratios of speeds; median; below 1 is understated",
}
_SETTINGS = {
    "engine": "engine", "weights": "format", "cpu_layers": "--n-cpu-moe", "gpu_experts": "experts on the GPU",
    "threads": "threads", "repacked": "-rtr", "kv_bits": "format of keys and values", "depth_tokens": "depth",
    "copies": "--mmap", "numa": "--numa", "sm": "-sm", "prompt_depth_tokens": "depth", "piece_tokens": "-ub",
}


def accuracy_page(scores: Scores, own: str | None = None) -> list[Part]:
    """Errors by group, next to those of the closed forms, and the rows that are furthest off.

    ``own``: the file of one's own rows; the measured and the predicted speed of each are shown, a hundred at most.
    """
    rows, machines = len(scores.rows), len({row.machine for row in scores.rows})
    counts = f"{rows} row{'s' * (rows > 1)} of {machines} machine{'s' * (machines > 1)}"
    first, *others = scores.predictions
    columns = [f"\n{first}", "\nrows", "\nmachines", "\nmedian", "machine\nmedian", "\np90", "\nbias", "in\nband",
               *(f"median:\n{name}" for name in others)]
    title = heading(f"{counts}: {own or 'speeds that other people measured'}")
    parts: list[Part] = [title, "", *(_rows(scores) if own else [])]
    for quantity in QUANTITIES:
        if lines := list(_lines(scores, quantity)):
            parts += [heading(_TITLES[quantity]), table(columns, lines), ""]
    reasons = dict(Counter(scores.left_out.values()).most_common())
    not_asked = reasons_table(f"{len(scores.left_out)} rows were not asked", "rows", reasons)
    parts += [*_pairs(scores), *_far(scores), *_apart(scores), *not_asked]
    return [*parts, legend({**_MEANINGS, **{name: _NAMES[name] for name in scores.predictions}}).lstrip("\n")]


def _lines(scores: Scores, quantity: Quantity) -> Iterator[list[str]]:
    """Cells; a line with the kind of group stands above its groups."""
    first, *others = scores.predictions
    before = "all"
    width = 8 + len(others)
    for (of, by, group), errors in scores.table().items():
        if of != quantity:
            continue
        if by != before:
            yield [f"by {by}", *[""] * (width - 1)]
        before, own = by, errors[first]
        yield [
            group if by == "all" else f"  {group}", str(own.rows), str(own.machines), percent(own.median),
            percent(own.by_machine), percent(own.p90), signed_percent(own.bias), percent(own.inside),
            *(percent(errors[other].median) if other in errors else "-" for other in others),
        ]


def _apart(scores: Scores) -> list[Part]:
    """Errors of rows to which nothing was fitted."""
    lines = [
        [one.group, one.quantity, str(one.errors.rows), str(one.errors.machines), percent(one.errors.median),
         percent(one.errors.by_machine), percent(one.errors.p90), signed_percent(one.errors.bias), percent(one.within)]
        for one in scores.apart
    ]
    if not lines:
        return []
    columns = ["", "speed", "rows", "machines", "median", "machine", "p90", "bias", f"within {WITHIN:g}x"]
    title = "Rows to which nothing was fitted, with the engines as shipped"
    return [heading(title), table(columns, lines, text_columns=2), ""]


def _pairs(scores: Scores) -> list[Part]:
    """How predictions follow a change of one setting."""
    lines = [
        [one.quantity, _SETTINGS[one.setting], str(one.pairs), str(one.machines), percent(one.right / one.pairs),
         f"{one.followed:.2f}"]
        for one in scores.pairs()
    ]
    if not lines:
        return []
    title = f"Pairs of one machine that differ in one setting, and by more than {percent(MOVED)} in speed"
    return [heading(title), table(_PAIR_COLUMNS, lines, text_columns=2), legend(_PAIR_MEANINGS), ""]


def _rows(scores: Scores) -> list[Part]:
    """The speeds of every row."""
    lines = [
        [*_speeds_line(scores, quantity, row), signed_percent(error)]
        for row in scores.rows[:_MOST_ROWS]
        for quantity in QUANTITIES
        if (error := error_of(row, scores.first, quantity)) is not None
    ]
    more = len(scores.rows) - _MOST_ROWS
    rest = [f"... {more} more rows: --json FILE has all of them"] if more > 0 else []
    return [heading("Tokens a second"), table([*_ROW_COLUMNS, "error"], lines, text_columns=5), *rest, ""]


def _far(scores: Scores) -> list[Part]:
    """The rows that are furthest off."""
    lines = [
        [*_speeds_line(scores, quantity, row), f"{factor(error):.1f}x too {'fast' if error > 0 else 'slow'}"]
        for quantity in QUANTITIES
        for row, error in scores.furthest(quantity, FAR_OFF)[:_MOST_FAR]
    ]
    if not lines:
        return []
    title = f"Furthest off, more than {1 + FAR_OFF:g} times (`trilane accuracy --row ID` explains one)"
    return [heading(title), table([*_ROW_COLUMNS, "off"], lines, text_columns=5), ""]


def _speeds_line(scores: Scores, quantity: Quantity, row: MeasuredRow) -> list[str]:
    """Cells of ``_ROW_COLUMNS``."""
    speeds = (number(one.of(quantity)) for one in (measured(row), scores.first[row.id]))
    return [row.id, quantity, row.shape_name, row.machine, regime_of_row(row), *speeds]


# --- one row ----------------------------------------------------------------------------------------------------------


def row_page(
    row: MeasuredRow, scores: Scores, explained: Sequence[Explanation], causes: Sequence[SlowCause]
) -> list[Part]:
    """One row: its setting, measured and predicted speeds, where the predicted time goes, and why it is slow."""
    facts = {
        "model": row.shape_name, "machine": row.machine, "engine": row.engine, "regime": regime_of_row(row),
        "experts on the CPU": f"of {row.cpu_layers} layers", "setting": row.setting, "source": row.source,
        "date": row.date, "quality": row.quality, "assumed": row.assumed,
    }
    parts: list[Part] = [heading(f"row {row.id}"), legend({name: text for name, text in facts.items() if text}), ""]
    for one in explained:
        parts += [heading(_TITLES[one.quantity].partition(",")[0]), _speeds(row, scores, one.quantity), "",
                  _time(one), "", _needed(one), ""]
    return [*parts[:-1], *slow_part(causes)]


def _speeds(row: MeasuredRow, scores: Scores, quantity: Quantity) -> Table:
    lines = [["measured", number(measured(row).of(quantity), 2), ""]]
    for name, predictions in scores.predictions.items():
        speed = predictions.get(row.id, Speeds()).of(quantity)
        if speed is not None:
            lines.append([name, number(speed, 2), signed_percent(error_of(row, predictions, quantity))])
    return table(["", "tokens/s", "error"], lines)


def _time(explanation: Explanation) -> Table:
    """The parts of the time, with the engine as shipped."""
    lines = [
        [part.name, number(part.ns / 1e6, 2), percent(part.ns / explanation.predicted_ns), _rate(part, part.ns)]
        for part in explanation.parts
    ]
    of = "a token" if explanation.quantity == "decode" else f"{explanation.tokens:,} tokens"
    predicted_ns, measured_ns = explanation.predicted_ns, explanation.measured_ns
    lines.append([f"all, predicted for {of}", number(predicted_ns / 1e6, 2), "100%", ""])
    lines.append(["measured", number(measured_ns / 1e6, 2), percent(measured_ns / predicted_ns), ""])
    return table([f"part ({SHIPPED})", "ms", "share", "rate"], lines)


def _needed(explanation: Explanation) -> str:
    """Sentence on what would have to be true for the measured speed."""
    part, rest = explanation.parts[0], explanation.predicted_ns - explanation.parts[0].ns
    if explanation.needed_ns <= 0:
        return (
            f"No rate of the longest part, {part.name}, would give the measured speed: the other parts alone are "
            f"predicted to take {rest / 1e6:,.2f} ms."
        )
    needed = _rate(part, explanation.needed_ns)
    return f"The measured speed would be right with {part.name} at {needed}, in place of {_rate(part, part.ns)}."


def _rate(part: TimePart, ns: float) -> str:
    rate = part.rate(ns)
    return f"{rate:,.0f} {part.unit}" if rate >= 100 else f"{rate:.3g} {part.unit}"
