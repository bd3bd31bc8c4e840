"""Rows to which nothing was fitted: they are read, asked as users ask, and have lines of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from trilane.engines.accuracy.apart import ON_DISK, PARALLEL, SEVERAL_GPUS, VLLM, WITHIN, apart_lines, speeds_of
from trilane.engines.accuracy.errors import Speeds, factor
from trilane.engines.accuracy.measured_rows import MeasuredRow, RowsError, predict, read_rows
from trilane.engines.accuracy.scores import SHIPPED, scores_of
from trilane.engines.question import Question
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_modes import PROPORTIONS
from trilane.output.pages.fit_engine import CARDS_TOGETHER, PARTS_OF_LAYERS, WITH_VLLM
from trilane.output.pages.fit_engine import ON_DISK as WITH_A_DISK
from trilane.output.pages.fit_engine import ON_SEVERAL as ON_SEVERAL_GPUS

DISK_ROWS = read_rows(ON_DISK)


def test_no_row_is_among_those_that_engines_are_fitted_to() -> None:
    fitted = read_rows()
    for row in (*read_rows(SEVERAL_GPUS), *read_rows(VLLM), *read_rows(PARALLEL), *DISK_ROWS):
        assert row.id not in {one.id for one in fitted if not one.left_out}
        assert row.source
        assert row.scored or row.quality == "C"


def test_a_row_with_a_disk_is_the_question_of_its_machine() -> None:
    row = next(one for one in DISK_ROWS if one.id == "t3t-8")
    asked = Question(
        "qwen3.8-flash-next", weights="ud-iq3_xxs", gpu="rtx-3060", ram="ddr4-2133", cpu="core-i7-7700", threads=4,
        generated=128, ram_gb=31, disk="nvme-3x4", n_cpu_moe=48, prompt_tokens=2343, engine="llama.cpp",
    )
    speed = EngineSpeed.asked(asked, asked.model_shape, asked.load_machine())
    assert speed.decode.disk_ns > 5e6
    assert speeds_of(row) == Speeds(1e9 / speed.decode.total_ns, 2343e9 / speed.prompt.total_ns)


def test_a_users_file_of_rows_with_a_disk_is_asked_like_the_bundled_one() -> None:
    """A disk that was passed over would leave decode a half too fast."""
    scores = scores_of(str(ON_DISK))
    assert scores.predictions[SHIPPED]["t3t-8"] == speeds_of(next(row for row in DISK_ROWS if row.id == "t3t-8"))


@pytest.mark.parametrize(("changes", "message"), [
    ({"ram_gb": None}, "ram_gb: expected the GiB of memory above the disk 'nvme-3x4', got none"),
    ({"kv_bits": 8.5}, "kv_bits: expected nothing in rows with a disk, got 8.5"),
    ({"sm": "tensor"}, "sm: expected layer in rows with a disk, got tensor"),
])
def test_a_row_with_a_disk_states_its_memory_and_no_setting_that_is_not_asked(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RowsError, match=re.escape(message)):
        speeds_of(replace(DISK_ROWS[0], **changes))


def test_what_a_second_card_does_to_prompts_is_predicted_within_a_twentieth() -> None:
    """Most of the error of these rows is that of one such card (docs/notes/accuracy.md)."""
    cards = {_setting(row): row for row in read_rows(SEVERAL_GPUS)
             if row.model == "qwen3.6-35b-a3b" and row.sm == "layer"}
    ones = read_rows(SEVERAL_GPUS.with_name("one_of_two_gpus.csv"))
    measured = [(cards[_setting(one)].prompt_tokens_per_s or 0) / (one.prompt_tokens_per_s or 1) for one in ones]
    predicted = [_predicted(cards[_setting(one)]) / _predicted(one) for one in ones]
    assert len(ones) == 12
    assert median(abs(ours / theirs - 1) for ours, theirs in zip(predicted, measured, strict=True)) < 0.05


def _setting(row: MeasuredRow) -> tuple[str, int | None, int | None]:
    return row.engine, row.cpu_layers, row.prompt_tokens


def _predicted(row: MeasuredRow) -> float:
    speed = predict(row).prompt_tokens_per_s
    assert speed is not None
    return speed


def test_each_kind_of_rows_has_a_line_for_each_kind_of_speed() -> None:
    lines = {(line.group, line.quantity): line for line in apart_lines()}
    assert {key: (line.errors.rows, line.errors.machines) for key, line in lines.items()} == {
        ("several GPUs", "decode"): (30, 7), ("several GPUs", "prompts"): (51, 6),
        ("experts on a disk", "decode"): (19, 5), ("experts on a disk", "prompts"): (9, 2),
        ("own readers", "decode"): (48, 21), ("vLLM", "decode"): (12, 4), ("vLLM", "prompts"): (1, 1),
        ("cards together", "decode"): (8, 5), ("cards together", "prompts"): (1, 1),
    }
    disk = lines["experts on a disk", "decode"]
    near = [factor((speeds_of(row).decode or 0) / row.decode_tokens_per_s - 1) <= WITHIN for row in DISK_ROWS
            if row.decode_tokens_per_s]
    assert disk.within == sum(near) / len(near) == 16 / 19


def test_answers_say_what_errors_such_rows_have() -> None:
    on_several, _, on_disk, *_, with_vllm, _, together, _ = (line.errors for line in apart_lines())
    assert f"{on_several.by_machine:.0%} in the median of {on_several.machines} machines" in ON_SEVERAL_GPUS
    assert f"({on_several.rows} speeds)" in ON_SEVERAL_GPUS
    assert f"up to {on_several.p90:.0%}" in ON_SEVERAL_GPUS
    within = next(line.within for line in apart_lines() if line.group == "experts on a disk")
    assert f"{on_disk.rows} speeds of {on_disk.machines} machines" in WITH_A_DISK
    assert f"{on_disk.median:.0%} off in the median, {within:.0%} of them" in WITH_A_DISK
    assert f"{with_vllm.by_machine:.0%} in the median of {with_vllm.machines} machines" in WITH_VLLM
    assert f"({with_vllm.rows} speeds)" in WITH_VLLM
    assert f"{together.by_machine:.0%} in the median of {together.machines} machines" in CARDS_TOGETHER
    assert f"({together.rows} speeds" in CARDS_TOGETHER
    parts = [row for row in read_rows(SEVERAL_GPUS) if row.sm in PROPORTIONS and row.decode_tokens_per_s]
    errors = sorted((speeds_of(row).decode or 0) / (row.decode_tokens_per_s or 1) - 1 for row in parts)
    assert not any(row.cpu_layers for row in parts)
    assert all("rtx" in row.machine for row in parts)
    assert f"; {len(parts)} of these with a part of each layer" in PARTS_OF_LAYERS
    assert f"{-errors[0]:.0%} too slow to {errors[-1]:.0%} too fast" in PARTS_OF_LAYERS


@pytest.mark.parametrize(("group", "quantity", "median"), [
    ("several GPUs", "decode", 0.09), ("several GPUs", "prompts", 0.16),
    ("experts on a disk", "decode", 0.36), ("experts on a disk", "prompts", 0.23), ("own readers", "decode", 0.18),
    ("vLLM", "decode", 0.19), ("cards together", "decode", 0.26),
])
def test_medians_are_those_that_the_page_tells(group: str, quantity: str, median: float) -> None:
    [line] = [one for one in apart_lines() if (one.group, one.quantity) == (group, quantity)]
    assert round(line.errors.median, 2) == median
