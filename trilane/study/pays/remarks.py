"""What to know of an answer before its numbers: whose cache is played, what is assumed, and that a text changes."""

from __future__ import annotations

from policies.protocols import PolicyKind
from trilane.study.pays.gain_map import GainMap
from trilane.study.pays.words import gain_text, shown_text, using_side

_PATCHES, _OWN = "llama-cache-lru", "llama.cpp@cache"
_CACHES = {
    _PATCHES: f"{_PATCHES}: patches that are not in llama.cpp, PR 27861 "
              f"(https://github.com/ggml-org/llama.cpp/pull/27861) and others",
    _OWN: f"{_OWN}: llama.cpp's own cache (--moe-cache-mib, PR 29887), the one of `trilane tune`",
}


def remarks_of(found: GainMap) -> list[str]:
    """A line each, of what the machine's cell plays."""
    played = {found.cell.without.policy, found.cell.using.policy}
    remarks = [text for name, text in _CACHES.items() if name in played]
    if "draft_tokens" in found.question.idea.off:
        remarks.append(_drafts(found))
    if using_side(found).kind is PolicyKind.CHANGES:
        remarks.append(f"{found.cell.using.policy} ~ changes the output; not judged")
    return remarks


def other_caches(found: GainMap) -> list[str]:
    """What the cache that is not played on the map does on the machine, and how to ask for its map."""
    if found.alternative is not None:
        cell, name = found.alternative, found.alternative.using.policy
        gain = f"cannot run here: {cell.using.reason}" if cell.gain is None else (
            f"{gain_text(cell.gain)} here, {cell.using.mean_tokens_per_s:.1f} tokens/s"
        )
        return [f"{_CACHES[name]}: {gain}; its map: --policy {name}"]
    return [f"without --policy: the cache of patches, {_PATCHES}"] if found.question.policy == _OWN else []


def _drafts(found: GainMap) -> str:
    """Whether the model is known to have a layer that drafts, and how many of its drafts are accepted."""
    question, acceptance = found.question, found.question.idea.x
    shape = question.fit.model_shape
    share, source = shown_text(acceptance, found.cell.x), "--x" if question.x is not None else "assumed; --x"
    drafts = f"{share} ({source}) of the drafts behind accepted ones"
    if shape.mtp_layers:
        return f"{shape.name} has a draft layer (MTP); if {drafts} are accepted"
    known = "is not known" if shape.mtp_layers is None else "it has not"
    return f"if {shape.name} had a draft layer (MTP), which {known}, and {drafts} were accepted"
