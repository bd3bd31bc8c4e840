"""The section of ``trilane fit``'s page that compares the best policy with others."""

from __future__ import annotations

from policies.protocols import PolicyKind
from sim.runs.vocabulary import kind_of
from trilane.common.units import in_gb
from trilane.engines.question import Question
from trilane.fit.policy_answer import PolicyAnswer
from trilane.fit.policy_result import PolicyResult
from trilane.output.figures.marks import SIGNS
from trilane.output.pages.fit_engine import seconds
from trilane.output.pages.output import Part, heading, legend, mebibytes, number, percent, table

_OTHER, _EQUAL = "+", "="
_COLUMNS = ("policy", "TTFT s", "TPOT ms", "tokens/s", "answer s", "hit rate", "PCIe MiB/tok", "host GB")
_LEGEND = {
    "answer": "until the last of the generated tokens is there; the order of the table",
    "hit rate": "active experts that were on the GPU when their layer was routed, in decode steps",
    "host GB": "expert weights that the host's memory must hold (10^9 bytes)",
}
_MARK_LEGEND = {
    SIGNS[PolicyKind.CLAIRVOYANT]: "knows the future: shows what is left to gain, but is no bound",
    _EQUAL: "as fast as the best, within the spread of the steps that were played",
    _OTHER: "for comparison: not among those to choose from",
    SIGNS[PolicyKind.CHANGES]: (
        "sometimes runs other experts than the router chose; a prompt that is repeated is not played (no TTFT)"
    ),
}


def policies_section(asked: Question, fit: PolicyAnswer) -> list[Part]:
    """The table, what its marks mean, and the policies that were refused."""
    if fit.memory.all_fits:
        return []
    seer = [] if fit.clairvoyant is None else [fit.clairvoyant]
    shown = [(one, _sign(fit, one)) for one in (fit.best, *fit.runners_up, *fit.compared, *seer, *fit.changing)]
    signs = {sign: text for sign, text in _MARK_LEGEND.items() if any(sign == one for _, one in shown)}
    refused = [f"not played: {name}: {why}" for name, why in fit.refused.items()]
    rows = [_row(one, sign, asked) for one, sign in shown]
    return ["", heading("compared with others"), table(_COLUMNS, rows),
            legend({**_LEGEND, **signs}), *_slower_seer(fit), *refused]


def _slower_seer(fit: PolicyAnswer) -> list[str]:
    """Why the clairvoyant run may be slower."""
    seer, best = fit.clairvoyant, fit.best
    if seer is None or seer.tpot_ms <= best.tpot_ms:
        return []
    copied = [answer.pcie_bytes_per_token or 0 for answer in (seer, best)]
    why = f"it copies {copied[0] / 2**20:,.0f} MiB a token where {best.policy} copies {copied[1] / 2**20:,.0f}, and "
    return [f"the clairvoyant run is slower here: {why * (copied[0] > copied[1])}knowing the future, it still decides "
            f"layer by layer"]


def _row(answer: PolicyResult, sign: str, asked: Question) -> list[str]:
    whole = answer.ttft_ms is not None
    return [
        f"{answer.policy} {sign}".strip(), seconds(answer.ttft_ms), token_time(answer.tpot_ms, asked),
        number(answer.tokens_per_s if asked.generated > 1 else None),
        number(answer.answer_ms / 1e3 if whole else None), percent(answer.hit_rate),
        mebibytes(answer.pcie_bytes_per_token), in_gb(answer.host_bytes),
    ]


def _sign(fit: PolicyAnswer, answer: PolicyResult) -> str:
    if answer in fit.compared:
        return _OTHER
    if answer.policy in fit.equal:
        return _EQUAL
    return SIGNS.get(kind_of(answer.labels), "")


def token_time(ms: float, asked: Question) -> str:
    """TPOT; an answer of one token has none."""
    return number(ms if asked.generated > 1 else None, 2)
