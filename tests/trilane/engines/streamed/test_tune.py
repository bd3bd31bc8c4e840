"""``trilane tune`` for programs that read experts by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.table import Table

from trilane.common.units import GB
from trilane.engines.question import FitError, Question
from trilane.engines.streamed.kinds import streamed_engines
from trilane.engines.streamed.tune import command_of, streamed_tuning, tunings_next_to
from trilane.output.pages.output import Part
from trilane.output.pages.streamed_tune import ERRORS, readers_part, streamed_tune_page
from trilane.verbs.named_parts import READERS

DESKTOP = Question("glm-5", gpu="none", ram="ddr5-5600", cpu="ryzen-9-9950x", ram_gb=128, disk="8.8")
MAC = Question("deepseek-v4-flash", gpu="apple-m5-pro", ram_gb=64, disk="12.8")


def test_the_command_line_knows_each_program() -> None:
    assert set(READERS) == set(streamed_engines())


def test_the_fastest_setting_comes_first_with_its_command() -> None:
    found = streamed_tuning("colibri", DESKTOP)
    times = [one.token_ns for one in found.speeds]
    assert times == sorted(times)
    assert len(times) == 4
    assert command_of(found.best) == "DIRECT=1 MTP=0 coli run --model DIR --ram 117"
    assert found.to_dict()["settings"][0]["tokens_per_s"] == 1e9 / times[0]
    assert streamed_tune_page(found)


def test_a_model_of_the_same_shape_is_read_as_well() -> None:
    asked = (replace(DESKTOP, model=model) for model in ("glm-5", "glm-5.2"))
    reads = [streamed_tuning("colibri", question).best.disk_bytes for question in asked]
    assert reads[0] == reads[1]


def test_a_program_whose_cache_is_named_tries_sizes_that_fit() -> None:
    found = streamed_tuning("ds4-metal", MAC)
    sizes = {one.slots_bytes / GB for one in found.speeds}
    assert {4, 8, 16, 32} <= sizes
    assert max(sizes) * GB <= found.best.most_slots_bytes
    assert f"--ssd-streaming-cache-experts {found.best.slots_bytes / GB:.0f}GB" in command_of(found.best)


def test_with_little_memory_the_speed_is_that_of_the_whole_gigabytes_that_the_command_names() -> None:
    (only,) = streamed_tuning("ds4-metal", replace(MAC, ram_gb=18)).speeds
    assert only.slots_bytes == 3 * GB < only.most_slots_bytes
    assert command_of(only).endswith("--ssd-streaming-cache-experts 3GB")


def test_other_engines_answers_have_the_programs_that_read_the_model_next_to_them() -> None:
    asked = replace(MAC, weights="q2_k", threads=8, window=8192)  # of llama.cpp
    found = tunings_next_to(asked, ["deepseek-v4-flash"])
    assert [one.name for one in found] == ["ds4-metal", "colibri-deepseek-v4"]
    assert found[0].best == streamed_tuning("ds4-metal", MAC).best
    assert {one.best.shape.name for one in tunings_next_to(asked)} == {
        "deepseek-v4-flash", "glm-5", "glm-5.3-flash", "qwen3.8-flash-next",
    }
    assert tunings_next_to(replace(asked, disk=None)) == ()
    assert tunings_next_to(asked, ["gpt-oss-120b"]) == ()


@pytest.mark.parametrize(("name", "question", "known"), [
    ("ds4-metal", MAC, True), ("ds4-metal", replace(MAC, model="glm-5.3-flash", gpu="apple-m5-max", ram_gb=128), False),
    ("colibri", replace(DESKTOP, model="glm-5.2"), True),
    ("bigmoeonedge", replace(DESKTOP, model="gpt-oss-120b"), False),
])
def test_the_error_is_known_of_models_with_measured_speeds_alone(name: str, question: Question, known: bool) -> None:
    found = streamed_tuning(name, question)
    assert ((name, found.model) in ERRORS) == known
    page, next_to = cells(streamed_tune_page(found)), cells(readers_part([found]))
    assert ("not known: no measured speed of this model was compared" in page) != known
    assert any("were predicted" in cell for cell in page) == known
    assert (next_to[-1] == next_to[-2] == "-") != known


def cells(page: list[Part]) -> list[str]:
    """The text of each cell of its tables."""
    tables = [part for part in page if isinstance(part, Table)]
    return [str(cell) for table in tables for column in table.columns for cell in column.cells]


@pytest.mark.parametrize(("name", "question", "match"), [
    ("colibri", replace(DESKTOP, disk=None), "expected --disk and --ram-gb"),
    ("colibri", replace(DESKTOP, ram_gb=16), "expected 22 GB of memory or more"),
    ("colibri", replace(DESKTOP, weights="q4_0", batch=2), "got --weights and --batch"),
    ("colibri", replace(DESKTOP, threads=8, window=8192), "got --threads and --context"),
    ("ds4-metal", replace(MAC, ram_gb=15), r"expected 17 GB of memory or more .* and its cache, got 16"),
    ("ds4-metal", replace(MAC, gpu="rtx-3090", ram="ddr5-5600"), "does not run on NVIDIA's GPUs"),
    ("ds4-cuda", MAC, "does not run on Apple's GPUs"),
    ("ds4-cuda", replace(MAC, gpu="rtx-3090", ram="ddr5-5600"), "expected a machine whose GPU shares"),
    ("colibri", replace(DESKTOP, model="gpt-oss-120b"), "expected glm-5"),
    ("bigmoeonedge", replace(MAC, model="gpt-oss-120b"), "expected a machine with --gpu none, whose CPU computes"),
    ("ds4-metal", replace(DESKTOP, model="deepseek-v4-flash"), "expected a machine with a GPU"),
])
def test_what_it_cannot_answer_is_refused(name: str, question: Question, match: str) -> None:
    with pytest.raises(FitError, match=match):
        streamed_tuning(name, question)


def test_a_program_on_the_cpu_answers_for_each_of_its_models_and_slots_are_named_by_the_layer() -> None:
    for model in streamed_engines()["bigmoeonedge"].models:
        best = streamed_tuning("bigmoeonedge", replace(DESKTOP, model=model)).best
        assert command_of(best).startswith("bmoe-cli -m FILE --moe-stream --cache-mb ")
    slotstream = streamed_tuning("slotstream", replace(MAC, model="qwen3.8-flash-next")).best
    of_all = slotstream.slots_bytes / slotstream.shape.routed_bytes
    assert command_of(slotstream) == f"slotstream serve --experts-per-layer {int(512 * of_all)}"
