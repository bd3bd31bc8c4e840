"""A run shows itself: one line as text, a table in a notebook."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sim.runs.run import SHOWN
from tests.kit.results import run


def test_as_text_it_is_one_line_with_policy_labels_times_and_inputs() -> None:
    asked = replace(run(), labels=("clairvoyant",))
    assert repr(asked) == "<Run of dali, clairvoyant: TTFT 100.00 ms, TPOT 20.00 ms, mini-deepseek, rtx3090-ddr4>"


@pytest.mark.parametrize("phase", ["prefill", "none"])
def test_times_that_it_does_not_have_are_left_out(phase: str) -> None:
    whole = run()
    part = replace(whole, spans=whole.spans[whole.spans["phase"] == phase])
    assert "TPOT" not in repr(part)
    assert "tpot" not in part._repr_html_()


def test_in_a_notebook_it_is_a_table_of_its_chief_numbers() -> None:
    shown = replace(run(null=30), labels=("clairvoyant",))._repr_html_()
    names = re.findall("<th>(.*?)</th>", shown)
    assert names.pop() == "dali, clairvoyant"
    row = dict(zip(names[1:], re.findall("<td>(.*?)</td>", shown), strict=True))
    assert (row["tpot_ms"], row["null_model_tpot_ms"]) == ("20.00", "30.00")
    assert set(row) < set(SHOWN)


def test_a_policy_of_any_name_is_text_in_the_table() -> None:
    assert "<b>" not in run("<b>mine</b>")._repr_html_()
