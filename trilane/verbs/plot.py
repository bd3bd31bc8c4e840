"""``trilane plot``: the results of a sweep as pictures, each with the data behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from trilane.common.quoting import quoted
from trilane.output.pages.output import check_folder, note
from trilane.verbs.inputs import names_in
from trilane.verbs.options import OptionError

_BASELINE = "Of speedup. Default: llama.cpp; else on-demand, layer-wise, or the first policy of the table."


def plot(
    results: Annotated[str, typer.Argument(metavar="RESULTS", help="The table of [bold]trilane sweep[/] (.parquet).")],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder to write to. Default: RESULTS without its suffix."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="tpot: TPOT along an axis; speedup: bars over a baseline; heat: the fastest policy over two axes; "
            "hits: hit rate against capacity. Default: all that the table has data for.",
        ),
    ] = None,
    x: Annotated[str | None, typer.Option("--x", metavar="AXIS", help="Horizontal axis of tpot and heat.")] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="AXIS", help="Vertical axis of heat.")] = None,
    baseline: Annotated[str | None, typer.Option(metavar="POLICY", help=_BASELINE)] = None,
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help="Draw these and the clairvoyant run. Default: all.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Draw only runs with this value, such as batch=4; repeatable: the same key again adds a value. "
            "null: runs without a value.",
        ),
    ] = None,
) -> None:
    """Draw the results of a sweep.

    Each picture comes with a CSV of its data. Every picture of times shows the lower bound and the clairvoyant run, and
    with them how much could still be gained.
    """
    from trilane.output.figures.figure_files import save_picture
    from trilane.output.figures.sweep_means import means_of
    from trilane.output.figures.sweep_pictures import KINDS, FigureOptions, pictures_of
    from trilane.study.sweep.table import read_results

    kinds = KINDS if kind is None else names_in(kind, "--kind")
    folder = Path(out) if out else Path(results).with_suffix("")
    check_folder(str(folder))
    named = None if policies is None else names_in(policies)
    if named and baseline and baseline not in named:
        named.append(baseline)
    axes = [name for name in (x, y) if name and name != "policy"]
    means = means_of(read_results(results), _pairs(where or ()), named, axes)
    pictures, reasons = pictures_of(means, kinds, FigureOptions(x, y, baseline))
    if not pictures or (kind and reasons):
        raise OptionError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        save_picture(picture, folder / f"{name}.png")
        note(f"{folder / name}.png and .csv: {picture.figure.get_suptitle()}")
    for name, reason in reasons.items():
        note(f"no picture {name}: {reason}")


def _pairs(where: Sequence[str]) -> dict[str, list[str]]:
    """Every key of ``--where KEY=VALUE`` with all its values. Raises OptionError."""
    pairs: dict[str, list[str]] = {}
    for text in where:
        key, _, value = text.partition("=")
        if not key or not value:
            raise OptionError(f"--where: expected KEY=VALUE, got {quoted(text)}")
        pairs.setdefault(key, []).append(value)
    return pairs
