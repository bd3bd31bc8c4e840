"""The page of a picture: everything on it fits."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from trilane.figures.style import marks_in_words, meanings_of, page

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


def test_marks_that_are_there_are_explained() -> None:
    assert marks_in_words(["", " ~", "", " *"]) == ["* knows the future", "~ changes the routing"]
    assert [line.get_label() for line in meanings_of(["", " ~"])] == ["~ changes the routing"]
    assert marks_in_words([""]) == []
