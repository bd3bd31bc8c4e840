"""The five papers, and further sources of figures (``further/*.yaml``): their questions by figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from trilane.common.names import unknown
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml
from trilane.study.papers.figures import FURTHER, PapersError, PublishedFigure, askable, published
from trilane.study.papers.paper import Paper

FOLDER = Path(__file__).parent


@cache
def read_papers() -> Mapping[str, Paper]:
    """The five papers, by name. Raises PapersError, also for a figure that is asked though it is left out, or not
    asked."""
    return papers_in(FOLDER, askable())


@cache
def further_sources() -> Mapping[str, Paper]:
    """Other papers and programs, by name. Raises what ``read_papers`` raises."""
    return papers_in(FURTHER, askable())


def sources() -> Mapping[str, Paper]:
    """All of them: the papers come first. Raises what ``read_papers`` raises, and PapersError for a name in both."""
    if twice := {*read_papers()} & {*further_sources()}:
        raise PapersError(f"{min(twice)}: expected a name of its own for every source")
    return {**read_papers(), **further_sources()}


def source_of(figure_id: str) -> Paper:
    """The source of a figure."""
    return sources()[published()[figure_id].paper]


def name_in(path: Path) -> str:
    """The name of the further source in a file. Raises PapersError."""
    document = read_yaml(path, PapersError)
    name = document.get("name") if isinstance(document, dict) else None
    if name not in further_sources():
        raise PapersError(f"{path}: expected a further source: {unknown('source', str(name), further_sources())}")
    return str(name)


def chosen_figures(
    name: str | None = None, figure_id: str | None = None, headlines: bool = False,
    among: Mapping[str, Paper] | None = None,
) -> list[str]:
    """Ids of the figures that are asked: of one source, the headlines alone, or one. ``among``: sources of which all
    figures are meant otherwise; None: the five papers. Raises PapersError."""
    chosen: Iterable[Paper] = (read_papers() if among is None else among).values()
    if name is not None or figure_id is not None:
        chosen = sources().values()
    if name is not None:
        chosen = [sources()[_one(name, sources(), "paper")]]
    ids = [each for one in chosen for each in (one.headlines if headlines else one.asked)]
    return ids if figure_id is None else [_one(figure_id, ids, "figure")]


def _one(name: str, names: Iterable[str], what: str) -> str:
    known = {each.lower(): each for each in names}
    if name.lower() in known:
        return known[name.lower()]
    reason = published()[name].left_out if name in published() else ""
    if reason:
        raise PapersError(f"{name}: this figure is not asked: {reason}")
    if what == "paper":
        raise PapersError(unknown(what, name, known.values()))
    listed = unknown(what, name, known.values(), "trilane papers --paper NAME")
    raise PapersError(f"{listed}; NAME is one of {', '.join(sources())}")


def papers_in(folder: Path, figures: Mapping[str, PublishedFigure]) -> Mapping[str, Paper]:
    """The papers of a folder, by name. Raises what ``read_papers`` raises."""
    papers = [from_dict(Paper, read_yaml(path, PapersError), path.name, PapersError)
              for path in sorted(folder.glob("*.yaml"))]
    for paper in papers:
        mine = [figure.id for figure in figures.values() if figure.paper == paper.name]
        if odd := set(mine) ^ set(paper.asked):
            raise PapersError(f"{paper.name}: expected a question for each figure that is not left out: {min(odd)}")
    return {paper.name: paper for paper in papers}
