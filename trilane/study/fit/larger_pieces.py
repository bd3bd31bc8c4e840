"""A prompt in larger pieces than the engine's own: experts are copied less often, and fewer have room on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trilane.study.fit.engine_speed import EngineSpeed

PIECES = (1024, 2048, 4096)  # prompt tokens at once that people choose
SOONER = 0.1  # of the time to the first token: less is not worth telling


@dataclass(frozen=True)
class LargerPieces:
    """The arguments that change, and the times then, in ms."""

    arguments: str
    ttft_ms: float
    tpot_ms: float


def larger_pieces(speed: EngineSpeed) -> LargerPieces | None:
    """Those with which the answer ends soonest; None where the question names their size, and where the first token
    would be no sooner by a tenth."""
    own, question = speed.splitter.piece_tokens, speed.question
    if question.ubatch is not None:
        return None
    sizes = [tokens for tokens in PIECES if own < tokens < 2 * question.prompt_tokens and own < question.prompt_tokens]
    others = [replace(speed, question=replace(question, ubatch=tokens)) for tokens in sizes]
    best = min((speed, *(other for other in others if other.has_room)), key=lambda each: each.answer_ns)
    if best.prompt.total_ns > (1 - SOONER) * speed.prompt.total_ns:
        return None
    changed = [word for word in best.words if word not in speed.words]
    return LargerPieces(" ".join(changed), best.prompt.total_ns / 1e6, best.decode.total_ns / 1e6)
