"""Published figures: how far off a simulated value is, and what the file must hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.kit.papers import figure
from trilane.study.papers.published import PapersError, read_figures


@pytest.mark.parametrize(
    ("kind", "value", "simulated", "factor"),
    [
        ("exact", 2.0, 3.0, 1.5), ("maximum", 8.0, 4.0, 0.5), ("exact", -20.0, -10.0, 0.5),
        ("upper_bound", 1.0, 0.1, 1.0), ("upper_bound", 1.0, 1.2, 1.2),
        ("lower_bound", 60.0, 90.0, 1.0), ("lower_bound", 60.0, 30.0, 0.5),
    ],
)
def test_a_bound_is_kept_by_every_value_on_its_right_side(
    kind: str, value: float, simulated: float, factor: float
) -> None:
    assert figure(value=value, kind=kind).log_ratio(simulated) == pytest.approx(math.log(factor))


@pytest.mark.parametrize("simulated", [-1.0, 0.0])
def test_another_sign_is_infinitely_far(simulated: float) -> None:
    assert figure(value=3.0).log_ratio(simulated) == -math.inf


def test_every_figure_that_is_asked_has_a_value_and_a_place() -> None:
    asked = [each for each in read_figures().values() if not each.left_out]
    assert len(asked) > 200
    assert all(each.value not in (None, 0.0) and each.where for each in asked)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a,P,here,q,,,,many,x,exact,", "line 2: value: expected a number <= 1e+09 or an empty cell, got 'many'"),
        ("a,P,here,q,,,,1,x,perhaps,", "line 2: kind: expected "),
        ("a,P,here,q,,,,1,x,exact,\na,P,here,q,,,,2,x,exact,", "expected an id of its own for every figure"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "figures.csv"
    file.write_text(f"id,paper,where,quantity,method,baseline,model,value,unit,kind,left_out\n{line}\n")
    with pytest.raises(PapersError) as caught:
        read_figures(file)
    assert sentence in str(caught.value)
