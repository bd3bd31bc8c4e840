"""Speeds from which a number of an engine was taken: they count in no score, no pair and no fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from sim.costs.engine import FittedEngine, engine_names, load_engine
from tests.kit.results import row
from tools.engine_fit import observations_of
from tools.engine_starts import read_starts
from trilane.engines.accuracy.apart import SEVERAL_GPUS
from trilane.engines.accuracy.errors import Speeds, errors_of
from trilane.engines.accuracy.measured_rows import MeasuredRow, read_rows
from trilane.engines.accuracy.pairs import pairs_of

THREAD = re.compile(r"(?:([\w.-]+) )?(?:PR|issue|discussion) (\d+)")  # of a repository, named once for several
PUT_IN = row("1", 50.0, prompt_tokens=512, prompt_tokens_per_s=500.0, put_in="decode")
OTHER = row("2", 100.0, cpu_layers=10, prompt_tokens=512, prompt_tokens_per_s=900.0)
PREDICTED = {"1": Speeds(50.0, 400.0), "2": Speeds(110.0, 800.0)}


def threads(source: str) -> Iterator[tuple[str, str]]:
    """Yield the repository's name and the number of each thread that a source names."""
    repository = ""
    for named, number in THREAD.findall(source):
        repository = named or repository
        yield repository, number


def not_put_in(rows: Iterable[MeasuredRow]) -> set[str]:
    """Numbers that are not fitted, and come from a thread of scored rows none of which is put in."""
    by_thread: dict[tuple[str, str], list[MeasuredRow]] = {}
    for one in rows:
        for thread in threads(one.source) if one.scored else ():
            by_thread.setdefault(thread, []).append(one)
    return {
        key
        for engine in map(load_engine, engine_names()) if isinstance(engine, FittedEngine)
        for key, number in engine.flat().items()
        if type(number.value) in (int, float) and "fitted from" not in number.source
        for thread in threads(number.source) if thread in by_thread
        if not any(one.put_in for one in by_thread[thread])
    }


def test_a_row_that_is_a_source_of_a_number_that_is_not_fitted_is_put_in() -> None:
    assert not_put_in(read_rows()) == set()
    named = {number for engine in map(load_engine, engine_names()) for one in engine.flat().values()
             for words in re.findall(r"[Rr]ows? ((?:t3t-)?\d+(?:, \d+)*)", one.source) for number in words.split(", ")}
    assert named == {"289", "290", "291", "292", "t3t-142"}
    assert all(one.put_in for one in (*read_rows(), *read_rows(SEVERAL_GPUS)) if one.id in named)


def test_the_only_row_of_an_engine_is_no_held_out_row_of_its_number() -> None:
    """The broken twin: with row 162 not put in, the number that it set is found."""
    rows = [replace(one, put_in="") if one.id == "162" else one for one in read_rows()]
    assert not_put_in(rows) == {"cpu.state_ns"}


def test_numbers_are_fitted_from_other_sources_than_scored_rows() -> None:
    starts = read_starts()
    sources = {thread for one in read_rows() if one.scored for thread in threads(one.source)}
    for begun in (starts.numbers, starts.ratios):
        assert not {name for name, one in begun.items() if sources.intersection(threads(one.source))}


def test_a_speed_that_is_put_in_counts_in_no_score_while_the_rows_other_speed_does() -> None:
    decode, prompts = (errors_of([PUT_IN, OTHER], PREDICTED, quantity) for quantity in ("decode", "prompts"))
    assert decode is not None
    assert prompts is not None
    assert (decode.rows, prompts.rows) == (1, 2)
    assert decode.median == pytest.approx(0.1)


def test_nor_in_a_pair_or_a_fit() -> None:
    assert {pair.quantity for pair in pairs_of([PUT_IN, OTHER], PREDICTED)} == {"prompts"}
    assert [(point.row.id, point.quantity) for point in observations_of([PUT_IN, OTHER])] == [
        ("1", "prompts"), ("2", "decode"), ("2", "prompts"),
    ]
