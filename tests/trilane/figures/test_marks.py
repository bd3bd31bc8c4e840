"""The marks behind names."""

from __future__ import annotations

import pytest

from trilane.figures.marks import mark


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((), ""),
        (("synthetic trace",), ""),
        (("clairvoyant",), " *"),
        (["synthetic trace", "changes routing"], " ~"),
        (("changes routing", "clairvoyant"), " *"),
    ],
)
def test_marks(labels: tuple[str, ...], expected: str) -> None:
    assert mark(labels) == expected
