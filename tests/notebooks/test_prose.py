"""The text of a notebook says what its cells print."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks.prose import idle_constants, not_printed, numbers
from tests.notebooks.renew import NOTEBOOKS

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_number_of_the_text_is_printed_or_a_constant(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not_printed(notebook) + idle_constants(notebook) == []


# --- broken twins: claims that were in the notebooks, and were not true -----------------------------------------------


@pytest.mark.parametrize(
    ("name", "true", "stale"),
    [
        ("first_steps", "same 52.66 ms", "same 62 ms"),
        ("first_steps", "link bandwidth (47.17 ms)", "link bandwidth (42.17 ms)"),
        ("reading_a_timeline", "At 15,712 the layer", "At 16,678 the layer"),
        ("reading_a_timeline", "experts 39, 40 and 59 are", "experts 3, 7 and 25 are"),
        ("reading_a_timeline", "33 % are unused", "40 % are unused"),
        ("your_own_policy", "44.93 ms against 45.15", "ahead by 1 and 5 %"),
        ("sensitivity_studies", "the best setting takes 4.7 % less", "the best setting takes 3.9 % less"),
    ],
)
def test_a_stale_claim_is_found(name: str, true: str, stale: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "markdown" and true in cell.source)
    cell.source = cell.source.replace(true, stale)
    assert not_printed(notebook)


def test_every_time_and_expert_of_the_explained_layer_is_checked() -> None:
    """Outputs of another run, with each number one more: no number of three digits and more is found by chance."""
    notebook = nbformat.read(NOTEBOOKS / "reading_a_timeline.ipynb", as_version=4)
    table = next(cell for cell in notebook.cells if "layer_of(hybrimoe" in cell.source).outputs[0].data
    table["text/plain"] = re.sub(r"\d+\.\d\d", lambda found: f"{float(found[0]) + 1:.2f}", table["text/plain"])
    assert [text for text in ("15,712", "15,878", "16,180", "15,993", "17,311")
            if not any(text in line for line in not_printed(notebook))] == []


# --- what counts as printed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("takes 43.4 ms", "tpot_ms  43.38"),
        ("a table of 1,311 MiB", "copied 1310.71"),
        ("41 % longer", "+40.8%"),
        ("41 % longer", "0.408"),
        ("41 % longer", "1.408"),
        ("3 and 41 % longer", "0.034 0.408"),
        ("RTX4080, Qwen3-30B, Figure 18b, Section 6.4, [seven](7.md), `9`", ""),
        ("*Paper.* It takes 5.03 ms,\nor 7.", ""),
        ("```sh\nmake 3\n```", ""),
        ("1. first\n2. second", ""),
    ],
)
def test_rounded_numbers_shares_and_ratios_are_printed(text: str, output: str) -> None:
    assert not_printed(told(text, output)) == []


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("takes 43.4 ms", "43.34"),
        ("takes 43.38 ms", "43.4"),
        ("1,311 MiB", "311"),
        ("41 % longer", "41 experts"),
        ("1 and 5 %", "5% of 1 layer"),
        ("*Paper.* It takes 5 ms.\n\nHere 7.", "5"),
        ("takes 16.", "16.5x"),
    ],
)
def test_others_are_not(text: str, output: str) -> None:
    assert not_printed(told(text, output)) != []


def test_a_section_is_checked_by_its_own_cells_and_one_without_any_by_all() -> None:
    first, second = told("takes 7 ms", "7"), told("takes 8 ms", "8")
    both = new_notebook(cells=[*first.cells, *second.cells])
    assert not_printed(both) == []
    both.cells.append(new_markdown_cell("## Conclusions\n\nFrom 7 to 8 ms."))
    assert not_printed(both) == []
    both.cells[-2].outputs = first.cells[-1].outputs
    assert [line.split(",")[0] for line in not_printed(both)] == ["cell 3 says 8", "cell 5 says 8"]


def test_constants_are_not_looked_for_and_must_be_in_the_text() -> None:
    notebook = told("with 12 GB", "")
    notebook.cells[0].metadata["constants"] = ["12", "16"]
    assert not_printed(notebook) == []
    assert idle_constants(notebook) == ["cell 1 lists the constant 16, which its text does not have"]


def test_numbers_are_read_with_their_decimals_and_signs_apart() -> None:
    found = [(number.text, number.value, number.decimals) for number in numbers("-1,310.71, 0.3 (16). 2 %")]
    assert found == [("1,310.71", 1310.71, 2), ("0.3", 0.3, 1), ("16", 16, 0), ("2", 2, 0)]


def told(text: str, output: str) -> NotebookNode:
    """A section with a text and a cell that prints."""
    cell = new_code_cell("answer()")
    cell.outputs = [new_output("stream", name="stdout", text=output)]
    return new_notebook(cells=[new_markdown_cell(f"## A section\n\n{text}"), cell])
