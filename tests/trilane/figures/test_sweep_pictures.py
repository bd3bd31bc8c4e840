"""Every picture that results can carry, and why not the others."""

from __future__ import annotations

from itertools import product

import pytest

from tests.kit.sweep_rows import results, run, two_shares
from trilane.figures.figure_files import PictureError
from trilane.figures.sweep_means import means_of
from trilane.figures.sweep_pictures import KINDS, Asked, axes_for, pictures_of


def test_one_axis_carries_all_but_the_heat_map() -> None:
    pictures, reasons = pictures_of(means_of(two_shares()), KINDS, Asked())
    assert list(pictures) == ["tpot", "speedup", "hits"]
    assert reasons == {"heat": "expected 2 axes that vary beside the policy, what varies is cached_share"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Asked(), ["cached_share", "batch", "pcie"]),  # before numbers, before names
        (Asked(y="pcie"), ["cached_share", "pcie", "batch"]),
        (Asked(x="pcie"), ["pcie", "cached_share", "batch"]),
        (Asked(x="batch", y="pcie"), ["batch", "pcie", "cached_share"]),
    ],
)
def test_axes_are_found_or_asked_for(asked: Asked, expected: list[str]) -> None:
    rows = [
        run("dali", 10.0, batch=batch, cached_share=share, pcie=link)
        for batch, share, link in product((1, 4, 8), (0.2, 0.8), ("4x16", "5x16"))
    ]
    assert axes_for(means_of(results("pcie", "batch", "cached_share", rows=rows)), asked, 2) == expected


def test_nothing_but_the_policy_varies() -> None:
    means = means_of(results(rows=[run("dali", 10.0), run("fiddler", 20.0)]))
    pictures, reasons = pictures_of(means, KINDS, Asked())
    assert list(pictures) == ["speedup"]
    assert reasons["tpot"] == "expected an axis that varies beside the policy, what varies is nothing"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(x="policy"), "--x: there is no axis, beside the policy, that varies 'policy'; choose from cached_share"),
        (Asked(y="cache_share"), "--y: .*did you mean 'cached_share'"),
        (Asked(x="cached_share", y="cached_share"), "expected two axes, got one twice"),
        (Asked(baseline="nope"), "--baseline: there is no policy in these results 'nope'"),
    ],
)
def test_names_are_checked_before_anything_is_drawn(asked: Asked, message: str) -> None:
    with pytest.raises(PictureError, match=message):
        pictures_of(means_of(two_shares()), ["hits"], asked)
