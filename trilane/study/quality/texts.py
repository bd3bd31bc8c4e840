"""Texts to measure quality on: passages cut from files, evenly spread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilane.study.quality.summary import QualityError

if TYPE_CHECKING:
    from realrun.quality.played_model import GivenText


_MOST_BYTES = 2**28  # of a file


def passages(
    files: Sequence[str], tokenizer: Any, passages_per_file: int, prompt_tokens: int, given_tokens: int
) -> list[GivenText]:
    """``passages_per_file`` passages of every file, evenly spread and apart. Raises QualityError for a short file."""
    from realrun.quality.played_model import GivenText

    length = prompt_tokens + given_tokens
    texts = []
    for file in files:
        tokens = _tokens(Path(file), tokenizer)
        if len(tokens) < length * passages_per_file:
            raise QualityError(
                f"{file}: expected at least {length * passages_per_file:,} tokens for {passages_per_file} passages of "
                f"{prompt_tokens} + {given_tokens}, got {len(tokens):,}; give a longer text, or fewer or shorter "
                f"passages"
            )
        gap = (len(tokens) - length) // max(1, passages_per_file - 1)
        starts = (number * gap for number in range(passages_per_file))
        texts += [GivenText(tuple(tokens[start : start + length]), prompt_tokens) for start in starts]
    return texts


def digest_of(texts: Iterable[GivenText]) -> str:
    """A digest of the tokens of texts."""
    said = "\n".join(f"{text.prompt_tokens}:{','.join(map(str, text.tokens))}" for text in texts)
    return f"sha256:{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _tokens(path: Path, tokenizer: Any) -> list[int]:
    """All tokens of a UTF-8 file, read in blocks of lines, since a tokenizer's memory grows with its input."""
    if path.stat().st_size > _MOST_BYTES:
        raise QualityError(f"{path}: expected a text of at most {_MOST_BYTES:,} bytes; cut it")
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise QualityError(f"{path}: expected text in UTF-8: {error}") from None
    blocks = ("".join(lines[start : start + 1000]) for start in range(0, len(lines), 1000))
    return [int(token) for block in blocks for token in tokenizer(block, verbose=False)["input_ids"]]
