"""The page of ``trilane tune``: how differences between times are told."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.kit.commands import ROOT
from tests.kit.questions import hand_made_map
from trilane.common.units import GIB
from trilane.engines.gains import Gain
from trilane.engines.model_formats import Bench
from trilane.engines.question import FitError, Question
from trilane.engines.refusals import missing
from trilane.engines.tune.settings import Goal, TuneQuestion
from trilane.engines.tune.tune import TuneCaveats, Tuning, tune
from trilane.output.figures.pays_words import break_even, verdict_of
from trilane.output.pages.caveats import (
    NOT_PINNED,
    WINDOWS,
    full_warning,
    limit_text,
    tune_caveats,
    tune_record,
    tune_warnings,
)
from trilane.output.pages.pays import pays_page
from trilane.output.pages.tune import explained_page, tune_page


def tuned(goal: Goal = "both", gpu: str = "rtx-3050", ram_gb: int | None = None) -> Tuning:
    return tune(TuneQuestion(Question(
        model="deepseek-v2-lite:2", gpu=gpu, ram="ddr4-3200", cores=4, prompt_tokens=64, generated=8, ram_gb=ram_gb,
    ), goal, ("f16",)))


def facts(tuning: Tuning) -> dict[str, str]:
    """The answer's lines by their names."""
    answer = next(part for part in tune_page(tuning) if isinstance(part, Table))
    names, texts = ([str(cell) for cell in column.cells] for column in answer.columns[:2])
    return dict(zip(names, texts, strict=True))


def cells(tuning: Tuning) -> list[str]:
    """The texts of all tables of the page."""
    tables = [part for part in tune_page(tuning) if isinstance(part, Table)]
    return [str(cell) for table in tables for column in table.columns for cell in column.cells]


@pytest.mark.parametrize(("slower", "text"), [
    (-0.796, "4.9x as fast"), (-0.5, "2.0x as fast"), (-0.2, "25% faster"), (-0.001, "as fast"),
    (0.25, "25% slower"),
])
def test_less_time_is_told_as_more_speed(slower: float, text: str) -> None:
    tuning = tuned()
    other = tuning.others[0]
    rival = replace(other, reason=other.reason._replace(slower=slower))
    assert text in cells(replace(tuning, others=(rival,)))


def test_another_engine_that_is_faster_is_named_next_to_the_answer() -> None:
    tuning = tuned()
    fast, slow = (replace(other, reason=other.reason._replace(slower=slower))
                  for other, slower in zip(tuning.others, (-0.1, 0.1), strict=False))
    told = facts(replace(tuning, others=(slow, fast)))["other engines"]
    assert told.startswith(f"{fast.tuned.engine} is predicted to be 11% faster by the time until the last token")
    assert "other engines" not in facts(replace(tuning, others=(slow,)))
    assert facts(tuning)["engine"] == "llama.cpp: builds from November 2025 on, CUDA"


def test_what_was_chosen_must_save_is_told_as_far_as_there_was_a_choice() -> None:
    rule = "of all within 1% of the least time the nearest to the engine's own"
    bits = ", where a KV cache of fewer bits must save 5%"
    found = tune(TuneQuestion(replace(tuned().question.fit, gpu="rtx-3050", model="deepseek-v2-lite"), "both"))
    assert f"{rule}{bits}" in tune_page(found)
    assert rule in tune_page(replace(found, other_kv=None))


def test_a_setting_that_lacks_an_argument_of_the_best_is_told_by_that() -> None:
    found = tuned()
    other = replace(found.others[0], tuned=replace(found.best, tpot_ms=2 * found.best.tpot_ms))
    best = replace(found.best, arguments=(*found.best.arguments, "--load-mode none"))
    assert "without --load-mode none" in cells(replace(found, best=best, runner_up=other))


def test_times_that_were_measured_have_no_other_engines_parts_or_errors_next_to_them() -> None:
    measured = str(ROOT / "docs/validation/llama.cpp/engine.yaml")
    asked = replace(tuned(gpu="none").question, fit=replace(tuned(gpu="none").question.fit, engine=measured))
    found = tune(replace(asked, fit=replace(asked.fit, weights="q4_0")))
    assert (found.measured, found.others, found.gains, found.error) == (True, (), (), None)
    assert facts(found)["limit"].startswith("decode: not known: times that were measured as a whole")
    assert facts(found)["error to expect"].startswith("that of the engine's file on the machine")


def test_what_limits_decode_is_told_as_that_where_more_is_asked() -> None:
    text = limit_text(tuned("decode").gains) + "; --upgrade shows what real parts give"
    assert [facts(tuned(goal))["limit"] for goal in ("decode", "prompt", "both")] == [
        text, f"decode: {text}", f"decode: {text}"
    ]


def test_memory_that_was_not_named_has_no_size() -> None:
    assert " GB = weights" in facts(tuned(gpu="none"))["memory"]
    assert " GB of 34.4 (32 GiB) = weights" in facts(tuned(gpu="none", ram_gb=32))["memory"]
    assert " GB of 8.6 (8 GiB) = weights" in facts(tuned())["GPU memory"]


# --- the page of an idea ----------------------------------------------------------------------------------------------


def test_the_page_whole() -> None:
    console = Console(file=StringIO(), width=400, highlight=False)
    for part in pays_page(hand_made_map()):
        console.print(part)
    assert isinstance(console.file, StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "A cache of experts on the GPU (llama-cache-lru) pays here: +30% (+20% to +40% over 2 draws), 20.0 tokens/s; "
        "15.0 with whole layers on the GPU",
        "simulated on the engines llama.cpp-uploads (with it) and llama.cpp (without): nothing is decided on the host, "
        "decisions are free and no routing is read back",
        "why: a token takes 16.67 ms less: the GPU waits for the CPU 8.33 ms less and waits for copies 8.33 ms less "
        "and waits for the host 8.33 ms less, though it works 8.33 ms longer; an upload of an expert takes 100 us, a "
        "layer 25,000 us (33,333 without it); the link is busy 50% of the time (50%); 50% of the experts are there "
        "when needed (50%); 50% of the prefetches that run come late",
        "llama-cache-lru: patches that are not in llama.cpp, PR 27861 "
        "(https://github.com/ggml-org/llama.cpp/pull/27861) and others",
        "its cache holds the popular experts of other texts at first, and hits are those of decode steps; `trilane "
        "leaderboard` and `compare` start it empty, after other prompts and on another engine, and find fewer hits",
        "llama.cpp@cache: llama.cpp's own cache (--moe-cache-mib, PR 29887), the one of `trilane tune`: +10% here, "
        "16.5 tokens/s; its map: --policy llama.cpp@cache",
        "model on machine: answers",
        "statistics of the routing: the model's own statistics (mixtral-8x7b)",
        "",
        "what decides  experts on the GPU (share of all): 50% here, upload of an expert (us): 100 here",
        "break-even    experts on the GPU (share of all): it pays everywhere from 25% to 50%",
        "              upload of an expert (us): it pays up to 250",
        "",
        "                                     on the GPU     copied    GPU waits",
        "here                      tokens/s  when needed  MiB/token  for the CPU  for copies",
        "without: llama.cpp            15.0          50%        0.0          50%         50%",
        "with it: llama-cache-lru      20.0          50%        1.0          50%         50%",
        "",
        "gain in tokens/s; across: experts on the GPU (share of all); down: upload of an expert (us), and the "
        "PCIe link; <: here",
        "                 25%  50% <",
        "300                -   -10%",
        "100  4.0 x16 <  +10%   +30%",
        "",
        "-  cannot run: too small",
    ]


@pytest.mark.parametrize(("speed", "waits", "why"), [
    (16.0, {}, "a token takes 4.17 ms less: the GPU works 4.17 ms less; "),
    (14.0, {"cpu": 0.25}, "a token takes 4.76 ms longer: the GPU works 20.24 ms longer, "
                          "though it waits for the CPU 15.48 ms less; "),
    (15.0, {"cpu": 0.25, "h2d": 0.25}, "a token takes as long, 66.67 ms: the GPU waits for the CPU 16.67 ms less and "
                                       "waits for copies 16.67 ms longer; "),
])
def test_why_begins_with_what_explains_the_sign_of_the_gain(speed: float, waits: dict[str, float], why: str) -> None:
    """Of a token of 66.67 ms without the idea, in which the GPU waits half of the time for the CPU."""
    found = hand_made_map()
    alone = {**found.cell.without.facts, "stall_cpu_share": 0.5, "stall_h2d_share": 0.0, "stall_host_share": 0.0}
    without = found.cell.without._replace(facts=alone)
    using = found.cell.using._replace(
        tokens_per_s=(speed,), facts=alone | {f"stall_{lane}_share": share for lane, share in waits.items()}
    )
    if not waits:
        using = using._replace(facts=alone | {"stall_cpu_share": 0.5 * 16 / 15})
    rows = ((found.rows[0][0], replace(found.cell, without=without, using=using)), found.rows[1])
    told = next(part for part in pays_page(replace(found, rows=rows)) if isinstance(part, str) and "why: " in part)
    assert told.startswith(f"why: {why}")


def test_where_it_cannot_run_no_break_even_is_stated() -> None:
    found = replace(hand_made_map(), here=(0, 0))
    assert break_even(found)[1][1] == (
        "upload of an expert (us): it pays everywhere from 100 to 100; it cannot run at 300"
    )


def test_the_verdict_is_that_of_the_gain_which_is_shown() -> None:
    """Gains are of thousandths: one of four hundred-thousandths is none, for the verdict too."""
    found = hand_made_map()
    cell = found.rows[0][1]
    speeds = tuple(1.0004 * speed for speed in cell.without.tokens_per_s)
    little = replace(cell, using=cell.without._replace(tokens_per_s=speeds))
    assert little.gains == (0.0, 0.0)
    shown = replace(found, rows=((found.rows[0][0], little), found.rows[1]))
    assert verdict_of(shown) == "A cache of experts on the GPU (llama-cache-lru) does not pay here: +0%"


# --- Sentences on answers ---------------------------------------------------------------------------------------------


NONE = TuneCaveats(short_window=False, measured=False, pinned=False, single_tensors_ms=None)


@pytest.mark.parametrize(("gains", "sentence"), [
    (
        [Gain("DRAM", "the CPU's memory bandwidth", 0.171), Gain("PCIe", "the link", 0.02)],
        "the CPU's memory bandwidth",
    ),
    (
        [Gain("PCIe", "the link", 0.2), Gain("DRAM", "the CPU's memory bandwidth", -0.01)],
        "the link",
    ),
    (
        [Gain("PCIe", "the link", 0.01), Gain("DRAM", "the CPU's memory bandwidth", 0.01)],
        "no part by itself",
    ),
    (
        [Gain("DRAM", "the CPU's memory bandwidth", 0.03), Gain("PCIe", "the link", 0.01)],
        "no part by itself; most the CPU's memory bandwidth",
    ),
])
def test_the_sentence_names_the_first_part_and_what_the_second_gives(gains: list[Gain], sentence: str) -> None:
    assert limit_text(gains) == sentence


@cache
def qualified(**asked: Any) -> Tuning:
    question = Question("deepseek-v2-lite:2", gpu="rtx-3060", ram="ddr4-3200", threads=4, generated=16, **asked)
    return tune(TuneQuestion(question, kv=("f16",)))


def test_a_window_too_short_for_prompt_and_answer_is_a_caveat() -> None:
    short = qualified(prompt_tokens=600, window=100)
    assert short.caveats.short_window
    note = tune_warnings(short)[0]
    assert f"! {note}" in tune_page(short)
    assert note.startswith("--context 100 has no room for a prompt of 600 tokens and 16 generated: ")
    assert "the answer has a window of 616" in note
    assert not qualified(prompt_tokens=600, window=616).caveats.short_window
    assert not qualified(prompt_tokens=600).caveats.short_window


@pytest.mark.parametrize(("caveats", "text"), [
    ({"single_tensors_ms": 0.4}, "save 0.40 ms a token at most, 2%"), ({"pinned": True}, "call it --no-mmap"),
    ({"measured": True}, "named parts say what fits, not how fast"),
])
def test_each_caveat_has_its_sentence(caveats: dict[str, Any], text: str) -> None:
    found = qualified(prompt_tokens=600)
    other = replace(found, best=replace(found.best, tpot_ms=20.0), caveats=NONE._replace(**caveats), machine_notes=())
    [note] = (*tune_warnings(other), *tune_caveats(other))
    assert note.endswith(text)


def test_a_memory_that_is_nearly_full_is_told_by_its_owner() -> None:
    memory = tuned(gpu="none", ram_gb=32).best.memory
    full = replace(memory, gpu_bytes=sum(memory.gpu_parts.values()))
    assert full_warning(memory) == []
    assert full_warning(full) == ["100% of the memory is used: other programs may leave no room"]
    kept = full.gpu_bytes - full.reserve_bytes
    two = replace(full, one_memory=False, ram_bytes=None, reserve_bytes=0, gpu_bytes=kept)
    assert full_warning(two) == ["100% of the GPU's memory is used: other programs may leave no room"]
    of_host = replace(two, ram_bytes=round(sum(two.host_parts.values()) / 1.1))
    assert full_warning(of_host) == ["110% of the host's memory is used: other programs may leave no room"]


def test_nothing_is_pinned_on_windows_which_is_said() -> None:
    asked: dict[str, Any] = {"gpu": "rtx-3060", "ram": "ddr4-3200", "threads": 4}
    pages = {
        system: tune(TuneQuestion(Question("qwen3-30b-a3b", **asked, system=system), kv=("f16",)))
        for system in (None, "linux", "windows")
    }
    assert {system: page.best.pinned for system, page in pages.items()} == {None: True, "linux": True, "windows": False}
    assert WINDOWS in tune_caveats(pages["windows"])
    assert NOT_PINNED in " ".join(tune_caveats(pages[None]))
    assert "Windows" not in " ".join(tune_caveats(pages["linux"]))


@pytest.mark.parametrize(("gib", "share"), [(16, 0.6667), (32, 0.6667), (36, 0.75), (48, 0.75), (64, 0.75)])
def test_macos_gives_the_gpu_a_part_of_a_unified_memory(gib: int, share: float) -> None:
    """Two thirds, from 36 GiB on three quarters; a question with Apple's chip is one of macOS."""
    chip = "apple-m4" if gib < 36 else "apple-m4-max"
    kept = {system: Question("gpt-oss-20b", gpu=chip, ram_gb=gib, system=system).load_machine().gpu.reserve_bytes
            for system in (None, "macos", "linux")}
    assert kept[None] == kept["macos"] == pytest.approx((1 - share) * gib * GIB, abs=1)
    assert kept["linux"] < kept["macos"]


def test_a_refusal_on_macos_has_the_command_that_raises_its_limit() -> None:
    asked = {"gpu": "apple-m4-pro", "ram_gb": 48, "weights": "iq4_xs"}
    found = missing(Question("qwen3-next-80b-a3b", **asked))
    assert "sudo sysctl iogpu.wired_limit_mb=45056" in [way.options for way in found.ways or ()]
    other = missing(Question("qwen3-next-80b-a3b", **asked, system="linux"))
    assert not other.short


def test_the_cpu_alone_has_all_of_one_memory() -> None:
    """What macOS does not give the GPU, the CPU has."""
    found = tune(TuneQuestion(Question("qwen3-next-80b-a3b", gpu="apple-m4-pro", ram_gb=48, weights="iq4_xs")))
    assert found.best.cpu_only
    assert "-ngl 0" in found.best.arguments
    assert "-dev none" in found.best.arguments


def test_the_gpu_is_hidden_from_an_engine_that_has_no_option_for_that() -> None:
    asked = Question("qwen3-30b-a3b", gpu="gtx-1650-super", ram="ddr4-3200", ram_gb=64, engine="ik_llama.cpp")
    search = Bench(TuneQuestion(asked)).search
    assert False in search.space.gpu
    alone = search.bench.tuned(search.space.usual._replace(gpu=False))
    assert alone.cpu_only
    assert alone.command.startswith("CUDA_VISIBLE_DEVICES= llama-server ")
    assert "-dev" not in alone.command


def test_an_answer_of_one_token_has_no_limit_and_no_error_of_decoding() -> None:
    found = tune(TuneQuestion(Question("qwen3-30b-a3b", gpu="rtx-3060", ram="ddr4-3200", ram_gb=32, generated=1)))
    assert not {"limit", "error to expect"} & facts(found).keys()
    assert explained_page(found) == []
    assert "ms a token" not in " ".join(tune_caveats(found))


def test_windows_gives_the_gpu_a_part_of_a_unified_memory() -> None:
    reserves = [Question("gpt-oss-120b", gpu="strix-halo", system=system).load_machine().gpu.reserve_bytes
                for system in (None, "linux", "windows")]
    assert reserves == [8_000_000_000, 8_000_000_000, 32 * GIB]
    with pytest.raises(FitError, match="with --weights"):
        tune(TuneQuestion(Question("minimax-m2", gpu="strix-halo", system="windows")))


def test_json_has_the_sentences_behind_their_numbers() -> None:
    found = qualified(prompt_tokens=600)
    record = tune_record(found)
    names = [*record]
    assert names[names.index("limit") + 1] == "limited_by"
    assert record["limited_by"] == limit_text(found.gains)
    assert names[names.index("machine_notes") + 1] == "notes"
    assert record["notes"] == [*tune_warnings(found), *tune_caveats(found)]
