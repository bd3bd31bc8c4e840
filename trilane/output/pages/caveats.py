"""Sentences of ``trilane fit`` and ``tune``: what limits an answer, and its caveats; in JSON next to the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trilane.common.units import GIB, in_gb
from trilane.engines.gains import LIMITING, WORTH_NAMING, Gain, limiting_part
from trilane.engines.memory import SplitMemory
from trilane.engines.question import Question
from trilane.engines.refusals import FULL
from trilane.engines.replaceable import no_upgrades
from trilane.engines.tune.machine_found import Assumption
from trilane.engines.tune.tune import TuneStart, Tuning

if TYPE_CHECKING:
    from trilane.fit.answer import PolicyAnswer  # imports what plays policies
    from trilane.fit.fit import Fit

PINNED = (
    "--load-mode none reads the file into pinned memory: it loads more slowly, and where so much cannot be pinned "
    "prompts take as long as without it{where}; builds before ggml-org/llama.cpp PR 20834 call it --no-mmap"
)
NOT_PINNED = ": Windows has a limit (--os windows answers for it), WSL2 pins about 1 GB, containers may pin little"
WINDOWS = (
    "On Windows pinned memory and what the GPU holds must together stay below the card's memory (24 GB measured on an "
    "RTX 3090, ashalliants/ninfer-3090 PR 45), so the file is mapped and prompts take longer than on Linux"
)


def limit_text(gains: Sequence[Gain]) -> str:
    """The part that limits an answer, of ranked gains, and the next one where that limits it, too."""
    if not gains:
        return "not known: times that were measured as a whole do not tell the machine's parts apart"
    if gains[0].tpot < WORTH_NAMING:
        return "no part by itself"
    if gains[0].tpot < LIMITING:
        return f"no part by itself; most {gains[0].owner}"
    return ", then ".join(gain.owner for gain in gains[:2] if gain.tpot >= LIMITING)


def limit_fact(gains: Sequence[Gain], question: Question) -> str:
    """``limit_text``, and the option that shows real parts, where a machine takes others."""
    replaceable = limiting_part(gains) is not None and no_upgrades(question) is None
    return f"{limit_text(gains)}{'; --upgrade shows what real parts give' if replaceable else ''}"


def full_warning(memory: SplitMemory) -> list[str]:
    """A sentence on a memory that is nearly full."""
    if memory.fullest <= FULL:
        return []
    owner = "GPU's " if memory.gpu_share > (memory.host_share or 0) else "host's "
    which = "" if memory.one_memory else owner
    return [f"{memory.fullest:.0%} of the {which}memory is used: other programs may leave no room"]


def tune_warnings(tuning: TuneStart | Tuning) -> tuple[str, ...]:
    """One sentence per caveat that may void the answer; they stand on top."""
    caveats, question = tuning.caveats, tuning.question.fit
    texts = []
    if caveats.short_window:
        texts.append(
            f"--context {question.window:,} has no room for a prompt of {question.prompt_tokens:,} tokens and "
            f"{question.generated:,} generated: the answer has a window of {question.tokens:,}; --prompt and "
            f"--generated name shorter ones"
        )
    if caveats.measured:
        where = f"the machine on which {tuning.best.engine} was measured"
        texts.append(f"times are those of {where}; named parts say what fits, not how fast")
    return (*texts, *full_warning(tuning.best.memory))


def tune_caveats(tuning: Tuning) -> tuple[str, ...]:
    """One sentence per other caveat."""
    caveats, question = tuning.caveats, tuning.question.fit
    texts = []
    if question.system == "windows" and tuning.best.host_layers:
        texts.append(WINDOWS)
    if caveats.pinned:
        texts.append(PINNED.format(where="" if question.system else NOT_PINNED))
    if (saved_ms := caveats.single_tensors_ms) is not None and question.generated > 1:
        texts.append(
            f"single tensors of one more layer (-ot), in the room that is left, save {saved_ms:.2f} ms a token at "
            f"most, {saved_ms / tuning.best.tpot_ms:.0%}"
        )
    return (*texts, *limit_notes(question), *tuning.machine_notes)


def limit_notes(question: Question) -> list[str]:
    """A sentence on the memory that macOS gives the GPU, and how to raise that."""
    limit = question.wired_limit
    if limit is None:
        return []
    return [
        f"macOS gives the GPU {limit.gpu_bytes / GIB:.1f} of {limit.memory_bytes / GIB:g} GiB: `{limit.command}` makes "
        f"it {limit.raised_mib / 1024:g} until the next start (--os linux answers for that)"
    ]


def fit_caveats(fit: Fit, played: PolicyAnswer) -> tuple[str, ...]:
    """One sentence per caveat, those of the machine's parts first."""
    pinned, room, tokens = played.caveats
    texts = []
    if pinned is not None:
        texts.append(
            f"{played.best.policy} copies experts out of {in_gb(pinned.size_bytes)} GB of pinned memory. Where so much "
            f"cannot be pinned (Windows, WSL2, containers), copies reach {pinned.pageable_fraction:.0%} of the rate "
            f"counted here"
        )
    if room is not None:
        texts.append(
            f"The host must hold {in_gb(room.need_bytes)} GB, and {room.channels} channels of {room.memory} take about "
            f"{room.most_gib} GiB, {in_gb(room.most_gib * GIB)} GB ({room.modules} modules each): name a server's CPU "
            f"or channels, or the memory that there is in GiB (--ram-gb)"
        )
    if tokens is not None:
        texts.append(
            f"Policies compute the prompt of {tokens:,} tokens in one piece, for whose buffers no memory is set aside. "
            f"In pieces, as engines do, experts that are not on the GPU are copied once for each piece"
        )
    return (*limit_notes(fit.question), *fit.notes, *texts)


def assumption_text(assumption: Assumption) -> str:
    """Words for what is assumed of the machine at hand, and the option that names the part."""
    part, value, number = assumption
    if part == "gpu":
        first = f"the first of {number}; name another"
        return f"gpu: {first if number else 'none, since this machine names none; name one'} with --gpu"
    if part == "ram":
        return f"ram: {value}, which is usual; name the memory modules with --ram"
    kind = "a generic one" if value is None else f"a generic {value}'s, for its {number} cores"
    return f"cpu: {kind}, since this one is not in the catalogue; name one like it with --cpu"


def tune_record(tuning: Tuning) -> dict[str, Any]:
    """Return the answer for JSON, with its sentences next to the numbers."""
    record = _with_texts_behind(tuning.to_dict(), "limit", limited_by=limit_text(tuning.gains))
    return _with_texts_behind(record, "machine_notes", notes=[*tune_warnings(tuning), *tune_caveats(tuning)])


def fit_record(fit: Fit) -> dict[str, Any]:
    """Return the answer for JSON, with its sentences next to the numbers."""
    record = fit.to_dict()
    if fit.engine is not None:
        record["engine"] = _with_texts_behind(record["engine"], "limit", limited_by=limit_text(fit.engine.gains))
    if (played := fit.policies) is not None:
        policies = _with_texts_behind(record["policies"], "limit", limited_by=limit_text(played.gains or ()))
        record["policies"] = _with_texts_behind(policies, "caveats", traps=list(fit_caveats(fit, played)))
    return record


def _with_texts_behind(record: dict[str, Any], key: str, **texts: Any) -> dict[str, Any]:
    """A record with texts behind one of its keys."""
    place = [*record].index(key) + 1
    items = [*record.items()]
    return dict([*items[:place], *texts.items(), *items[place:]])
