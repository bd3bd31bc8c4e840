"""Rows of programs that read experts by themselves."""

from __future__ import annotations

from statistics import median

from trilane.common.units import GB
from trilane.engines.accuracy.errors import factor
from trilane.engines.accuracy.measured_rows import NS
from trilane.engines.streamed.kinds import streamed_engines
from trilane.engines.streamed.rows import StreamedRow, streamed_rows
from trilane.output.pages.streamed_tune import ERRORS

ROWS = streamed_rows()


def test_each_row_names_a_program_its_source_and_what_was_assumed() -> None:
    assert {row.engine for row in ROWS} <= set(streamed_engines())
    assert len({row.id for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.source
        assert row.scored
        assert row.decode_tokens_per_s


def test_a_row_is_the_question_of_its_machine() -> None:
    row = next(one for one in ROWS if one.id == "t3t-36")
    speed = row.speed
    assert (speed.setting.slots_bytes, speed.setting.gpu_bytes) == (73.3 * GB, 28 * GB)
    assert speed.setting.readers == 16
    assert speed.direct
    assert speed.question.disk == "11.48"
    assert speed.shape.expert_bytes_by_layer[0] == 3 * 6144 * 2048 // 2


def test_stated_hit_rates_are_off_by_as_much_as_the_notes_say() -> None:
    """docs/notes/disks.md has why."""
    off = [abs(row.hit_percent - 100 * row.speed.hit_rate) for row in ROWS if row.hit_percent is not None]
    assert len(off) == 19
    assert round(median(off), 1) == 4.8
    assert sum(one <= 6 for one in off) == 11


def test_answers_say_what_errors_the_rows_of_their_program_have() -> None:
    by_model: dict[tuple[str, str], list[StreamedRow]] = {}
    for row in ROWS:
        by_model.setdefault((row.engine, row.model), []).append(row)
    assert {key: errors(rows) for key, rows in by_model.items()} == ERRORS


def errors(rows: list[StreamedRow]) -> tuple[int, int, float, float]:
    """Rows, machines, median error, share within a factor of 1.5."""
    off = [NS / row.speed.token_ns / row.decode_tokens_per_s - 1 for row in rows if row.decode_tokens_per_s]
    near = sum(factor(one) <= 1.5 for one in off) / len(off)
    return len(rows), len({row.machine for row in rows}), round(median(map(abs, off)), 2), round(near, 2)
