"""The command line: verbs, options, output files, and refusals."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from policies.registry import SYSTEMS, policy_names
from sim.runs.scenario import Scenario
from sim.runs.spans import Span
from tests.kit.commands import ROOT, SHORT, Trilane, write_route_csv
from trilane.verbs.cache_curve import parse_size
from trilane.verbs.options import OptionError, processes

# --- compare and simulate ---------------------------------------------------------------------------------------------


def test_compare_ranks_every_policy(trilane: Trilane) -> None:
    done = trilane("compare", *SHORT, "--draws", "2", "--json", "-", "--jobs", "1")
    assert done.status == 0
    lengths = Scenario(prompt_tokens=4, generated_tokens=3)
    resolved = lengths.with_(sequences=(0,), gpus=1, calibration="mini-deepseek-calibration")
    assert Scenario.from_dict(done.json["scenario"]) == resolved
    runs = done.json["runs"]
    ran, said = {run["policy"] for run in runs}, {name for name in policy_names() if f"left out {name}: " in done.err}
    assert ran >= {"on-demand", "layer-wise", "fiddler", "dali", "oracle"}
    assert sorted([*ran, *said]) == sorted(policy_names())
    assert done.json["refused"].keys() == said
    assert [run["tpot_ms"] for run in runs] == sorted(run["tpot_ms"] for run in runs)
    seer = next(run for run in runs if "clairvoyant" in run["labels"])
    for run in runs:
        regrets = [a["tpot_ms"] / b["tpot_ms"] - 1 for a, b in zip(run["draws"], seer["draws"], strict=True)]
        assert run["regret"] == pytest.approx(sum(regrets) / 2)
        assert run["tpot_ms"] >= run.get("lower_bound_tpot_ms", 0)


def test_compare_prints_what_it_writes(trilane: Trilane) -> None:
    done = trilane("compare", *SHORT, "--policies", "dali, layer-wise", "--json", "result.json", "--jobs", "1")
    rows = {row["policy"]: row for row in json.loads(Path("result.json").read_text())["runs"]}
    lines = {line.split()[0]: line.split() for line in done.out.splitlines() if line.startswith(("dali", "layer-wise"))}
    for name in ("dali", "layer-wise"):
        assert lines[name][2] == f"{rows[name]['tpot_ms']:,.2f}"
        assert [draw["seed"] for draw in rows[name]["draws"]] == [0, 1, 2, 3, 4]
        assert rows[name]["regret"] is None  # there is no clairvoyant run to compare with
    assert lines["dali"][3] == "{tpot_ms_min:.1f}-{tpot_ms_max:.1f}".format(**rows["dali"])
    assert "over 5 draws: the scenario, then others" in done.out
    assert max(map(len, done.out.splitlines()[1:])) < 120


def test_compare_says_when_nothing_but_the_seed_differs(trilane: Trilane) -> None:
    words = ("compare", *SHORT, "--set", "sequences=[1]", "--policies", "layer-wise", "--jobs", "1")
    out = trilane(*words).out
    assert "over 5 draws of the same sequences, which differ in the seed alone" in out
    [line] = [line for line in out.splitlines() if line.startswith("layer-wise")]
    assert line.split()[3] == "-"
    alone = trilane(*words, "--draws", "1").out
    assert "draws" not in alone
    assert "spread" not in alone


def test_compare_says_how_much_of_the_routing_was_changed(trilane: Trilane) -> None:
    words = ("compare", *SHORT, "--policies", "daop,dali", "--draws", "2", "--jobs", "1", "--json", "r.json")
    out = trilane(*words).out
    row = next(row for row in json.loads(Path("r.json").read_text())["runs"] if row["policy"] == "daop")
    [line] = [line for line in out.splitlines() if line.startswith("daop ~ ")]
    assert line.split()[-2] == f"{100 * row['approximated_weight_share']:.0f}%"  # before the estimate of KL
    assert "\n~         changes the routing" in out
    assert "changes the routing" not in trilane("compare", *SHORT, "--policies", "dali", "--draws", "1").out


def test_compare_draws_every_policy(trilane: Trilane) -> None:
    Path("pictures").mkdir()
    Path("pictures", "tpot.png").write_bytes(b"an earlier one")
    done = trilane("compare", *SHORT, "--policies", "fiddler,dali", "--out", "pictures", "--draws", "1", "--jobs", "1")
    assert done.status == 0
    assert Path("pictures", "tpot.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in Path("pictures").iterdir())
    assert names == ["gantt-dali.png", "gantt-fiddler.png", "timeline.json.gz", "tpot.png"]
    assert "ui.perfetto.dev" in done.err


def test_compare_leaves_out_what_the_trace_cannot_serve(trilane: Trilane, tmp_path: Path) -> None:
    """A trace without forecasts and calibration: DALI and Fiddler are named, the others run."""
    write_route_csv(tmp_path / "mine.csv")
    imported = trilane("trace", "import", "mine.csv", "-o", "mine.safetensors")
    said = "mine.safetensors: 1 sequence of tiny, 2 prompt and 3 decode tokens, no forecasts\n"
    assert (imported.status, imported.err) == (0, said)
    settings = ("--set", "trace=mine.safetensors", "--set", "model=null", "--set", "cached_share=0.5")
    done = trilane("compare", *settings, "--json", "-", "--jobs", "1")
    assert {run["policy"] for run in done.json["runs"]} >= {"on-demand", "layer-wise", "oracle"}
    assert done.err.count("left out dali: the policy needs the forecast residual@1") == 1
    named = trilane("compare", *settings, "--policies", "dali")
    assert named.status == 2
    assert "dali: the policy needs the forecast residual@1" in named.err
    assert "`--set noisy_forecast_recall='[0.8]'`" in named.err
    named = trilane("compare", *settings, "--policies", "on-demand,fiddler", "--jobs", "1")
    assert "policy 'fiddler' needs calibration" in named.err
    assert "`--set calibration=FILE`" in named.err


def test_simulate_writes_everything(trilane: Trilane) -> None:
    done = trilane(
        "simulate", *SHORT, "--policy", "dali", "--spans", "s.parquet", "--perfetto", "t.json", "--gantt", "g.png",
        "--json", "r.json",
    )
    assert done.status == 0
    assert sorted(path.name for path in Path().iterdir()) == ["g.png", "r.json", "s.parquet", "t.json"]
    spans = pd.read_parquet("s.parquet")
    assert tuple(spans.columns) == Span._fields
    result = json.loads(Path("r.json").read_text())
    assert result["run"]["makespan_ms"] == spans["end_ns"].max() / 1e6
    assert result["scenario"]["policy"] == "dali"
    assert json.loads(Path("t.json").read_text())["traceEvents"]


def test_simulate_gives_the_same_bytes_every_time(trilane: Trilane) -> None:
    for name in ("a", "b"):
        trilane("simulate", *SHORT, "--spans", f"{name}.parquet", "--json", f"{name}.json")
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    assert Path("a.parquet").read_bytes() == Path("b.parquet").read_bytes()


def test_another_policy_does_not_get_the_parameters_of_the_first(trilane: Trilane) -> None:
    Path("mine.yaml").write_text("policy: dali\nparameters: {window: 8}\nprompt_tokens: 4\ngenerated_tokens: 3\n")
    assert trilane("simulate", "--scenario", "mine.yaml", "--json", "-").json["scenario"]["parameters"]["window"] == 8
    assert trilane("simulate", "--scenario", "mine.yaml", "--policy", "fiddler").status == 0


def test_reference_scenario_is_the_default() -> None:
    assert Scenario.from_yaml(ROOT / "examples" / "reference.yaml") == Scenario()
    written = yaml.safe_load((ROOT / "examples" / "reference.yaml").read_text())
    assert written.keys() == Scenario().to_dict().keys()


# --- traces, caches, catalogues ---


def test_cache_curve_by_hand(trilane: Trilane, tmp_path: Path) -> None:
    """Prefill looks up {0, 2} and {1, 3}, all misses; then (0, 1), (0, 3), (2, 1). A cache of all 12 kB misses nothing
    more: 6 hits of 10 lookups, 6 of 6 in decode. One of 2 kB holds 0 and 2 of the first layer, or one of the second:
    LRU always evicts what comes next; who declines all of the second layer hits 0, 0 and 2.
    """
    write_route_csv(tmp_path / "mine.csv")
    done = trilane("cache-curve", "mine.csv", "--policies", "lru,belady-bypass", "--pool", "12kB,2kB", "--json", "-")
    points = {(p["policy"], p["capacity_bytes"]): (p["hit_rate"], p["hit_rate_decode"]) for p in done.json["points"]}
    full = (0.6, 1.0)
    assert points == {
        ("lru", 2000): (0.0, 0.0), ("lru", 12_000): full,
        ("belady-bypass", 2000): (0.3, 0.5), ("belady-bypass", 12_000): full,
    }


def test_cache_curve_draws(trilane: Trilane, tmp_path: Path) -> None:
    write_route_csv(tmp_path / "mine.csv")
    done = trilane("cache-curve", "mine.csv", "--png", "curve.png")
    assert done.status == 0
    assert Path("curve.png").stat().st_size > 1000
    assert "belady-bypass" in done.out


@pytest.mark.parametrize(
    ("text", "size"), [("500MiB", 500 * 2**20), ("4GB", 4 * 10**9), ("1.5 kb", 1500), ("7", 7), ("0", 0)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-5MB", "5 XB", "1e9", "5MB 6MB", "9" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="expected a size such as 500MiB"):
        parse_size(text)


def test_trace_info_and_stats(trilane: Trilane) -> None:
    info = trilane("trace", "info", "mini-moe", "--json", "-").json
    stats = trilane("trace", "stats", "mini-moe", "--json", "-").json
    assert (info["sequences"], info["tokens"], info["moe_layers"]) == (
        stats["sequences"], stats["tokens"], stats["layers"],
    )
    assert info["tokens"] == info["prefill_tokens"] + info["decode_tokens"]
    assert info["checksum"] in trilane("trace", "info", "mini-moe").out
    assert "adjacent overlap" in trilane("trace", "stats", "mini-moe").out


def test_import_keeps_the_routing(trilane: Trilane, tmp_path: Path) -> None:
    write_route_csv(tmp_path / "mine.csv")
    assert trilane("trace", "import", "mine.csv", "-o", "mine.safetensors").status == 0
    info = trilane("trace", "info", "mine.safetensors", "--json", "-").json
    assert (info["tokens"], info["experts"], info["expert_bytes"]) == (5, 4, [1000, 2000])


@pytest.mark.parametrize("verb", ["policies", "models", "hardware"])
def test_catalogues_list_and_describe(trilane: Trilane, verb: str) -> None:
    entries = trilane(verb, "--json", "-").json[verb]
    listed = trilane(verb).out
    for entry in entries:
        assert entry["name"] in listed
        assert entry["name"] in trilane(verb, entry["name"]).out
        assert trilane(verb, entry["name"], "--json", "-").json[verb] == [entry]


def test_the_table_of_policies_fits_and_keeps_variants_together(trilane: Trilane) -> None:
    lines = trilane("policies").out.splitlines()
    assert max(map(len, lines)) <= 120
    [hybrid] = [line for line in lines if line.startswith("hybrimoe ")]
    assert "gate@1-3, scores" in hybrid
    above = ""
    for name in policy_names():
        system, at, _ = name.partition("@")
        [line] = [line for line in lines if line.startswith(f"{'  ' if at else ''}{name} ")]
        assert (" ~ " in line[:30]) == SYSTEMS[name].needs.changes_routing
        assert not at or above == system
        above = system


@pytest.mark.parametrize("name", policy_names())
def test_every_parameter_is_explained_where_it_is_asked_for(trilane: Trilane, name: str) -> None:
    page = trilane("policies", name).out
    [entry] = trilane("policies", name, "--json", "-").json["policies"]
    words = [parameter["name"] for parameter in entry["parameters"]]
    about = page.split("\n\n", 2)[2] if words else ""  # behind the facts and the table
    assert [word for word in words if not re.search(rf"\b{word}\b[^.]*:", about)] == []
    assert words or "No parameters" in page
    assert not re.search(r"\bsee [A-Z]\w*(Cache|Prefetcher|Router|Parameters|Assigner|Placement|Schedule)\b", page)


def test_the_first_layers_of_a_model(trilane: Trilane) -> None:
    [cut] = trilane("models", "phi-3.5-moe:2", "--json", "-").json["models"]
    assert (cut["name"], cut["moe_layers"]) == ("phi-3.5-moe:2", 2)
    assert "NAME:N" in trilane("models", "--help").out
    for layers in ("\N{ARABIC-INDIC DIGIT TWO}", "0", ""):
        done = trilane("models", f"phi-3.5-moe:{layers}")
        assert done.status == 2
        assert done.err == f"trilane: model phi-3.5-moe:{layers}: expected 1 to 32 layers after the colon\n"
    for tag in ("\N{SUPERSCRIPT TWO}", "-1"):
        done = trilane("models", f"phi-3.5-moe:{tag}")
        assert done.status == 2
        assert f"there is no model 'phi-3.5-moe:{tag}'; 'phi-3.5-moe' is known" in done.err


def test_work_is_shared_by_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert (processes(None), processes(2)) == (3, 2)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processes(None) == 64


def test_an_engine_says_which_machines_hold_its_numbers(trilane: Trilane) -> None:
    [facts] = trilane("engines", "llama.cpp", "--json", "-").json["engines"]
    page = trilane("engines", "llama.cpp").out
    lines = {text.split()[0]: text for text in page.splitlines() if text.startswith("gpu.")}
    for key in ("gpu.read_share", "gpu.step_ns"):
        machines = facts["numbers"][key]["held"]["machines"]
        assert (f" {machines} machine" if machines else " no row ") in lines[key]
    assert "held" not in facts["numbers"]["gpu.layer_ops_per_s"]
    assert "held by" not in trilane("engines", "graphs").out


def test_speeds_of_a_program_set_numbers_of_its_kind(trilane: Trilane, tmp_path: Path) -> None:
    rows, engine = str(tmp_path / "rows.csv"), str(tmp_path / "mine.yaml")
    assert "--calibrate" in trilane("engines", "--template", rows).err
    answer = trilane("engines", "eager", "--calibrate", rows, "-o", engine, "--json", str(tmp_path / "found.json"))
    assert "eager, set by half-cached" in answer.out
    assert "put in" in answer.out
    found = json.loads((tmp_path / "found.json").read_text())
    page = trilane("engines", engine).out
    assert f"{found['numbers']['software.layer_ns']:g}" in page
    assert "range" in page
    refused = trilane("engines", "--calibrate", rows)
    assert refused.status == 2
    assert "--calibrate: expected a kind of programs" in refused.err


def test_a_kind_of_programs_has_a_range_in_comparisons(trilane: Trilane) -> None:
    small = [f"--set={one}" for one in ("trace=mini-moe", "model=null", "cached_share=0.25", "generated_tokens=3")]
    words = ["compare", "--policies", "fiddler,on-demand", "--draws", "1", "--jobs", "1", *small]
    assert "of kind" in trilane(*words, "--set", "engine=eager").out
    assert "of kind" not in trilane(*words).out
    for verb in (["simulate", "--policy", "fiddler"], ["whatif", "--policies", "fiddler", "--vary", "batch=1,2"]):
        assert "eager is a kind of programs" in trilane(*verb, *small, "--set", "engine=eager").err


def test_an_engine_of_one_model_says_so_where_another_runs(trilane: Trilane) -> None:
    small = [f"--set={one}" for one in ("trace=mini-moe", "model=null", "cached_share=0.25", "generated_tokens=3")]
    note = "strata runs qwen3.8-flash-next: times of its layers, rows and drafts are those of that model's kernels"
    for verb in (["simulate", "--policy", "fiddler"], ["compare", "--policies", "fiddler", "--draws", "1"]):
        assert note in " ".join(trilane(*verb, *small, "--set", "engine=strata").err.split())
        assert note not in " ".join(trilane(*verb, *small, "--set", "engine=llama.cpp").err.split())


def test_a_comparison_says_whose_experts_rejected_drafts_have(trilane: Trilane) -> None:
    small = [f"--set={one}" for one in (
        "trace=mini-moe", "model=null", "cached_share=0.25", "generated_tokens=4", "draft_tokens=2",
        "draft_acceptance=0",
    )]
    words = ["compare", "--policies", "fiddler", "--draws", "1", *small]
    for rejected, whose in (("recorded", "the recorded tokens"), ("drawn", "other tokens, drawn at random")):
        page = " ".join(trilane(*words, "--set", f"rejected_drafts={rejected}").out.split())
        assert f"with the experts of {whose}" in page



def test_every_number_of_a_machine_has_its_source(trilane: Trilane) -> None:
    for machine in trilane("hardware", "--json", "-").json["hardware"]:
        page = trilane("hardware", machine["name"]).out
        for number in machine["numbers"]:
            assert number["source"]
            assert number["key"] in page
