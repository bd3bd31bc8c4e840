"""Settings against runs that were measured: the one that is named is the fastest, or nearly.

On a CPU all settings were run (``docs/validation/llama.cpp/tune``); N of ``--n-cpu-moe`` was swept by others.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sim.costs.engine import FittedEngine, load_engine
from tests.kit.commands import ROOT
from traces.layout import DECODE
from traces.library import load_trace
from trilane.engines.accuracy.measured_rows import MeasuredRow, machine_of, read_rows, shape_of
from trilane.engines.question import FitError, Question, engine_of
from trilane.engines.split_speed import decode_time
from trilane.engines.tune.drafts import (
    MEASURED_LESS,
    MOST_DRAFTS,
    PUBLISHED,
    DraftedStep,
    active_experts,
    draft_answer,
    drafted_step,
)
from trilane.engines.tune.search import best_plain
from trilane.engines.tune.settings import Setting, TuneQuestion
from trilane.engines.tune.tune import tune
from trilane.engines.tune.tuned import Tuned, Workbench

FILES = sorted((ROOT / "docs/validation/llama.cpp/tune").glob("*.csv"))
WITHIN = 0.05
TOO_LONG = {"deepseek-v2-lite": 0.227, "olmoe-1b-7b": 0.132, "qwen3-30b-a3b": 0.139}  # by parts, over what was measured
PROFILE = str(ROOT / "docs/validation/llama.cpp/engine.yaml")  # of this machine
each_way = pytest.mark.parametrize(
    ("path", "engine"), [(path, engine) for path in FILES for engine in (None, PROFILE)],
    ids=[f"{path.stem}, {how}" for path in FILES for how in ("by parts", "by profile")],
)
CORES, RAM_GB = 2, 24  # of the machine: two cores of an EPYC of the fourth generation that names no model


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
        model=row["model"], gpu="none", ram="ddr5-4800-ecc", cpu="epyc-9354", channels=8, cores=CORES,
        ram_gb=RAM_GB, engine=engine, prompt_tokens=int(row["prompt_tokens"]), generated=int(row["generated_tokens"]),
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
def test_its_time_is_predicted_too_long_by_what_is_stated_and_within_5_percent_with_the_machines_own_profile(
    path: Path, engine: str | None
) -> None:
    found = named(path, engine)
    error = found.answer_ms / measured_ms(path, found) - 1
    assert error == pytest.approx(0, abs=0.05) if engine else error == pytest.approx(TOO_LONG[path.stem], abs=0.01)


def measured_ms(path: Path, tuned: Tuned) -> float:
    """The time that was measured with a setting."""
    setting = str(tuned.threads), str(tuned.piece_tokens), tuned.kv
    [own] = [row for row in rows_of(path) if (row["threads"], row["piece_tokens"], row["kv"]) == setting]
    return answer_ms(own)


class Sweep(NamedTuple):
    """Rows of one machine, model and engine that differ in the layers on the CPU alone, fewest first. Without a
    prompt's speed in every row the whole answer is its tokens."""

    rows: tuple[MeasuredRow, ...]

    @property
    def name(self) -> str:
        return f"{self.rows[0].id}-{self.rows[-1].id}"

    def slower(self, layers: int, whole_answer: bool = False) -> float:
        """Measured time at so many layers over the least, minus 1: of a token, or of the row's prompt and answer.

        Between two rows on a straight line; below the fewest layers that were measured, as there.
        """
        prompts = whole_answer and all(row.prompt_tokens_per_s for row in self.rows)
        times = [_answer_s(row) if prompts else _token_s(row) for row in self.rows]
        return float(np.interp(layers, [row.cpu_layers for row in self.rows], times)) / min(times) - 1

    def named(self) -> int:
        """MoE layers on the CPU in the setting that is fastest at decode, as the sweep ran it."""
        row = self.rows[0]
        asked = Question(
            model=row.model, weights=row.weights, machine=row.machine, engine=row.engine, threads=row.threads,
            ubatch=row.piece_tokens or 512, prompt_tokens=row.depth_tokens + (row.prompt_tokens or 1),
            generated=row.generated_tokens,
        )
        question = TuneQuestion(asked, "decode", ("q8_0" if row.kv_bits == 8.5 else "f16",))
        engine = load_engine(row.engine)
        assert isinstance(engine, FittedEngine)
        return best_plain(question, machine_of(row.machine), shape_of(row), engine).host_layers


def sweeps() -> list[Sweep]:
    found = defaultdict(list)
    for row in read_rows():
        if row.decode_tokens_per_s is not None and row.scored:
            machine, model = (row.source, row.date, row.machine), (row.shape_name, row.engine)
            alike = (*machine, *model, row.depth_tokens, row.kv_bits, row.piece_tokens)
            found[alike].append(row)
    ordered = (tuple(sorted(rows, key=lambda row: row.cpu_layers)) for rows in found.values())
    return [Sweep(rows) for rows in ordered if len({row.cpu_layers for row in rows}) > 1]


def _token_s(row: MeasuredRow) -> float:
    assert row.decode_tokens_per_s is not None
    return 1 / row.decode_tokens_per_s


def _answer_s(row: MeasuredRow) -> float:
    assert row.prompt_tokens is not None
    assert row.prompt_tokens_per_s is not None
    return row.prompt_tokens / row.prompt_tokens_per_s + row.generated_tokens * _token_s(row)


SWEEPS = sweeps()
NAMED = {  # by the first and the last row: layers that are named, and how much slower a token, and a whole answer, is
    "173-171": (9, 0.0, 0.0), "179-177": (12, 0.0, 0.0), "182-180": (9, 0.0, 0.0), "205-200": (21, 0.078, 0.032),
    "212-207": (18, 0.0, 0.0), "213-215": (19, 0.0, 0.0), "216-218": (23, 0.01, 0.0), "221-219": (33, 0.02, 0.02),
    "224-222": (29, 0.0, 0.0), "233-232": (35, 0.023, 0.037), "238-235": (38, 0.017, 0.017),
    "240-246": (7, 0.101, 0.101), "260-259": (0, 0.0, 0.0), "273-272": (34, 0.0, 0.0),
}


def test_the_sweeps_are_those_of_the_rows() -> None:
    assert [sweep.name for sweep in SWEEPS] == list(NAMED)
    assert sum(len(sweep.rows) for sweep in SWEEPS) == 50


@pytest.mark.parametrize("sweep", SWEEPS, ids=[sweep.name for sweep in SWEEPS])
def test_the_number_that_is_named_is_the_fastest_that_loads_or_nearly(sweep: Sweep) -> None:
    """Eight of fourteen are beyond their sweep, seven with fewer layers on the CPU and one with more; they count as its
    end. On the RX 6700 XT (205-200) 18 layers decode 8 % faster than the 21 that are named, and its prompts are slower
    there than with 20: the card's memory was full. On an RTX 3060 (240-246) 4 layers loaded where 7 are named."""
    layers, token, answer = NAMED[sweep.name]
    assert sweep.named() == layers
    assert sweep.slower(layers) == pytest.approx(token, abs=0.005)
    assert sweep.slower(layers, whole_answer=True) == pytest.approx(answer, abs=0.005)


def test_all_but_one_are_within_5_percent_of_the_fastest() -> None:
    assert [name for name, (_, *slower) in NAMED.items() if min(slower) > WITHIN] == ["240-246"]


# --- Drafts by a model's own layers -----------------------------------------------------------------------------------


SMALL: dict[str, Any] = {"model": "deepseek-v2-lite:4", "gpu": "rtx-3060", "ram": "ddr4-3200", "prompt_tokens": 512}


@cache
def bench(acceptance: float | None = 0.8, **asked: Any) -> Workbench:
    question = TuneQuestion(Question(**{**SMALL, **asked}), "both", ("f16",), draft_acceptance=acceptance)
    return Workbench(question, question.hardware, engine_of(question.fit, question.hardware))


def test_a_step_gives_one_token_more_than_are_accepted() -> None:
    """Half of the drafts behind accepted ones: 1 + 1/2 + 1/4 tokens in 3.5 ms."""
    step = DraftedStep(2, draft_ns=500_000, verify_ns=3_000_000)
    assert step.token_ns(0.5) == 2_000_000
    assert step.token_ns(0.0) == 3_500_000
    assert step.token_ns(1.0) == pytest.approx(3_500_000 / 3)


@pytest.mark.parametrize(
    ("plain_ns", "share"), [(3_500_000, 0.0), (2_000_000, 0.5), (3_500_000 / 3, 1.0), (1_000_000, None)]
)
def test_drafts_are_worth_it_from_the_share_with_which_a_token_takes_as_long(
    plain_ns: int, share: float | None
) -> None:
    found = DraftedStep(2, 500_000, 3_000_000).break_even(plain_ns)
    assert found is None if share is None else found == pytest.approx(share, abs=1e-3)


def test_a_step_verifies_its_drafts_with_all_experts_that_any_of_them_chooses() -> None:
    speed = bench().speed(Setting("f16", 512, 8))
    one, three = (drafted_step(speed, drafts, active=10.0) for drafts in (1, 3))
    assert three.draft_ns == 3 * one.draft_ns > 0
    context = 512 + 256 // 2
    verified = decode_time(speed.shape, speed.hardware, speed.engine, speed.split, context, drafts=3, active=10.0)
    assert three.verify_ns == verified.total_ns
    assert 10 / 6 <= verified.gpu_experts_ns / speed.decode.gpu_experts_ns < 2.4  # and 2.4 rows for one


def test_one_token_alone_is_a_plain_step() -> None:
    speed = bench().speed(Setting("f16", 512, 8))
    plain = decode_time(speed.shape, speed.hardware, speed.engine, speed.split, 640)
    assert decode_time(speed.shape, speed.hardware, speed.engine, speed.split, 640, drafts=0, active=6.0) == plain


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_experts_of_consecutive_tokens_are_counted_once(tokens: int) -> None:
    trace = load_trace("mini-moe")
    counts = []
    for sequence in np.unique(trace.sequence):
        rows = trace.topk_ids[(trace.sequence == sequence) & (trace.phase == DECODE)]
        for first in range(len(rows) - tokens + 1):
            for layer in range(rows.shape[1]):
                counts.append(len({int(each) for each in rows[first : first + tokens, layer].ravel()}))
    assert active_experts(trace, tokens) == pytest.approx(np.mean(counts))


def test_a_named_acceptance_leads_to_a_line_with_the_drafts_that_are_best() -> None:
    """Of 80 % one draft would save 7 %, which is less than drafts are worth."""
    found = draft_answer(bench(0.9).question, bench(0.9), Setting("f16", 512, 8))
    assert found is not None
    assert found.acceptances == (0.9,)
    assert found.best is not None
    assert found.best == max(found.choices, key=lambda each: each.tokens_per_s[0.9])
    assert [each.drafts for each in found.choices] == list(range(1, MOST_DRAFTS + 1))
    assert found.command is not None
    assert found.command.endswith(f"-np 1 --spec-type draft-mtp --spec-draft-n-max {found.best.drafts}")


def test_the_layer_that_drafts_takes_room_from_experts() -> None:
    small = {"gpu": "gtx-1060-6gb", "model": "deepseek-v2-lite"}
    found, plain = draft_answer(bench(**small).question, bench(**small), Setting("f16", 512, 8)), bench(**small)
    assert found is not None
    layers = [int(words.split("--n-cpu-moe ")[1].split()[0])
              for words in (found.command or "", plain.tuned(Setting("f16", 512, 8)).command)]
    assert layers[0] > layers[1]
    assert found.layer_bytes > plain.question.shape_with("f16").moe_layer_bytes


def test_each_layer_that_drafts_takes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, shape = bench().question, bench().question.shape_with("f16")
    taken = []
    for layers in (1, 2, 3):
        its = replace(shape, mtp_layers=layers)
        monkeypatch.setattr(TuneQuestion, "shape_with", lambda self, kv, its=its: its)
        found = draft_answer(asked, bench(), Setting("f16", 512, 8))
        assert found is not None
        taken.append(found.layer_bytes)
    assert taken == [taken[0], 2 * taken[0], 3 * taken[0]]


def test_where_no_draft_is_accepted_none_is_named() -> None:
    found = draft_answer(bench(0.0).question, bench(0.0), Setting("f16", 512, 8))
    assert found is not None
    assert (found.best, found.command) == (None, None)


def test_a_file_with_such_layers_is_answered_with_the_range_that_was_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = bench(None).question
    assert draft_answer(asked, bench(None), Setting("f16", 512, 8)) is None
    shape = asked.shape_with("f16")
    monkeypatch.setattr(TuneQuestion, "shape_with", lambda self, kv: replace(shape, mtp_layers=1))
    found = draft_answer(asked, bench(None), Setting("f16", 512, 8))
    assert found is not None
    assert found.acceptances == PUBLISHED


def test_drafts_without_room_do_not_end_the_answer() -> None:
    """A context that leaves less than the layer that drafts needs, also where its acceptance is named."""
    asked = Question(model="gpt-oss-20b", gpu="rtx-2060", ram="ddr4-3200", prompt_tokens=512, window=118_000)
    for acceptance in (0.8, None):
        question = TuneQuestion(asked, "both", ("f16",), draft_acceptance=acceptance)
        shape = replace(question.shape_with("f16"), mtp_layers=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TuneQuestion, "shape_with", lambda self, kv, shape=shape: shape)
            found = tune(question)
        assert found.drafts is not None
        assert (found.drafts.choices, found.drafts.best, found.drafts.command) == ((), None, None)


@pytest.mark.parametrize(("asked", "why"), [
    ({"batch": 2}, "expected one sequence, got 2"),
    ({"engine": "ktransformers"}, r"expected llama\.cpp, got ktransformers"),
])
def test_an_acceptance_that_was_named_in_vain_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(FitError, match=why):
        draft_answer(bench(**asked).question, bench(**asked), Setting("f16", 512, 8))


def test_speedups_that_were_measured_on_a_laptop_are_less_by_what_the_page_says() -> None:
    """Qwen3.6-35B-A3B on an RTX 3060 with 6 GB: 22.9 tokens/s, and 1.20, 1.28, 1.21 and 1.14 times as many with 1 to 4
    drafts a step, of which 88, 82, 71 and 64 % were accepted (ggml-org/llama.cpp PR 22673)."""
    asked = {"model": "qwen3.6-35b-a3b", "gpu": "rtx-3060", "ram": "ddr4-3200", "cores": 8, "prompt_tokens": 1000}
    question = TuneQuestion(Question(**asked), "decode", ("f16",), keep_free_gb=6.4)
    own = Workbench(question, question.hardware, engine_of(question.fit, question.hardware))
    speed, trace = own.speed(Setting("f16", 512, 8)), load_trace("synthetic:qwen3.6-35b-a3b")
    rows = ((1, 0.88, 1.20), (2, 0.866, 1.28), (3, 0.84, 1.21), (4, 0.83, 1.14))
    steps = {drafts: drafted_step(speed, drafts, active_experts(trace, 1 + drafts)) for drafts, _, _ in rows}
    less = [1 - measured * steps[drafts].token_ns(share) / speed.decode.total_ns for drafts, share, measured in rows]
    assert less == pytest.approx([0.09, 0.11, 0.165, 0.2], abs=0.01)
    assert f"{min(less):.0%} to {max(less):.0%}" == MEASURED_LESS
