"""Every picture that results allow, and why not the others."""

from __future__ import annotations

from itertools import product

import pytest

from tests.kit.pictures import results, run, two_shares
from trilane.output.figures.figure_files import PictureError
from trilane.output.figures.sweep_means import means_of
from trilane.output.figures.sweep_pictures import KINDS, FigureOptions, axes_for, pictures_of


def test_one_axis_allows_all_but_the_heat_map() -> None:
    pictures, reasons = pictures_of(means_of(two_shares()), KINDS, FigureOptions())
    assert list(pictures) == ["tpot", "speedup", "hits"]
    assert list(reasons) == ["heat"]
    assert "2 axes" in reasons["heat"]
    assert reasons["heat"].endswith(": cached_share")


@pytest.mark.parametrize(("options", "expected"), [
    (FigureOptions(), ["cached_share", "batch", "pcie"]),  # before numbers, before names
    (FigureOptions(y="pcie"), ["cached_share", "pcie", "batch"]),
    (FigureOptions(x="pcie"), ["pcie", "cached_share", "batch"]),
    (FigureOptions(x="batch", y="pcie"), ["batch", "pcie", "cached_share"]),
])
def test_axes_are_found_or_given(options: FigureOptions, expected: list[str]) -> None:
    rows = [
        run("dali", 10.0, batch=batch, cached_share=share, pcie=link)
        for batch, share, link in product((1, 4, 8), (0.2, 0.8), ("4x16", "5x16"))
    ]
    assert axes_for(means_of(results("pcie", "batch", "cached_share", rows=rows)), options, 3) == expected


def test_nothing_but_the_policy_varies() -> None:
    means = means_of(results(rows=[run("dali", 10.0), run("fiddler", 20.0)]))
    pictures, reasons = pictures_of(means, KINDS, FigureOptions())
    assert list(pictures) == ["speedup"]
    assert reasons["tpot"].endswith(": none")


@pytest.mark.parametrize(("options", "message"), [
    (FigureOptions(x="policy"), "--x: .*'policy'; choose from cached_share"),
    (FigureOptions(y="cache_share"), "--y: .*did you mean 'cached_share'"),
    (FigureOptions(x="cached_share", y="cached_share"), "expected two axes, got one twice"),
    (FigureOptions(baseline="nope"), "--baseline: there is no policy in these results 'nope'"),
])
def test_names_are_checked_before_anything_is_drawn(options: FigureOptions, message: str) -> None:
    with pytest.raises(PictureError, match=message):
        pictures_of(means_of(two_shares()), ["hits"], options)
