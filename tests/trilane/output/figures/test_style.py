"""The page of a picture and its axes: everything on it fits, ticks are at the values."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from policies.protocols import PolicyKind
from trilane.output.figures.bars import style_bars
from trilane.output.figures.style import by_ratio, kind_handles, kinds_in_words, page, places, style_values

LONG = "a finding that takes many words to say because it is about many things at once " * 3


def words_fit(figure: Figure) -> bool:
    figure.draw_without_rendering()
    [part] = figure.subfigs
    texts = (figure._suptitle, figure._supxlabel, part._suptitle)  # type: ignore[attr-defined]
    boxes = [text.get_window_extent() for text in texts]
    return all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes) and not any(
        one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place]
    )


@pytest.mark.parametrize("width", [6, 10, 17])
@pytest.mark.parametrize("text", ["short", LONG.strip(), "x" * 40])
def test_words_fit_whatever_they_are(width: float, text: str) -> None:
    figure, part = page(width, 6, text, f"about {text}", f"below {text}\nand another remark")
    part.subplots()
    assert words_fit(figure)
    assert figure.get_suptitle().replace("\n", " ") == text
    assert part.get_suptitle().replace("\n", " ") == f"about {text}"


def test_kinds_of_policies_are_explained() -> None:
    kinds = {PolicyKind.KEEPS, PolicyKind.CHANGES}
    assert kinds_in_words(kinds) == [line.get_label() for line in kind_handles(kinds)] == ["~ changes the routing"]
    assert kinds_in_words({PolicyKind.KEEPS}) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 4, 8, 16], True), ([8.0, 64.0], False), ([0.1, 0.3, 0.5, 0.7], False), ([0, 1, 10, 100], False),
     ([1, 2, 3], False)],
)
def test_ratios(values: list[float], expected: bool) -> None:
    assert by_ratio(values) is expected


def test_numbers_stand_where_they_are_and_names_side_by_side() -> None:
    assert places([8, 64]) == {8: 8.0, 64: 64.0}
    assert places(["3x16", "5x16"]) == {"3x16": 0.0, "5x16": 1.0}


def test_axes_have_names_units_and_ticks_at_the_values() -> None:
    ax = Figure().subplots()
    style_values(ax, "batch", [1, 4, 16])
    assert (ax.get_xlabel(), ax.get_xscale()) == ("batch (sequences)", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "4", "16"]
    ax = Figure().subplots()
    style_values(ax, "hardware", ["rtx-4090+ddr4-3200", "a100"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["rtx-4090\n+ddr4-3200", "a100"]


def test_many_bytes_are_read_in_gb() -> None:
    for rates in ([8e9 + 1e9 * step for step in range(12)], [1e9 * 2**step for step in range(12)]):
        ax = Figure().subplots()
        style_values(ax, "link.h2d_bytes_per_s", rates)
        ax.set_xlim(rates[0], rates[-1])
        assert "10 GB/s" in [label.get_text() for label in ax.get_xticklabels()]


def test_a_single_value_stands_in_the_middle() -> None:
    ax = Figure().subplots()
    style_values(ax, "pcie_gbps", [16.0])
    assert ax.get_xlim() == (8.0, 24.0)


@pytest.mark.filterwarnings("error")
def test_names_on_axes_are_shown_as_they_are_written() -> None:
    figure, part = page(6, 6, "headline")
    ax = part.subplots()
    style_values(ax, "trace", ["50$ or 60$", "esc \x1b", "\ud800"])
    style_bars(ax, ["$x$", "\ud800"])
    figure.draw_without_rendering()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["50$ or 60$", r"esc \x1b", r"\ud800"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["$x$", r"\ud800"]
