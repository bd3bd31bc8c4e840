"""The report of a validation: its words, a table for terminals and pages, a self-contained Markdown page, and JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sim.runs.vocabulary import LANES
from trilane.common.files import atomic_path
from trilane.common.units import MIB
from trilane.output.pages.output import bullets, markdown_table, number, percent, signed_percent
from trilane.study.validation.agreement import MEDIAN_AIM, TAU_AIM, WORST_AIM, Agreement, AgreementAim, Verdict
from trilane.study.validation.comparison import ErrorPart, Repeated, RunComparison, error_parts, lanes_behind, parts_of

if TYPE_CHECKING:
    from trilane.study.validation.validate import Validated


_WAITS = {"h2d": "the GPU waits for copies", "cpu": "the GPU waits for the CPU", "host": "the GPU waits for the host"}


def name_of(key: str) -> str:
    """A key of a scenario, for display."""
    return {"cached_share": "cached", "gpu_memory_gb": "GPU memory"}.get(key, key.replace("_", " "))


def in_words(key: str, value: Any) -> str:
    """The value of a key of a scenario, for display."""
    if value is None:
        return "-"
    if key == "cached_share":
        return f"{value:.0%}"
    return f"{value:g} GB" if key == "gpu_memory_gb" else str(value)


def settings_of(agreement: Agreement, place: int) -> dict[str, str]:
    """The settings that distinguish a comparison's group from others, in words, by key."""
    return {key: in_words(key, value) for key, value in agreement.settings(place).items()}


def title_of(agreement: Agreement, place: int) -> str:
    """A title for a comparison: its name and settings."""
    settings = (f"{name_of(key)} {text}" for key, text in settings_of(agreement, place).items())
    return ", ".join([agreement.names[place], *settings])


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdict_lines(agreement: Agreement) -> list[str]:
    """The verdict on each aim, a line each."""
    held = {None: "not judged", True: "held", False: "not held"}
    return [f"{held[verdict.held]}: {verdict_text(agreement, verdict)}" for verdict in agreement.verdicts]


def verdict_text(agreement: Agreement, verdict: Verdict) -> str:
    """The result that a verdict is about, and the aim."""
    summary = agreement.summary
    if verdict.aim is AgreementAim.MEDIAN:
        return f"median TPOT error {summary.median_error:.1%} (aim: at most {MEDIAN_AIM:.0%})"
    if verdict.aim is AgreementAim.RANKING:
        tau = "no two policies in one setting" if summary.tau is None else f"{summary.tau:.2f}"
        return (
            f"ranking of policies, Kendall's tau: {tau} (aim: at least {TAU_AIM}); "
            f"{summary.discordant_pairs} of {summary.pairs} pairs in the wrong order"
        )
    if verdict.aim is AgreementAim.WORST:
        return (
            f"worst TPOT error {summary.worst_error:.1%} (aim: none above {WORST_AIM:.0%}); "
            f"{len(agreement.far_off)} of {summary.scenarios} above"
        )
    checked = [comparison.parity for comparison in agreement.comparisons if comparison.parity]
    kept = sum(parity.held for parity in checked)
    return f"parity of plans, hits, loads and bytes (law 10) in {kept} of {len(checked)} scenarios checked"


# --- causes of an error -----------------------------------------------------------------------------------------------


def causes_of(comparison: RunComparison) -> list[str]:
    """The parts of a step that differ most, largest first, each with what may be behind it."""
    texts = []
    for part in error_parts(comparison):
        behind = _behind(comparison, part)
        text = f"{_what(part)}: {_side_by_side(part.ms)}"
        texts.append(f"{text}; {behind}" if behind else text)
    return texts


def _what(part: ErrorPart) -> str:
    return _WAITS[part.lane] if part.kind is None else f"{part.kind} on the GPU"


def _behind(comparison: RunComparison, part: ErrorPart) -> str:
    """The likely cause of a wait's error; empty for work, and for a wait without an error."""
    if part.kind is not None or not part.ms.difference:
        return ""
    if part.behind is None:
        lanes = " and ".join(lanes_behind(part.lane))
        return f"work on {lanes} does not explain it: compare its starts and their order"
    lane, kind = part.behind
    ms, spans = comparison.work_ms[lane, kind], comparison.work_spans[lane, kind]
    return f"{kind} on {lane}: {_side_by_side(ms)}{_numbers(spans)}"


def _side_by_side(ms: Repeated) -> str:
    return f"{ms.predicted:.3g} ms predicted, {ms.median:.3g} measured ({ms.difference:+.2g})"


def _numbers(count: Repeated) -> str:
    if f"{count.predicted:.3g}" == f"{count.median:.3g}":
        return f", {count.median:.3g} of them each"
    return f", {count.predicted:.3g} of them predicted, {count.median:.3g} measured"


# --- notes, and JSON --------------------------------------------------------------------------------------------------


def notes_of(validated: Validated) -> list[str]:
    """Notes: what is missing, remarks on the machine, the predictions' source, and the agreement by file."""
    by_file, ended = validated.by_file.summary, validated.ended
    partly = f"stopped early: {ended.why}; {ended.runs} of {ended.planned} runs are measured, the rest is left out"
    anew = (
        f"a new journal was begun: the earlier one was for another {' and '.join(ended.changed)}, and is kept in "
        "journal.before"
    )
    return [
        *([partly] if ended.why else []),
        *([anew] if ended.changed else []),
        *validated.remarks,
        "predictions: from medians of microbenchmarks that were repeated before every round of runs and after the "
        "last; decision costs, and the costs that policies plan with, are those of the file",
        f"predicted from the profile in its file, measured earlier: median TPOT error "
        f"{by_file.median_error:.1%}, worst {by_file.worst_error:.1%}, tau "
        f"{'-' if by_file.tau is None else format(by_file.tau, '.2f')}",
    ]


def record_of(agreement: Agreement) -> dict[str, Any]:
    """Everything about an agreement, JSON-ready: numbers, and the words that pages have."""
    record = agreement.to_dict()
    for verdict, row in zip(agreement.verdicts, record["verdicts"], strict=True):
        row["text"] = verdict_text(agreement, verdict)
    for place, row in zip(agreement.rankings, record["rankings"], strict=True):
        row["setting"] = settings_of(agreement, place)
    for comparison, row in zip(agreement.comparisons, record["scenarios"], strict=True):
        row["causes"] = causes_of(comparison)
        for part, facts in zip(parts_of(comparison), row["parts"], strict=True):
            facts |= {"what": _what(part), "behind": _behind(comparison, part)}
    return record


# --- the table, and the page ------------------------------------------------------------------------------------------

MEANINGS = {
    "measured": "median TPOT of the repeated runs; +/-: half their interquartile range over the median (noise floor)",
    "error": "predicted / measured - 1; null: the same of the null model, which has bandwidths and bytes alone",
    "host ... d2h": "busy time of the lane, predicted less measured, in percent of the measured TPOT",
    "hits": "active experts on the GPU when their layer was routed (kind: resident), decode: predicted - measured",
    "copies": "expert copies of the run: predicted - measured",
    "plans": "plans that timing changed between simulator and executor; ! law 10 broken, blank: not checked",
}
_BY_POLICY = [
    "policy", "scenarios", "median TPOT error", "planning, us a layer", "launching, us a layer",
    "both, of TPOT", "plans that timing changed",
]
_HOST = ("launch", "plan", "foresee")


def table_of(agreement: Agreement) -> tuple[list[str], list[list[str]]]:
    """Headers, and a line of text cells for each scenario: groups in the order given, the fastest measured first."""
    headers = [
        "policy", *(name_of(key) for key in agreement.varying),
        "TPOT ms\nmeasured", "TPOT\n+/-", "TPOT ms\npredicted", "TPOT\nerror", "null\nerror",
        "TTFT ms\nmeasured", "TTFT\nerror", *(f"busy\n{lane}" for lane in LANES), "hits", "copies", "plans",
    ]
    times = [comparison.tpot_ms.median for comparison in agreement.comparisons]
    places = [place for group in agreement.groups for place in sorted(group, key=times.__getitem__)]
    return headers, [_line(agreement, place) for place in places]


def summary_lines(agreement: Agreement) -> list[str]:
    """The results, a line each: verdicts first, then the numbers behind them."""
    found = agreement.summary
    within = ", ".join(f"{count} within {limit}" for limit, count in found.within.items())
    return [
        *verdict_lines(agreement),
        f"TPOT error of {found.scenarios} scenarios: median {found.median_error:.1%}, 90th percentile "
        f"{found.p90_error:.1%}, worst {found.worst_error:.1%}; {within}",
        f"errors of the null model {percent(found.median_null_error, 1)} (median), spread of repeated runs "
        f"{percent(found.median_spread, 1)} (median, {found.repeats} or more), errors of TTFT "
        f"{percent(found.median_ttft_error, 1)} (median)",
        f"Kendall's tau {number(found.tau, 2)}, of the null model {number(found.null_tau, 2)}; without the "
        f"{found.tied_pairs} of {found.pairs} pairs that the repeats leave open {number(found.tau_beyond_spread, 2)}",
    ]


def failure_lines(agreement: Agreement) -> list[str]:
    """Every scenario with too large an error, worst first, and below it what the error consists of."""
    lines = []
    for place in agreement.far_off:
        tpot = agreement.comparisons[place].tpot_ms
        lines.append(
            f"{title_of(agreement, place)}: {signed_percent(tpot.error)} ({tpot.predicted:.4g} ms predicted, "
            f"{tpot.median:.4g} measured)"
        )
        lines += [f"  - {cause}" for cause in causes_of(agreement.comparisons[place])]
    return lines


def write_report(
    agreement: Agreement, path: str | Path, *, machine: Mapping[str, str], when: str, command: str,
    pictures: Mapping[str, str] | None = None, notes: Sequence[str] = (),
) -> None:
    """Write the page: aside first, then renamed.

    ``machine``: facts by name; ``when`` it was measured; ``command`` that measures it again; ``pictures``: captions by
    file, relative to the page; ``notes``: further results, a line each.
    """
    found = agreement.summary
    far_off = "\n".join(line if line.startswith(" ") else f"- {line}" for line in failure_lines(agreement))
    parts = [
        "# Simulated and measured",
        f"{found.scenarios} scenarios, each measured at least {found.repeats} times and predicted from "
        f"microbenchmarks alone: the median TPOT error is {found.median_error:.1%}, that of the null model "
        f"{percent(found.median_null_error, 1)}.",
        bullets(verdict_lines(agreement)),
        "## The machine", bullets([f"{name}: {fact}" for name, fact in machine.items()] + [f"measured: {when}"]),
        "## Settings", bullets(_settings(agreement)),
        "## Results", bullets([*summary_lines(agreement)[len(agreement.verdicts) :], *notes]),
        *(f"![{caption}]({file})\n\n{caption}" for file, caption in (pictures or {}).items()),
        f"## Errors above {WORST_AIM:.0%}", far_off or "None.",
        "## All scenarios", markdown_table(*table_of(agreement)), bullets(f"*{k}*: {v}" for k, v in MEANINGS.items()),
        "## By lane", _lanes(agreement),
        "## By policy", markdown_table(_BY_POLICY, policy_lines(agreement)),
        "## Ranking", _rankings(agreement),
        "## Hits, copies and bytes of whole runs", _memory(agreement),
        *_law(agreement),
        "## Command", f"```\n{command}\n```",
    ]
    with atomic_path(path) as aside:
        aside.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _settings(agreement: Agreement) -> list[str]:
    """The settings that all have in common, and those that vary."""
    scenario, varying = agreement.comparisons[0].scenario, agreement.varying
    same = [
        f"{name_of(key)}: {in_words(key, value)}" for key, value in scenario.items()
        if key not in (*varying, "policy", "parameters") and value not in (None, {}, [])
    ]
    names = f"policies: {', '.join(f'`{name}`' for name in dict.fromkeys(agreement.names))}"
    values = {key: dict.fromkeys(in_words(key, one.scenario[key]) for one in agreement.comparisons) for key in varying}
    return [names, *(f"{name_of(key)}: {', '.join(texts)}" for key, texts in values.items()), *same]


def _line(agreement: Agreement, place: int) -> list[str]:
    comparison = agreement.comparisons[place]
    tpot, ttft, memory = comparison.tpot_ms, comparison.ttft_ms, comparison.memory
    parity = comparison.parity
    plans = f"{parity.changed_plans_share:.0%}{'' if parity.held else ' !'}" if parity else ""
    copies = [memory[f"{kind}_copies"].difference for kind in ("demand", "prefetch", "swap")]
    return [
        agreement.names[place], *settings_of(agreement, place).values(),
        f"{tpot.median:,.2f}", percent(tpot.spread, 1), f"{tpot.predicted:,.2f}", signed_percent(tpot.error),
        signed_percent(comparison.null_error), number(ttft.median if ttft else None),
        signed_percent(ttft.error if ttft else None),
        *(signed_percent(comparison.lane_points(lane)) for lane in LANES),
        signed_percent(memory["decode_resident_hit_rate"].difference), f"{sum(copies):+,.0f}", plans,
    ]


def _lanes(agreement: Agreement) -> str:
    headers = ["lane", "median error of busy time / TPOT", "/ busy time", "largest / TPOT", "scenario"]
    lines = [
        [lane, f"{error.median_of_tpot:.1%}", percent(error.median_of_lane, 1), f"{error.worst_of_tpot:.1%}",
         title_of(agreement, error.worst_place)]
        for lane, error in agreement.lane_errors.items()
    ]
    return markdown_table(headers, lines, text_columns=(0, 4))


# --- by policy --------------------------------------------------------------------------------------------------------


def policy_lines(agreement: Agreement) -> list[list[str]]:
    """A line of text cells for every policy, medians over its scenarios: the host's time per layer, and how often
    timing changed a plan."""
    by_name: dict[str, list[RunComparison]] = defaultdict(list)
    for name, comparison in zip(agreement.names, agreement.comparisons, strict=True):
        by_name[name].append(comparison)
    return [[name, str(len(comparisons)), *_cells(comparisons)] for name, comparisons in by_name.items()]


def host_share(comparison: RunComparison) -> float:
    """Measured time of planning and launching / measured TPOT."""
    return sum(_host_ms(comparison, kind) for kind in _HOST) / comparison.tpot_ms.median


def _cells(comparisons: Sequence[RunComparison]) -> list[str]:
    planning = median(_us_a_layer(comparison, "plan", "foresee") for comparison in comparisons)
    launching = median(_us_a_layer(comparison, "launch") for comparison in comparisons)
    changed = [comparison.parity.changed_plans_share for comparison in comparisons if comparison.parity]
    return [
        f"{median(comparison.tpot_error for comparison in comparisons):.1%}", f"{planning:,.0f}",
        f"{launching:,.0f}", f"{median(map(host_share, comparisons)):.1%}",
        f"{min(changed):.0%} to {max(changed):.0%}" if changed else "-",
    ]


def _us_a_layer(comparison: RunComparison, *kinds: str) -> float:
    layers = int(comparison.predicted.spans["layer"].max()) + 1
    return 1e3 * sum(_host_ms(comparison, kind) for kind in kinds) / layers


def _host_ms(comparison: RunComparison, kind: str) -> float:
    found = comparison.work_ms.get(("host", kind))
    return found.median if found else 0.0


# --- memory, ranking and law 10 ---------------------------------------------------------------------------------------


def _memory(agreement: Agreement) -> str:
    """The numbers of law 10 in every scenario in which they differ."""
    places = [
        place for place, comparison in enumerate(agreement.comparisons)
        if any(count.difference for count in comparison.memory.values())
    ]
    same = f"Equal in {len(agreement.comparisons) - len(places)} of {len(agreement.comparisons)} scenarios."
    if not places:
        return same
    lines = [[title_of(agreement, place), *_memory_cells(agreement.comparisons[place])] for place in places]
    headers = ["measured (median) / predicted", "hits", "demand", "prefetches", "swaps", "MiB copied"]
    return f"{same} The others:\n\n{markdown_table(headers, lines)}"


def _memory_cells(comparison: RunComparison) -> list[str]:
    counts = ("hits", "demand_copies", "prefetch_copies", "swap_copies")
    cells = [f"{comparison.memory[name].median:,.0f} / {comparison.memory[name].predicted:,.0f}" for name in counts]
    moved = comparison.memory["copied_bytes"]
    return [*cells, f"{moved.median / MIB:,.1f} / {moved.predicted / MIB:,.1f}"]


def _rankings(agreement: Agreement) -> str:
    if not agreement.rankings:
        return "No setting has two policies."
    headers = ["setting", "policies", "tau", "null model's", "without ties", "in the wrong order", "ties of repeats"]
    lines = [
        [", ".join(f"{name_of(k)} {v}" for k, v in settings_of(agreement, place).items()) or "all",
         str(len(r.policies)),
         number(r.tau, 2), number(r.null_tau, 2), number(r.tau_beyond_spread, 2),
         ", ".join(f"{fast} before {slow}" for fast, slow in r.discordant) or "none", str(len(r.ties))]
        for place, r in agreement.rankings.items()
    ]
    return markdown_table(headers, lines, text_columns=(0, 5))


def _law(agreement: Agreement) -> list[str]:
    """The scenarios in which law 10 is broken, if any was checked."""
    if not any(comparison.parity for comparison in agreement.comparisons):
        return []
    broken = [
        f"{title_of(agreement, place)}: {comparison.parity.to_dict()}"
        for place, comparison in enumerate(agreement.comparisons) if comparison.parity and not comparison.parity.held
    ]
    return ["## Parity", f"{verdict_lines(agreement)[-1]}.", *([bullets(broken)] if broken else [])]
