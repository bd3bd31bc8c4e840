"""Scores of measured rows, and the closed forms that they are compared with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from sim.costs.engine import load_engine
from sim.machine.hardware import load_hardware
from tests.kit.results import row
from traces.models.catalogue import load_model
from trilane.engines.accuracy import measured_rows
from trilane.engines.accuracy.errors import QUANTITIES, Speeds, error_of, error_table, factor, measured
from trilane.engines.accuracy.measured_rows import (
    BUNDLED,
    COLUMNS,
    MeasuredRow,
    RowsError,
    predict,
    read_rows,
    shape_of,
    write_template,
)
from trilane.engines.accuracy.scores import (
    HELD_OUT,
    OTHERS,
    SHIPPED,
    Scores,
    bundled_scores,
    data_sheet,
    explain,
    llmfit,
    row_of,
    scores_of,
    sheet_prompt_s,
    token_bytes,
)
from trilane.engines.split_speed import StaticSplit

MACHINE = load_hardware("rtx-4080+ddr5-5600+ryzen-9-7950x")
SHAPE = load_model("mixtral-8x7b")
EXPERT = 3 * 4096 * 14336 * 2  # bytes
ATTENTION = (2 * 4096 * 4096 + 2 * 4096 * 1024) * 2  # of a layer: queries and output, keys and values
REST = 32 * (ATTENTION + 4096 * 8 * 2) + 32000 * 4096 * 2  # with gates and head
CACHE = 32 * 2 * 1024 * 2  # keys and values of a token
GPU, DRAM, LINK, FLOPS = 717e9, 2 * 5.6e9 * 8, 31.5e9, 97.5e12
SPLIT = StaticSplit(10)
ROW = row(model="mixtral-8x7b", weights="bf16", cpu_layers=10, depth_tokens=1000, generated_tokens=128)


def test_bytes_of_a_token() -> None:
    read = token_bytes(SHAPE, MACHINE, SPLIT, 1064)
    assert read.gpu_weights == REST + 22 * 2 * EXPERT
    assert read.cpu_weights == 10 * 2 * EXPERT
    assert read.cache == 1064 * CACHE


def test_some_experts_of_these_layers_on_the_gpu() -> None:
    read = token_bytes(SHAPE, MACHINE, StaticSplit(10, gpu_experts=2), 0)
    assert read.cpu_weights == 10 * 2 * EXPERT * 6 / 8
    assert sum(read) == sum(token_bytes(SHAPE, MACHINE, SPLIT, 0))


def test_data_sheet() -> None:
    seconds = (REST + 22 * 2 * EXPERT + 1064 * CACHE) / GPU + 10 * 2 * EXPERT / DRAM
    assert data_sheet(ROW).decode == pytest.approx(1 / seconds)
    assert data_sheet(ROW).prompts is None


def test_llmfit() -> None:
    seconds = 10 * 2 * EXPERT / DRAM + (REST + 22 * 2 * EXPERT) / (0.55 * GPU)
    assert llmfit(ROW) == (pytest.approx(0.8 / seconds), None)


def test_data_sheet_of_a_prompt_copies_experts_once_a_piece() -> None:
    """1,000 tokens in two pieces."""
    products = 1000 * (REST + 32 * 2 * EXPERT) / FLOPS  # two operations a weight of two bytes
    copies = 2 * 10 * 8 * EXPERT / LINK
    assert sheet_prompt_s(SHAPE, MACHINE, load_engine("llama.cpp"), SPLIT, 1000) == pytest.approx(products + copies)


def test_data_sheet_of_a_prompt_that_the_cpu_computes() -> None:
    products = 1000 * (REST + 22 * 2 * EXPERT) / FLOPS + 1000 * 10 * 2 * EXPERT / MACHINE.cpu.flops_per_s
    found = sheet_prompt_s(SHAPE, MACHINE, load_engine("llama.cpp"), replace(SPLIT, repacked=True), 1000)
    assert found == pytest.approx(products)


def test_without_a_gpu_all_bytes_are_in_dram() -> None:
    alone = replace(ROW, machine="none+ddr5-5600+ryzen-9-7950x", cpu_layers=32)
    weights = REST + 32 * 2 * EXPERT
    assert data_sheet(alone).decode == pytest.approx(DRAM / (weights + 1064 * CACHE))
    assert llmfit(alone).decode == pytest.approx(0.8 * DRAM / weights)


HEAD = "id,model,machine,engine,cpu_layers,decode_tokens_per_s\n"


@cache
def scores() -> Scores:
    return bundled_scores()


def test_every_bundled_row_that_is_not_left_out_is_predicted() -> None:
    for one in scores().rows:
        for name, predictions in scores().predictions.items():
            for quantity in QUANTITIES:
                if measured(one).of(quantity) is not None and not (name == "llmfit" and quantity == "prompts"):
                    assert predictions[one.id].of(quantity), (one.id, name)


def test_every_row_is_scored_or_left_out_with_a_reason() -> None:
    assert {one.id for one in scores().rows} | scores().left_out.keys() == {one.id for one in read_rows()}
    assert all(scores().left_out.values())


def test_no_closed_form_has_the_name_of_another() -> None:
    """The null model is that of policies (``sim.runs.bounds``)."""
    assert list(scores().predictions) == ["held out", "shipped", "data sheet", "llmfit"]


def test_predictions_are_better_than_both_closed_forms() -> None:
    for key in [("decode", "all", "all"), ("prompts", "all", "all")]:
        first, *others = scores().table()[key].values()
        assert all(first.median < other.median for other in others[1:])


def test_pairs_that_are_right_are_as_many_as_the_page_says() -> None:
    counts = {of: [(one.right, one.pairs) for one in scores().pairs() if one.quantity == of] for of in QUANTITIES}
    told = {of: tuple(map(sum, zip(*each, strict=True))) for of, each in counts.items()}
    assert told == {"decode": (432, 442), "prompts": (258, 278)}


def test_the_furthest_rows_are_the_worst_in_either_direction() -> None:
    found = scores().furthest("decode", 0.25)
    factors = [factor(error) for _, error in found]
    assert factors == sorted(factors, reverse=True)
    assert min(factors) > 1.25
    assert factor(-0.5) == factor(1.0) == 2.0


@pytest.mark.parametrize("row", scores().rows[::9], ids=lambda row: row.id)
def test_parts_of_a_time_add_up_to_the_prediction(row) -> None:  # type: ignore[no-untyped-def]
    for each in explain(row):
        speed = scores().predictions[SHIPPED][row.id].of(each.quantity)
        assert 1e9 * each.tokens / each.predicted_ns == pytest.approx(speed)
        times = [part.ns for part in each.parts]
        assert times == sorted(times, reverse=True)
        longest = each.parts[0]
        assert each.needed_ns + each.predicted_ns - longest.ns == pytest.approx(each.measured_ns)


def test_rates_of_parts() -> None:
    """Experts of 24 of 40 layers: 8 of 256 experts with 3 x 2048 x 512 weights."""
    row = row_of(scores().rows, "177")
    decode, prompts = explain(row)
    experts = next(part for part in decode.parts if part.name == "experts on the CPU")
    assert experts.unit == "GB/s"
    assert experts.amount == pytest.approx(24 * 8 * 3 * 2048 * 512 * 4.9 / 8, rel=0.06)
    assert experts.rate() == pytest.approx(experts.amount / experts.ns)
    names = [{part.name for part in each.parts} for each in (decode, prompts)]
    assert names[0] & names[1] == {"attention", OTHERS, "experts on the GPU"}
    computed = next(part for part in prompts.parts if part.unit == "TFLOP/s")
    assert computed.amount == 512 * 40 * 8 * 2 * 3 * 2048 * 512


def test_the_template_is_read_and_scored(tmp_path: Path) -> None:
    write_template(tmp_path / "mine.csv")
    found = scores_of(str(tmp_path / "mine.csv"))
    assert [row.id for row in found.rows] == ["example"]
    assert HELD_OUT not in found.predictions
    assert found.first["example"] == scores().predictions[SHIPPED]["177"]
    assert (tmp_path / "mine.csv").read_text().startswith(",".join(COLUMNS) + "\n")


def test_a_template_of_a_row_that_was_repacked_is_read_as_that_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repacked = next(row for row in read_rows() if row.repacked)
    monkeypatch.setattr(measured_rows, "EXAMPLE", repacked.id)
    write_template(tmp_path / "mine.csv")
    assert read_rows(tmp_path / "mine.csv") == [replace(repacked, id="example", left_out="", fault="")]


def test_a_row_in_json_has_its_setting_and_a_speed_of_each_kind() -> None:
    row = row_of(scores().rows, "177")
    facts = scores().facts(row)
    assert (facts["id"], facts["model"], facts["machine"]) == ("177", row.shape_name, row.machine)
    assert (facts["engine"], facts["quality"]) == (row.engine, row.quality)
    assert facts["decode"]["measured"] == row.decode_tokens_per_s
    assert facts["decode"].keys() == {"measured", *scores().predictions}


def test_own_rows_with_unknown_names_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(
        f"{HEAD}a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,8,70\nb,no-such-model,rtx-4080+ddr5-5600,llama.cpp,8,70\n"
        "c,qwen3-30b-a3b,no-such-gpu+ddr5-5600,llama.cpp,8,70\nd,qwen3-30b-a3b,rtx-4080+ddr5-5600,no-engine,8,70\n"
    )
    found = scores_of(str(tmp_path / "mine.csv"))
    assert [row.id for row in found.rows] == ["a"]
    assert found.left_out.keys() == {"b", "c", "d"}
    for name, word in (("b", "no-such-model"), ("c", "no-such-gpu"), ("d", "no-engine")):
        assert word in found.left_out[name]


@pytest.mark.parametrize(("text", "words"), [
    (HEAD, "expected rows that can be asked; it has none"),
    (f"{HEAD}a,none,none,none,8,70\n", "expected rows that can be asked; "),
    (f"{HEAD}{'a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,8,70' + chr(10)}" * 2, "line 3"),
    (f"{HEAD}{('a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,8,70' + chr(10)) * 2}", "'a' is there twice"),
    ("id,model\n1,x\n", "its first line lacks the columns cpu_layers, engine, machine"),
    (f"{HEAD}a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,many,70\n", "line 2: cpu_layers: expected a whole number"),
    (f"{HEAD}a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,8,-70\n", "line 2: decode_tokens_per_s: expected a number"),
])
def test_own_rows_that_cannot_be_scored(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(RowsError) as refused:
        scores_of(str(tmp_path / "mine.csv"))
    assert words in str(refused.value)


def test_numbers_that_no_model_or_prompt_has_are_refused(tmp_path: Path) -> None:
    head = "id,model,machine,engine,cpu_layers,gpu_experts,piece_tokens,prompt_tokens,prompt_tokens_per_s\n"
    (tmp_path / "mine.csv").write_text(f"{head}a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,8,129,512,512,70\n")
    with pytest.raises(RowsError, match="row a: gpu_experts: expected at most 128, the model's own, got 129"):
        scores_of(str(tmp_path / "mine.csv"))
    (tmp_path / "mine.csv").write_text(f"{head}a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,49,0,512,512,70\n")
    with pytest.raises(RowsError, match="row a: cpu_layers: expected at most 48, the model's own, got 49"):
        scores_of(str(tmp_path / "mine.csv"))
    (tmp_path / "mine.csv").write_text(f"{head}a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,8,0,1,5000,70\n")
    with pytest.raises(RowsError, match="line 2: piece_tokens: expected at most 4,096 pieces"):
        scores_of(str(tmp_path / "mine.csv"))


@pytest.mark.parametrize("row", scores().rows, ids=lambda row: row.id)
def test_no_row_has_more_layers_on_the_cpu_than_its_model(row: MeasuredRow) -> None:
    assert (row.cpu_layers or 0) <= shape_of(row).moe_layers


def test_a_row_that_is_not_there() -> None:
    with pytest.raises(RowsError, match="there is no row '0'; ids are 1, 2, 3"):
        row_of(scores().rows, "0")


# --- Rows at fault, and what a row says of its run --------------------------------------------------------------------


def test_a_row_at_fault_is_asked_and_counts_in_nothing() -> None:
    rows = [row("1"), row("2", 50.0, fault="a copy of row 1"), row("3", quality="C"), row("4", left_out="two GPUs")]
    assert [one.scored for one in rows] == [True, False, False, False]
    predicted = {one.id: Speeds(110.0) for one in rows}
    table = {line.group: line.errors.rows for line in error_table(rows[:3], predicted) if line.quantity == "decode"}
    assert (table["all"], table["C"]) == (1, 1)
    assert Scores(rows[:3], {SHIPPED: predicted}, {}, {}).counted == [rows[0]]


def test_rows_at_fault_are_asked_with_the_reason() -> None:
    at_fault = {one.id for one in scores().rows if one.fault}
    assert at_fault == {"67", "68", "69", "117", "154", "231"}
    assert not at_fault & {one.id for one in scores().counted}


def test_prompts_are_faster_with_experts_copied_from_pinned_memory() -> None:
    asked = row("1", None, cpu_layers=48, prompt_tokens=512, prompt_tokens_per_s=500.0)
    own, pageable, pinned = (
        predict(replace(asked, copies=copies)).prompt_tokens_per_s for copies in (None, "pageable", "pinned")
    )
    assert own is not None
    assert pinned is not None
    assert own == pageable
    assert pinned > 1.2 * own


@pytest.mark.parametrize(("column", "cell", "words"), [
    ("copies", "mmap", "line 2: copies: expected 'pinned' or 'pageable'"), ("numa", "all", "line 2: numa: expected"),
])
def test_how_a_row_was_run_is_said_in_known_words(column: str, cell: str, words: str, tmp_path: Path) -> None:
    line = f"a,qwen3-30b-a3b,rtx-4080+ddr5-5600,llama.cpp,8,70,{cell}\n"
    (tmp_path / "mine.csv").write_text(f"{HEAD.strip()},{column}\n{line}")
    with pytest.raises(RowsError, match=words):
        scores_of(str(tmp_path / "mine.csv"))


def test_rows_of_several_gpus_are_asked_with_the_first_errors_that_are_told() -> None:
    scores = scores_of(str(BUNDLED.with_name("several_gpus.csv")))
    assert len(scores.rows) == 52
    errors = {
        quantity: [
            abs(error) for row in scores.rows
            if not row.sets(quantity) and (error := error_of(row, scores.first, quantity)) is not None
        ]
        for quantity in QUANTITIES
    }
    assert {quantity: round(median(each), 2) for quantity, each in errors.items()} == {"decode": 0.09, "prompts": 0.16}


@pytest.mark.parametrize(("ts", "message"), [
    ("25", "ts: expected numbers of layers, such as 25,24, got '25'"), ("25,25", "expected 49 layers on 2 GPUs"),
    ("", "expected 49 layers on 2 GPUs"),
])
def test_a_division_that_is_none_is_refused(ts: str, message: str) -> None:
    with pytest.raises(RowsError, match=message):
        predict(MeasuredRow(
            id="1", model="qwen3-30b-a3b", weights="q4_k_m", machine="2x-rtx-3090+ddr4-3200", engine="llama.cpp",
            cpu_layers=0, ts=ts, decode_tokens_per_s=100.0,
        ))
