"""Parts of Markdown pages: tables and lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(
    headers: Sequence[str], lines: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,), newline: str = " "
) -> str:
    """A table of which all columns but ``text_columns`` are numbers; ``newline`` stands for line breaks in cells."""
    rule = ["---" if place in text_columns else "---:" for place in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |".replace("\n", newline) for cells in (headers, rule, *lines))


def bullets(lines: Iterable[str]) -> str:
    """A list with an entry a line."""
    return "\n".join(f"- {line}" for line in lines)
