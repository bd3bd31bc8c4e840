"""Every notebook runs, and shows what is committed. ``python -m tests.notebooks.renew`` renews what is committed."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.kit.depth import deep
from tests.notebooks.prose import printed
from tests.notebooks.renew import NOTEBOOKS, executed

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@deep
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_runs_and_prints_what_is_committed(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    assert (stale := first_difference(committed, executed(committed))) is None, f"{path.name}, {stale}"


def test_there_are_notebooks() -> None:
    assert PATHS


# --- comparing --------------------------------------------------------------------------------------------------------


def first_difference(committed: NotebookNode, fresh: NotebookNode) -> str | None:
    """Cell and line where the text outputs of two runs of one notebook part, in words; None where they do not."""
    for number, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True), 1):
        if old.cell_type != "code":
            continue
        lines = zip_longest(printed(old).splitlines(), printed(new).splitlines(), fillvalue="(nothing)")
        for place, (before, now) in enumerate(lines, 1):
            if before != now:
                return (
                    f"cell {number} ({old.source.splitlines()[0]!r}), line {place} of its output: committed is "
                    f"{before!r}, a run gives {now!r}; `python -m tests.notebooks.renew` writes it anew"
                )
    return None


def notebook(*outputs: NotebookNode) -> NotebookNode:
    cell = new_code_cell("answer()\nmore()")
    cell.outputs = list(outputs)
    return new_notebook(cells=[new_markdown_cell("# Text"), cell])


def printing(text: str) -> NotebookNode:
    return new_output("stream", name="stdout", text=text)


def test_the_first_differing_line_is_named_with_its_cell() -> None:
    stale = first_difference(notebook(printing("a\n42\n")), notebook(printing("a\n43\n")))
    assert stale is not None
    assert stale.startswith("cell 2 ('answer()'), line 2 of its output: committed is '42', a run gives '43';")


@pytest.mark.parametrize("other", [(), (printing("a\n"),), (printing("a\nb\nc\n"),)])
def test_lines_that_are_missing_or_too_many_are_a_difference(other: tuple[NotebookNode, ...]) -> None:
    assert first_difference(notebook(printing("a\nb\n")), notebook(*other)) is not None


def test_a_stream_in_pieces_is_the_same_stream() -> None:
    assert first_difference(notebook(printing("a\nb\n")), notebook(printing("a\n"), printing("b\n"))) is None


def test_pictures_are_compared_by_presence() -> None:
    one, other = (new_output("display_data", {"image/png": data, "text/plain": data}) for data in ("AA", "BB"))
    assert first_difference(notebook(one), notebook(other)) is None
    assert first_difference(notebook(one), notebook()) is not None


def test_a_cell_that_fails_fails_the_run() -> None:
    broken = new_notebook(cells=[new_code_cell("1 / 0")])
    with pytest.raises(Exception, match="ZeroDivisionError"):
        executed(broken)


def test_the_kernel_is_this_interpreter_in_the_notebooks_folder() -> None:
    cell = new_code_cell("import os, sys; print(sys.executable); print(os.getcwd())")
    assert printed(executed(new_notebook(cells=[cell])).cells[0]) == f"{sys.executable}\n{NOTEBOOKS}\n"
