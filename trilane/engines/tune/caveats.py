"""Caveats of ``trilane tune``: what the answer leaves out, and what the question did not get."""

from __future__ import annotations

from trilane.engines.speed import EngineSpeed
from trilane.engines.tune.settings import WORTH_SETTING, TuneQuestion
from trilane.engines.tune.tuned import Tuned

PINNED = (
    "--load-mode none reads the file into pinned memory: it loads more slowly, and where so much cannot be pinned "
    "(Windows, WSL2, containers) prompts take as long as without it; builds before ggml-org/llama.cpp PR 20834 call it "
    "--no-mmap"
)


def caveats_of(question: TuneQuestion, speed: EngineSpeed, best: Tuned) -> tuple[str, ...]:
    """One sentence per caveat."""
    where = f"the machine on which {speed.engine.name} was measured"
    measured = [f"times are those of {where}; named parts say what fits, not how fast"] if speed.measured else []
    pinned = [PINNED] if best.pinned else []
    return (*window_note(question), *measured, *pinned, *tensors_note(best), *speed.hardware.notes)


def kept_free(question: TuneQuestion) -> str:
    """The end of a message on memory that is short, where some is kept free."""
    return f"; or lower --keep-free-gb {question.keep_free_gb:g}" if question.keep_free_gb else ""


def to_lower(question: TuneQuestion) -> str:
    """The same where the window may be too long too."""
    window = question.fit.window
    longer = window is not None and window > question.fit.prompt_tokens + question.fit.generated
    return (f"; or lower --context {window}" if longer else "") + kept_free(question)


def window_note(question: TuneQuestion) -> list[str]:
    """Where the window that was asked for has no room for prompt and answer, the one that is answered."""
    asked = question.fit
    if asked.window is None or asked.window >= asked.tokens:
        return []
    return [f"--context {asked.window:,} has no room for a prompt of {asked.prompt_tokens:,} tokens and "
            f"{asked.generated:,} generated: the answer has a window of {asked.tokens:,}; --prompt and --generated "
            f"name shorter ones"]


def tensors_note(best: Tuned) -> list[str]:
    """What single tensors of one more layer on the GPU would save at most: those that there is room for."""
    if not best.host_layers or best.gpu_experts or best.cache_mib is not None:
        return []
    layer_bytes, layer_ms = best.memory.host_bytes / best.host_layers, best.decode_ms["cpu_experts"] / best.host_layers
    saved_ms = min(-best.memory.missing_bytes / layer_bytes, 1.0) * layer_ms
    share = saved_ms / best.tpot_ms
    told = f"single tensors of one more layer (-ot), in the room that is left, save {saved_ms:.2f} ms a token at most"
    return [f"{told}, {share:.0%}"] if share >= WORTH_SETTING else []
