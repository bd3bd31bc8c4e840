"""The table of routing in docs/traces.md is what its command makes."""

from __future__ import annotations

import pytest

from tests.kit.depth import thinned
from tools.routing_table import HEAD, MARKED, PAGE, listed, row

ROWS = dict(zip(listed(), MARKED.findall(PAGE.read_text(encoding="utf-8"))[0].splitlines()[len(HEAD):], strict=True))


def test_every_model_of_the_catalogue_is_in_the_table_once() -> None:
    assert [line.split("|")[1] for line in ROWS.values()] == listed()


@thinned(5)
@pytest.mark.parametrize("name", listed())
def test_a_row_is_as_simulated(name: str) -> None:
    assert ROWS[name] == row(name), "renew it with: .venv/bin/python -m tools.routing_table"


def test_the_row_of_another_model_is_another() -> None:
    assert ROWS["glm-5.3-flash"].replace("glm-5.3-flash", "") != ROWS["qwen3-30b-a3b"].replace("qwen3-30b-a3b", "")
