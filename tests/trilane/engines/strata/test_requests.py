"""Requests of Strata: files, logs, what they say of windows, machines by their titles, and predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.costs.engine import load_fitted
from sim.machine.hardware import load_hardware
from sim.machine.plausibility import HardwareError
from trilane.engines.strata.engine_log import read_log, write_requests
from trilane.engines.strata.machines import machine_of
from trilane.engines.strata.predicted import QUANTITIES
from trilane.engines.strata.predictions import predictions
from trilane.engines.strata.prompt import prompt_ms
from trilane.engines.strata.requests import RequestsError, StrataRequest, WindowCounts, read_requests
from trilane.engines.strata.window import WindowCosts

LOG = """\
strata generate: PCIe probe: 24.0 GB/s host->device (best of 20.1 24.0) -> pcie_frac 0.35 (default 0.55)
strata generate: 1466 MiB of weights loaded from /data/packs/iq2_xs (302 canonical tensors skipped)
strata generate: GPU 0: AMD Radeon RX 6700 XT (gfx1030)
strata generate: expert cache 4580 slots, 6.15 GiB of VRAM; policy is
strata generate: 7 expert-pool workers + the host thread
strata generate: session is up (engine 0.1.39)
strata serve: prompt 19 tokens = 0 reused + 19 read in 500 ms (38.0 tok/s), 8 generated in 400 ms (20 tok/s), \
drafts accepted 4 of 6, 1 checkpoints
strata serve: decode expert cache hit rate: 50.0% (100 hits / 200 lookups)
strata serve: prompt 36265 tokens = 0 reused + 36265 read in 120403 ms (301.2 tok/s), 211 generated in 6886 ms \
(30.6 tok/s), drafts accepted 128 of 155, 3 checkpoints
strata serve: decode expert cache hit rate: 66.9% (73346 hits / 109681 lookups); 4559 more read by the GPU over PCIe \
or from another GPU (4.0% of all 114240 routed)
strata serve: prompt 37370 tokens = 36475 reused + 895 read in 4837 ms (185.0 tok/s), 153 generated in 3956 ms \
(38.7 tok/s), drafts accepted 104 of 113, 4 checkpoints
strata serve: decode expert cache hit rate: 68.6% (51225 hits / 74623 lookups); 3137 more read by the GPU over PCIe
"""
ROW = StrataRequest(
    id="one", quant="iq2_xs", gpu="RX 6700 XT", workers=7, cache_slots=4580, prompt_tokens=36265, gen_tokens=211,
    prompt_ms=120403, pp_tok_s=301.2, decode_ms=6886, accepted=128, offered=155, hits=73346, lookups=109681,
    pcie_reads=4559,
)


def test_windows_and_rows_follow_from_the_entries() -> None:
    """114,240 entries of 48 layers and 10 experts a row are 238 rows, 155 of which were drafts."""
    assert ROW.windows == 83
    assert ROW.window_ms == pytest.approx(6886 / 83)
    each = 83 * 48
    entries = 73346 / each, (109681 - 73346) / each, 4559 / each
    assert ROW.counts == pytest.approx(WindowCounts(238 / 83, 155 / 83, *entries))


def test_without_reads_windows_are_tokens_less_accepted_drafts() -> None:
    row = replace(ROW, pcie_reads=None)
    assert row.windows == 83
    assert row.counts is not None
    assert ROW.counts is not None
    assert row.counts.pcie == pytest.approx(ROW.counts.pcie)


def test_a_short_answer_tells_no_time() -> None:
    row = replace(ROW, gen_tokens=30, accepted=15, pcie_reads=None)
    assert (row.windows, row.window_ms, row.counts) == (15, None, None)


def test_a_log_is_read_start_by_start_without_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LOG)
    first, second = read_log(path)
    assert (first.gpu, first.quant, first.workers, first.cache_slots) == ("RX 6700 XT", "iq2_xs", 7, 4580)
    assert (first.engine_version, first.pcie_frac, first.pcie_gb_s) == ("0.1.39", 0.35, 24.0)
    assert first.counts == ROW.counts
    assert (second.prompt_tokens, second.read_tokens, second.pcie_reads) == (37370, 895, 3137)


def test_a_log_becomes_a_file_of_requests_and_back(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(LOG)
    found = read_log(tmp_path / "engine.log")
    write_requests(found, tmp_path / "rows.csv")
    assert read_requests(tmp_path / "rows.csv") == found


@pytest.mark.parametrize("text", ["", "strata generate: session is up (engine 0.1.39)"])
def test_a_log_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(RequestsError, match=r"expected a log of Strata.s engine .*, got none"):
        read_log(tmp_path / "a.log")


@pytest.mark.parametrize(("line", "changed", "expected"), [
    ("pcie_frac 0.35", "pcie_frac 7.5", r"a.log-1: pcie_frac: expected a number from 0 to 1"),
    ("PCIe probe: 24.0", "PCIe probe: 0.0", r"a.log-1: pcie_gb_s: expected a number above 0"),
    ("PCIe probe: 24.0", "PCIe probe: 2.4.0", r"a.log-1: pcie_gb_s: expected a number above 0"),
])
def test_a_log_with_impossible_numbers_is_refused(tmp_path: Path, line: str, changed: str, expected: str) -> None:
    (tmp_path / "a.log").write_text(LOG.replace(line, changed))
    with pytest.raises(RequestsError, match=expected):
        read_log(tmp_path / "a.log")


def test_titles_of_a_log_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(LOG.replace("AMD Radeon RX 6700 XT", "NVIDIA GeForce 4090"))
    assert read_log(tmp_path / "a.log")[0].gpu == "4090"


@pytest.mark.parametrize(("changed", "reason"), [
    ({"gpu": ""}, "no GPU is named"),
    ({"gpu": "RTX 4090 [x)y"}, "there is no gpu 'RTX 4090 [x)y'"),
    ({"hits": 110000}, "more hits than look-ups"),
    ({"offered": 155000, "pcie_reads": None}, "windows of more than 8 rows"),
])
def test_rows_that_say_no_machine_or_contradict_themselves_are_left_out(
    changed: dict[str, object], reason: str
) -> None:
    found = predictions([replace(ROW, **changed)])  # type: ignore[arg-type]
    assert not found.asked
    assert found.left_out["one"].startswith(reason)


def test_an_answer_in_no_time_says_nothing_of_windows() -> None:
    row = replace(ROW, decode_ms=0)
    assert (row.window_ms, row.counts) == (None, None)


def test_a_cache_of_all_experts_misses_none() -> None:
    entries = 73346 + 36335 + 4559
    row = replace(ROW, hits=entries, lookups=entries, pcie_reads=0)
    assert predictions([row]).asked[0].counts.pcie == 0


def test_machines_are_found_by_the_titles_of_their_parts() -> None:
    row = StrataRequest(
        id="a", quant="iq3_s", gpu="RTX 4090 Laptop", cpu="Core i9-13900HX", ram="DDR5-5600", pcie_gb_s=19.3, workers=23
    )
    machine = machine_of(row)
    assert (machine.cpu.cores, machine.cpu.efficiency_cores) == (24, 16)
    assert machine.link.h2d_bytes_per_s == 19.3e9
    assert machine_of(ROW).cpu.cores == 8  # not named: one for each thread of the pool
    slow = StrataRequest(id="b", quant="iq3_s", gpu="RTX 3090", cpu="Ryzen 7 9700X", note="3090 at PCIe 4.0 x4")
    assert machine_of(slow).link.theory_bytes_per_s < 8e9
    old = replace(slow, gpu="RTX 2080 Ti", gpu_vram_gb=22, cpu="2x Xeon E5-2697 v2", ram="DDR3-1867")
    assert (machine_of(old).gpu.memory_bytes, machine_of(old).cpu.sockets) == (22 * 2**30, 2)
    with pytest.raises(HardwareError, match="there is no gpu 'Voodoo 2'"):
        machine_of(StrataRequest(id="d", quant="iq3_s", gpu="Voodoo 2"))


def test_predictions_say_why_a_row_is_not_asked() -> None:
    rows = [ROW, replace(ROW, id="two", n_gpus=2, note="helper"), replace(ROW, id="x", gpu="Voodoo 2")]
    found = predictions(rows)
    assert [one.request.id for one in found.asked] == ["one"]
    assert found.left_out["two"].startswith("helpers")
    assert "Voodoo" in found.left_out["x"]


def test_a_prediction_has_windows_prompt_and_hits() -> None:
    (one,) = predictions([ROW]).asked
    assert set(one.pairs) == {QUANTITIES[0], QUANTITIES[1], QUANTITIES[3]}
    assert one.given is not None
    assert one.given.total_ns / 1e6 == one.pairs[QUANTITIES[0]][0]
    predicted, measured = one.hit_rates or (0.0, 0.0)
    assert measured == pytest.approx(73346 / 114240)
    assert 0 < predicted < 1


def test_the_null_model_of_three_requests_on_a_line_has_no_error() -> None:
    rows = []
    for number, hits in enumerate((70000, 75000, 80000)):
        each = replace(ROW, id=str(number), hits=hits)
        assert each.counts is not None
        assert each.windows is not None
        ms = (20 + 3 * each.counts.cpu) * each.windows
        rows.append(replace(each, decode_ms=ms))
    null = predictions(rows).null_ms
    assert [null[row.id] for row in rows] == pytest.approx([row.window_ms for row in rows])


def test_keys_and_values_are_where_a_row_says() -> None:
    row = replace(ROW, kv="int8, 32768 cells in VRAM", context=262144, cache_slots=None)
    (on_card,), (streamed,) = (predictions([one]).asked for one in (replace(row, kv="int8 in VRAM"), row))
    assert (on_card.request.kv_tokens, streamed.request.kv_tokens) == (0, 32768)
    assert on_card.by_slots.kv_ns == 0 < streamed.by_slots.kv_ns
    assert streamed.held_share > on_card.held_share


def test_a_prompt_copies_earlier_keys_and_values_piece_by_piece() -> None:
    """Pieces of 8,192 tokens, 20,000 after 1,000: of 1,000, 9,192 and 17,384 tokens; 12 layers of 1,024 elements."""
    costs = WindowCosts(ROW.shape, load_hardware("rtx-4090+ddr5-5600+ryzen-9-7950x"), load_fitted("strata"), 16)
    whole, streamed = (prompt_ms(costs.with_setting(15, tokens), 20_000, 1000, 1.0, 0.5) for tokens in (0, 32768))
    copied = (1000 + 9192 + 17384) * 12 * 1024 * 8.25 / 8
    assert streamed - whole == pytest.approx(copied / costs.hardware.link.h2d_bytes_per_s * 1e3, rel=1e-6)
