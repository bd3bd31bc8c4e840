"""The words of a validation: names of scenarios, verdicts, causes of errors, notes, and the JSON that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
