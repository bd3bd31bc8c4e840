"""The pages of the verbs are as they were when last read; ``golden.py`` says how to renew them."""

from __future__ import annotations

import pytest

from tests.trilane.output.pages.golden import COMMANDS, FOLDER, file_of, page


@pytest.mark.parametrize("name", COMMANDS)
def test_page(name: str) -> None:
    assert page(name) == file_of(name).read_text(encoding="utf-8")


def test_no_page_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(COMMANDS)
