"""The page of ``trilane pays``: whether an idea pays here, what decides, where the break-even is, and the map."""

from __future__ import annotations

from sim.costs.engine import load_engine
from trilane.engines.routing import statistics_text
from trilane.output.figures.marks import marked
from trilane.output.figures.pays_words import (
    NamedSide,
    answer_of,
    break_even,
    gain_text,
    other_caches,
    remarks_of,
    row_text,
    shown_text,
    using_side,
    without_side,
    y_label,
)
from trilane.output.pages.output import Part, heading, mebibytes, number, pairs, percent, table
from trilane.study.pays.dimensions import SHARE
from trilane.study.pays.gain_map import GainMap, Mechanism
from trilane.study.pays.played_map import PlayedSide

_LEAST_MS, _LEAST_SHARE = 0.005, 0.005  # less is not told
_COLUMNS = ("tokens/s", "on the GPU\nwhen needed", "copied\nMiB/token", "GPU waits\nfor the CPU", "\nfor copies")


def pays_page(found: GainMap) -> list[Part]:
    """The answer first, then its reasons."""
    idea, cell = found.question.idea, found.cell
    here = [f"{axis.label}: {shown_text(axis, value)} here" for axis, value in ((idea.x, cell.x), (idea.y, cell.y))]
    sides = [_side("without", without_side(found), cell.without), _side("with it", using_side(found), cell.using)]
    return [
        *_plain(found), heading(answer_of(found)), _engines(found), _why(found), *remarks_of(found),
        *other_caches(found), found.about, *_statistics(found), "",
        pairs([("what decides", ", ".join(here)), *break_even(found)]), "",
        table(["here", *_COLUMNS], sides), "", *_map(found),
    ]


def _plain(found: GainMap) -> list[Part]:
    """The answer for an engine as it is."""
    if (plain := found.plain) is None:
        return []
    name = f"{plain.engine} as it is, in closed form like `trilane fit`"
    return [heading(f"{found.question.idea.subject}: {gain_text(plain.gain)} with {name}, "
                    f"{number(plain.tokens_per_s)} tokens/s now; simulated, with a cache if that is faster:")]


def _statistics(found: GainMap) -> list[str]:
    """Sentence on whose statistics the routing has, at the machine's share of the experts where there is one."""
    idea, fit = found.question.idea, found.question.fit
    text = statistics_text(fit, found.cell.x) if idea.x.axis == SHARE.axis else statistics_text(fit)
    return [f"statistics of the routing: {text}"] if text else []


def _engines(found: GainMap) -> str:
    """The engines on which both sides are simulated, and the price of a decision there."""
    without, using = found.cell.without.engine, found.cell.using.engine
    names = f"the engine {using}" if using == without else f"the engines {using} (with it) and {without} (without)"
    if not any(load_engine(name).decides for name in (without, using)):
        return f"simulated on {names}: nothing is decided on the host, decisions are free and no routing is read back"
    shares = [percent(share, 1) for share in found.mechanism.decisions]
    return f"simulated on {names}: the host decides in every layer, {shares[1]} of the time ({shares[0]} without it)"


def _why(found: GainMap) -> str:
    """The numbers that show why it pays or not, in one line."""
    why = found.mechanism
    layer = f"a layer {number(why.layer_us[1], 0)} us ({number(why.layer_us[0], 0)} without it)"
    upload = "" if why.upload_us is None else f"an upload of an expert takes {number(why.upload_us, 0)} us, "
    parts = [_of_token(why), upload + layer]
    if max(why.link_busy) >= _LEAST_SHARE:
        parts.append(f"the link is busy {percent(why.link_busy[1])} of the time ({percent(why.link_busy[0])})")
    hits = f"{percent(why.hit_rate[1])} of the experts are there when needed ({percent(why.hit_rate[0])})"
    late = [] if why.late is None else [f"{percent(why.late)} of the prefetches that run come late"]
    return f"why: {'; '.join([*parts, hits, *late])}"


def _of_token(why: Mechanism) -> str:
    """The change of a token's time, and what of it goes that way; then what goes the other way."""
    times = {"works": why.work_ms, "waits for the CPU": why.cpu_wait_ms, "waits for copies": why.copy_wait_ms,
             "waits for the host": why.host_wait_ms}
    whole = why.token_ms[1] - why.token_ms[0]
    changes = {name: after - before for name, (before, after) in times.items()}
    told = {name: change for name, change in changes.items() if abs(change) >= _LEAST_MS}
    same = abs(whole) < _LEAST_MS
    along = [f"{name} {_change(change)}" for name, change in told.items() if same or change * whole > 0]
    against = [f"{name} {_change(change)}" for name, change in told.items() if not same and change * whole < 0]
    text = f"a token takes as long, {number(why.token_ms[1], 2)} ms" if same else f"a token takes {_change(whole)}"
    return (f"{text}{': the GPU ' * bool(along)}{' and '.join(along)}"
            f"{', though it ' * bool(against)}{' and '.join(against)}")


def _change(ms: float) -> str:
    return f"{number(abs(ms), 2)} ms {'longer' if ms > 0 else 'less'}"


def _side(what: str, named: NamedSide, side: PlayedSide) -> list[str]:
    """Cells of one side on the machine."""
    name = ", ".join([f"{what}: {marked(named.policy, named.kind)}", *named.values])
    facts = side.facts
    shares = [percent(facts[fact]) for fact in ("decode_served_hit_rate", "stall_cpu_share", "stall_h2d_share")]
    return [name, number(side.mean_tokens_per_s), shares[0], mebibytes(facts["pcie_bytes_per_token"]), *shares[1:]]


def _map(found: GainMap) -> list[Part]:
    """The gain at each place; the machine's row and column are marked."""
    idea, (column, row) = found.question.idea, found.here
    xs = [f"{shown_text(idea.x, cell.x)}{' <' * (place == column)}" for place, cell in enumerate(found.rows[0])]
    lines = [
        [f"{row_text(found, place)}{' <' * (place == row)}",
         *("-" if cell.gain is None else gain_text(cell.gain) for cell in cells)]
        for place, cells in reversed(list(enumerate(found.rows)))
    ]
    what = f"gain in tokens/s; across: {idea.x.label}; down: {y_label(found)}; <: here"
    empty = [cell for cells in found.rows for cell in cells if not cell.gains]
    why = [f"\n-  cannot run: {cell.without.reason or cell.using.reason}" for cell in empty[:1]]
    return [heading(what), table(["", *xs], lines), *why]
