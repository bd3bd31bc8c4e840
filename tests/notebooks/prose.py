"""Numbers in the text of a notebook that its cells do not print.

A number is looked for in the outputs of the code cells of its section (all between two headings; where a section has no
outputs, in those of the whole notebook), rounded as the text rounds it. A percentage may be printed as a share or as a
ratio: 0.05 and 1.05 are 5 %. (A small whole number is soon found by chance: results are written with decimals.) What
no cell prints, such as a setting or a paper's figure, is listed in the metadata of its cell:
``{"constants": ["16", "1.70"]}``.

Not numbers of the text: code, links, headings, names (Qwen3-30B, Figure 18b), and paragraphs that begin with *Paper.*
or *Papers.*, which quote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from nbformat import NotebookNode

OPEN = r"(?:(?:, | and | or | to | against )[\d.,]*\d)*"  # the numbers between one and the % that belongs to all
NUMBER = re.compile(rf"(?<![\w.,-])[+-]?(\d{{1,3}}(?:,\d{{3}})+|\d+)(\.\d+)?(?!\.?\w)(?=({OPEN}\s?%)?)")
NOT_TEXT = re.compile(
    r"```.*?```|`[^`]*`|(?<=\])\([^)]*\)"
    r"|^\#+\ [^\n]*|^\d+\.\ |^\*Papers?\.\*.*?(?=\n\n|\Z)"
    r"|\b(?:Sections?|Figures?|Fig\.|Tables?|Eq\.|Appendix)\s[\w.-]+(?:(?:,|\ and)\s\d+\w?)*",
    re.MULTILINE | re.DOTALL | re.VERBOSE | re.IGNORECASE,
)


class Number(NamedTuple):
    """A number as it is written."""

    text: str
    value: float
    decimals: int
    percent: bool

    def stands_for(self, printed: Number) -> bool:
        """True if this is what is printed, rounded to the decimals that this one has."""
        values = [printed.value]
        if self.percent:
            shares = [100 * printed.value, 100 * abs(printed.value - 1)]
            values = values * (printed.percent or printed.decimals > 0) + shares * (printed.decimals > 0)
        return any(abs(value - self.value) <= 0.5 * 10**-self.decimals + 1e-9 for value in values)


def numbers(text: str) -> Iterator[Number]:
    """The numbers of a text, without their signs."""
    for found in NUMBER.finditer(text):
        whole, fraction = found[1].replace(",", ""), found[2] or ""
        yield Number(found[1] + fraction, float(whole + fraction), len(fraction[1:]), found[3] is not None)


@dataclass
class Section:
    """The pieces of text under one heading, each with the number of its cell, and what the code cells print."""

    pieces: list[tuple[int, str]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @cached_property
    def printed(self) -> list[Number]:
        return list(numbers("\n".join(self.outputs)))


def sections(notebook: NotebookNode) -> list[Section]:
    """A notebook, cut at its headings."""
    found = [Section()]
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            found[-1].outputs.append(printed(cell))
            continue
        for piece in re.split(r"^(?=##+ )", cell.source, flags=re.MULTILINE):
            if piece.startswith("##"):
                found.append(Section())
            found[-1].pieces.append((place, piece))
    return found


def printed(cell: NotebookNode) -> str:
    """The text of all outputs of a cell; a picture is a line that only says so."""
    return "".join(_text(output) for output in cell.outputs)


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}\n"
    return "[picture]\n" if "image/png" in output.data else f"{output.data.get('text/plain', '')}\n"


def not_printed(notebook: NotebookNode) -> list[str]:
    """Numbers of the text that neither the outputs of their section nor the constants of their cell have, in words."""
    parts = sections(notebook)
    whole = Section(outputs=[output for section in parts for output in section.outputs])
    return [
        f"cell {place + 1} says {number.text}, which no cell of its section prints: correct it, or make it a constant"
        for section in parts
        for place, piece in section.pieces
        for number in numbers(NOT_TEXT.sub(" ", piece))
        if number.text not in constants(notebook.cells[place])
        and not any(map(number.stands_for, (section if any(section.outputs) else whole).printed))
    ]


def idle_constants(notebook: NotebookNode) -> list[str]:
    """Constants that the text of their cell does not have (any more), in words."""
    return [
        f"cell {place} lists the constant {text}, which its text does not have"
        for place, cell in enumerate(notebook.cells, 1)
        for text in constants(cell)
        if text not in {number.text for number in numbers(NOT_TEXT.sub(" ", cell.source))}
    ]


def constants(cell: NotebookNode) -> list[str]:
    """Numbers of the text of a cell that no cell prints, as its metadata lists them."""
    return list(cell.metadata.get("constants", ()))
