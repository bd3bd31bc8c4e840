"""Settings against runs that were measured: the one that is named is the fastest, or nearly.

On a CPU all settings were run (``docs/validation/llama.cpp/tune``); N of ``--n-cpu-moe`` was swept by others.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from sim.costs.engine import load_engine
from tests.kit.commands import ROOT
from trilane.engines.accuracy.measured_rows import MeasuredRow, machine_of, read_rows, shape_of
from trilane.engines.question import Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import searched, tune
from trilane.engines.tune.tuned import Tuned

FILES = sorted((ROOT / "docs/validation/llama.cpp/tune").glob("*.csv"))
WITHIN = 0.05
PROFILE = str(ROOT / "docs/validation/llama.cpp/engine.yaml")  # of this machine
each_way = pytest.mark.parametrize(
    ("path", "engine"), [(path, engine) for path in FILES for engine in (None, PROFILE)],
    ids=[f"{path.stem}, {how}" for path in FILES for how in ("by parts", "by profile")],
)
CORES, RAM_GB = 2, 24  # of the machine: two cores of an EPYC that names no model


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def answer_ms(row: dict[str, str]) -> float:
    """The prompt, and a token after it for each but the first that was generated."""
    return float(row["prompt_ms"]) + (int(row["generated_tokens"]) - 1) * float(row["token_ms"])


@cache
def named(path: Path, engine: str | None) -> Tuned:
    """The setting that is best by the time until the last token, of those that were measured."""
    row = rows_of(path)[0]
    question = Question(
        model=row["model"], gpu="none", ram="ddr4-3200", cores=CORES, ram_gb=RAM_GB, engine=engine,
        prompt_tokens=int(row["prompt_tokens"]), generated=int(row["generated_tokens"]),
    )
    return tune(TuneQuestion(question, "both", ("f16", "q8_0", "q4_0"))).best


def test_there_are_three_models_in_all_combinations() -> None:
    assert len(FILES) == 3
    for path in FILES:
        rows = rows_of(path)
        settings = {(row["threads"], row["piece_tokens"], row["kv"]) for row in rows}
        assert len(rows) == len(settings) == 2 * 4 * 3


@each_way
def test_the_setting_that_is_named_is_within_5_percent_of_the_best(path: Path, engine: str | None) -> None:
    assert measured_ms(path, named(path, engine)) <= (1 + WITHIN) * min(map(answer_ms, rows_of(path)))


@each_way
def test_its_time_is_predicted_within_15_percent_and_within_5_with_the_machines_own_profile(
    path: Path, engine: str | None
) -> None:
    found = named(path, engine)
    assert found.answer_ms == pytest.approx(measured_ms(path, found), rel=0.15 if engine is None else 0.05)


def measured_ms(path: Path, tuned: Tuned) -> float:
    """The time that was measured with a setting."""
    setting = str(tuned.threads), str(tuned.piece_tokens), tuned.kv
    [own] = [row for row in rows_of(path) if (row["threads"], row["piece_tokens"], row["kv"]) == setting]
    return answer_ms(own)


class Sweep(NamedTuple):
    """Rows of one machine, model and engine that differ in the layers on the CPU alone, fewest first."""

    rows: tuple[MeasuredRow, ...]

    @property
    def name(self) -> str:
        return f"{self.rows[0].id}-{self.rows[-1].id}"

    def slower(self, layers: int, whole_answer: bool = False) -> float:
        """Measured time at so many layers over the least, minus 1: of a token, or of the row's prompt and answer.

        Between two rows on a straight line; below the fewest layers that were measured, as there.
        """
        times = [_answer_s(row) if whole_answer else _token_s(row) for row in self.rows]
        return float(np.interp(layers, [row.cpu_layers for row in self.rows], times)) / min(times) - 1

    def named(self) -> int:
        """MoE layers on the CPU in the setting that is fastest at decode, as the sweep ran it."""
        row = self.rows[0]
        asked = Question(
            model=row.model, weights=row.weights, machine=row.machine, engine=row.engine, threads=row.threads,
            ubatch=row.piece_tokens or 512, prompt_tokens=row.depth_tokens + (row.prompt_tokens or 1),
            generated=row.generated_tokens,
        )
        question = TuneQuestion(asked, "decode", ("f16",))
        done = searched(question, machine_of(row.machine), shape_of(row), load_engine(row.engine))
        plain = [done.tuned[one] for one in done.tuned if one.cached_layers is None]
        return min(plain, key=lambda one: one.tpot_ms).host_layers


def sweeps() -> list[Sweep]:
    found = defaultdict(list)
    for row in read_rows():
        if row.decode_tokens_per_s is not None and not row.left_out:
            machine, model = (row.source, row.date, row.machine), (row.shape_name, row.engine)
            alike = (*machine, *model, row.depth_tokens, row.kv_bits, row.piece_tokens)
            found[alike].append(row)
    ordered = (tuple(sorted(rows, key=lambda row: row.cpu_layers)) for rows in found.values())
    return [Sweep(rows) for rows in ordered if len({row.cpu_layers for row in rows}) > 1]


def _token_s(row: MeasuredRow) -> float:
    assert row.decode_tokens_per_s is not None
    return 1 / row.decode_tokens_per_s


def _answer_s(row: MeasuredRow) -> float:
    prompt = row.prompt_tokens / row.prompt_tokens_per_s if row.prompt_tokens and row.prompt_tokens_per_s else 0.0
    return prompt + row.generated_tokens * _token_s(row)


SWEEPS = sweeps()
NAMED = {  # by the first and the last row: layers that are named, and how much slower a token, and a whole answer, is
    "173-171": (9, 0.0, 0.0), "179-177": (12, 0.0, 0.0), "182-180": (9, 0.0, 0.0), "205-200": (21, 0.077, 0.032),
    "212-207": (18, 0.0, 0.0), "213-215": (18, 0.0, 0.0), "216-218": (21, 0.010, 0.0), "260-259": (0, 0.0, 0.0),
    "273-272": (34, 0.0, 0.0),
}


def test_the_sweeps_are_those_of_the_rows() -> None:
    assert [sweep.name for sweep in SWEEPS] == list(NAMED)
    assert sum(len(sweep.rows) for sweep in SWEEPS) == 31


@pytest.mark.parametrize("sweep", SWEEPS, ids=[sweep.name for sweep in SWEEPS])
def test_the_number_that_is_named_is_the_fastest_that_loads_or_nearly(sweep: Sweep) -> None:
    """Six of nine are beyond their sweep, which ended at more layers on the CPU than the memory needs; they count as
    its end. On the RX 6700 XT (205-200) 18 layers decode 8 % faster than the 21 that are named, and its prompts are
    slower there than with 20: the card's memory was full."""
    layers, token, answer = NAMED[sweep.name]
    assert sweep.named() == layers
    assert sweep.slower(layers) == pytest.approx(token, abs=0.005)
    assert sweep.slower(layers, whole_answer=True) == pytest.approx(answer, abs=0.005)
    assert min(token, answer) <= WITHIN
