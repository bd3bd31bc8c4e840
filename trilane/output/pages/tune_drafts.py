"""The section of ``trilane tune`` on drafts by the model's own layers, by the share that is accepted."""

from __future__ import annotations

from trilane.common.units import in_gb
from trilane.engines.tune.drafts import MEASURED_LESS, WORTH_DRAFTING, DraftAnswer, Drafted
from trilane.output.pages.output import Part, heading, number, percent, table

_ABOUT = (
    "accepted: drafts that the model would have written, of those behind accepted ones; it depends on the text, and is "
    f"not predicted. On the one machine with published figures drafts gave {MEASURED_LESS} less than this predicts"
)
_PUBLISHED = "; 76% (Gemma 4 31B) and 88% (Qwen3.6-35B-A3B) were published of llama.cpp; --draft-acceptance names yours"


def drafts_section(answer: DraftAnswer | None, asked: bool) -> list[Part]:
    """Nothing without drafts. ``asked``: whether the acceptance was."""
    if answer is None:
        return []
    rates = tuple(f"tokens/s, {percent(each)} accepted" for each in answer.acceptances)
    title = f"drafts by the model's own layers (--spec-type draft-mtp), which take {in_gb(answer.layer_bytes)} GB"
    plain = answer.plain_tokens_per_s
    rows = [["none", number(1000 / plain, 2), "", *[number(plain)] * len(rates)]]
    rows += map(_row, answer.choices)
    shown = table(("drafts", "ms a step", "worth it from", *rates), rows)
    return ["", heading(title), shown, "", f"{_ABOUT}{'' if asked else _PUBLISHED}", *_line(answer)]


def _row(each: Drafted) -> list[str]:
    least = "never" if each.break_even is None else percent(each.break_even)
    return [number(each.drafts, 0), number(each.step_ms, 2), least, *map(number, each.tokens_per_s.values())]


def _line(answer: DraftAnswer) -> list[str]:
    least = percent(answer.acceptances[0])
    if answer.command is None or answer.best is None:
        return [f"with {least} accepted none saves {percent(WORTH_DRAFTING)}"]
    return ["", f"best with {least} accepted: {answer.command}"]
