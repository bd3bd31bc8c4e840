"""The command line, as a newcomer uses it and misuses it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import yaml

from policies.registry import policy_names
from sim.scenario import Scenario
from sim.spans import Span
from trilane.cli import main
from trilane.verbs.cache_curve import SizeError, parse_size

ROOT = Path(__file__).parents[2]
SHORT = ("--set", "prompt_tokens=4", "--set", "generated_tokens=3")


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Trilane = Callable[..., Result]


@pytest.fixture
def trilane(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Trilane:
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["trilane", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return Result(int(stop.value.code or 0), printed.out, printed.err)

    return run


# --- compare and simulate ---------------------------------------------------------------------------------------------


def test_compare_ranks_every_policy(trilane: Trilane) -> None:
    done = trilane("compare", *SHORT, "--json", "-")
    assert done.status == 0
    assert done.json["scenario"] == Scenario(prompt_tokens=4, generated_tokens=3).to_dict()
    runs = done.json["runs"]
    assert sorted(run["policy"] for run in runs) == sorted(policy_names())
    assert [run["tpot_ms"] for run in runs] == sorted(run["tpot_ms"] for run in runs)
    seer = next(run for run in runs if run["labels"] == ["clairvoyant"])
    for run in runs:
        assert run["regret"] == pytest.approx(run["tpot_ms"] / seer["tpot_ms"] - 1)
        assert run["tpot_ms"] >= run["lower_bound_tpot_ms"]


def test_compare_prints_what_it_writes(trilane: Trilane) -> None:
    done = trilane("compare", *SHORT, "--policies", "fiddler, layer-wise", "--json", "result.json")
    rows = json.loads(Path("result.json").read_text())["runs"]
    assert {row["policy"] for row in rows} == {"fiddler", "layer-wise"}
    for row in rows:
        [line] = [line for line in done.out.splitlines() if line.startswith(row["policy"])]
        assert f"{row['tpot_ms']:,.2f}" in line.split()
    assert all(row["regret"] is None for row in rows)  # there is no clairvoyant run to compare with


def test_compare_draws_every_policy(trilane: Trilane) -> None:
    for _ in range(2):  # into a new folder, and into the same again
        done = trilane("compare", *SHORT, "--policies", "fiddler,dali", "--out", "pictures")
        assert done.status == 0
    names = sorted(path.name for path in Path("pictures").iterdir())
    assert names == ["gantt-dali.png", "gantt-fiddler.png", "timeline.json.gz", "tpot.png"]
    assert "ui.perfetto.dev" in done.err


def test_compare_leaves_out_what_the_trace_cannot_serve(trilane: Trilane, tmp_path: Path) -> None:
    """A trace without forecasts and calibration: DALI and Fiddler are named, the others run."""
    write_route_csv(tmp_path / "mine.csv")
    assert trilane("trace", "import", "mine.csv", "-o", "mine.safetensors").status == 0
    settings = ("--set", "trace=mine.safetensors", "--set", "model=null", "--set", "cached_share=0.5")
    done = trilane("compare", *settings, "--json", "-")
    assert {run["policy"] for run in done.json["runs"]} >= {"on-demand", "layer-wise", "oracle"}
    assert "left out dali: the policy needs the forecast residual@1" in done.err
    named = trilane("compare", *settings, "--policies", "dali")
    assert named.status == 2
    assert "residual@1" in named.err


def test_simulate_writes_everything(trilane: Trilane) -> None:
    done = trilane(
        "simulate", *SHORT, "--policy", "dali", "--spans", "s.parquet", "--perfetto", "t.json", "--gantt", "g.png",
        "--json", "r.json",
    )  # fmt: skip
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


def write_route_csv(path: Path, size: int = 1000) -> None:
    """A route_trace v1 file: 2 layers, 4 experts, top-1; a prompt of 2 tokens and 3 decode steps. Experts take ``size``
    bytes in the first layer, twice that in the second.
    """
    head = ["# route_trace v1", "# model=tiny arch=none n_layer=2 n_expert=4 n_expert_used=1",
            f"# layer=0 expert_bytes={size} dense_bytes=10", f"# layer=1 expert_bytes={2 * size} dense_bytes=10",
            "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]  # fmt: skip
    experts = [(0, 1), (2, 3), (0, 1), (0, 3), (2, 1)]
    rows = [
        f"0,{int(step > 1)},{step},{layer},0,{expert},1.0,0,{size * (layer + 1)}"
        for step, pair in enumerate(experts)
        for layer, expert in enumerate(pair)
    ]
    path.write_text("\n".join([*head, *rows, ""]))


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
    }  # fmt: skip


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


@pytest.mark.parametrize("text", ["", "MiB", "-5MB", "5 XB", "1e9", "5MB 6MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SizeError, match="expected a size such as 500MiB"):
        parse_size(text)


def test_trace_info_and_stats(trilane: Trilane) -> None:
    info = trilane("trace", "info", "mini-moe", "--json", "-").json
    stats = trilane("trace", "stats", "mini-moe", "--json", "-").json
    assert (info["sequences"], info["tokens"], info["moe_layers"]) == (
        stats["sequences"], stats["tokens"], stats["layers"],
    )  # fmt: skip
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


def test_every_number_of_a_machine_has_its_source(trilane: Trilane) -> None:
    for machine in trilane("hardware", "--json", "-").json["hardware"]:
        page = trilane("hardware", machine["name"]).out
        for number in machine["numbers"]:
            assert number["source"]
            assert number["key"] in page


# --- help and errors --------------------------------------------------------------------------------------------------

VERBS = ("compare", "simulate", "cache-curve", "policies", "models", "hardware", "trace")


@pytest.mark.parametrize("verb", ["", *VERBS, "trace info", "trace stats", "trace import", "trace capture"])
def test_help(trilane: Trilane, verb: str) -> None:
    done = trilane(*verb.split(), "--help")
    assert done.status == 0
    assert "Usage" in done.out


def test_version(trilane: Trilane) -> None:
    assert trilane("--version").out.startswith("trilane ")


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown verb": (("compair",), "No such command"),
    "unknown option": (("compare", "--foo"), "No such option"),
    "missing argument": (("trace", "info"), "Missing argument"),
    "unknown policy": (("compare", "--policies", "dalii"), "did you mean 'dali'"),
    "unknown policy to simulate": (("simulate", "--policy", "nobody"), "there is no policy 'nobody'"),
    "unknown key": (("compare", "--set", "bach=2"), "did you mean 'batch'"),
    "no value": (("compare", "--set", "batch"), "expected KEY=VALUE, got 'batch'"),
    "no YAML": (("compare", "--set", "batch=["), "not a YAML value"),
    "no scenario file": (("compare", "--scenario", "nowhere.yaml"), "nowhere.yaml"),
    "no trace": (("trace", "info", "nowhere"), "no bundled trace 'nowhere'"),
    "no CSV": (("trace", "import", "nowhere.csv", "-o", "x.safetensors"), "nowhere.csv"),
    "unknown machine": (("simulate", "--set", "hardware=abacus"), "no hardware preset or file 'abacus'"),
    "unknown model": (("simulate", "--set", "model=eliza"), "eliza"),
    "another topology": (("simulate", "--set", "model=mixtral-8x7b"), "moe_layers"),
    "too little memory": (("simulate", "--set", "gpu_memory_gb=3"), "GB are missing"),
    "too large a share": (("simulate", "--set", "cached_share=0.99"), "GB are missing"),
    "too large a batch": (("simulate", "--set", "batch=1000"), "batch 1000"),
    "unknown cache": (("cache-curve", "mini-moe", "--policies", "lru,fifo"), "there is no cache policy 'fifo'"),
    "no cache": (("cache-curve", "mini-moe", "--policies", ","), "expected at least one name"),
    "a misspelt cache": (("cache-curve", "mini-moe", "--policies", "layer_lri"), "did you mean 'layer-lru'? There are"),
    "a cache below one expert": (("cache-curve", "mini-moe", "--pool", "1kB"), "at least one expert, "),
    "no policies": (("compare", "--policies", ""), "--policies: expected at least one name"),
    "a policy twice": (("compare", "--policies", "dali,fiddler, dali"), "expected every name once, got dali more"),
    "a misspelt trace": (("trace", "info", "mini-deepsek"), "did you mean 'mini-deepseek'?"),
    "a misspelt model": (("models", "mixtral_8x7"), "did you mean 'mixtral-8x7b'?"),
    "two results in one file": (("simulate", "--json", "x.png", "--gantt", "./x.png"), "a file of its own"),
    "a device for a result": (("simulate", "--json", "/dev/null"), "this is a device"),
    "usage of a verb": (("compare", "--polices", "dali"), "see `trilane compare --help`"),
    "usage of a verb's verb": (("trace", "info"), "see `trilane trace info --help`"),
    "no size": (("cache-curve", "mini-moe", "--pool", "big"), "got 'big'"),
    "no folder": (("compare", "--json", "nowhere/x.json"), "the folder nowhere does not exist"),
    "a folder": (("simulate", "--json", "."), "this is a folder"),
    "a file for a folder": (("compare", "--out", "/dev/null"), "/dev/null is a file"),
    "no picture": (("simulate", "--gantt", "x.docx"), "ending in .png"),
    "unknown model name": (("models", "eliza"), "eliza"),
    "unknown machine name": (("hardware", "abacus"), "abacus"),
    "unknown policy name": (("policies", "nobody"), "nobody"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(trilane: Trilane, name: str) -> None:
    words, expected = BAD[name]
    done = trilane(*words)
    assert done.status == 2
    assert done.out == ""
    [line] = done.err.splitlines()
    assert line.startswith("trilane: ")
    assert expected in line
    assert not list(Path().iterdir())


SAMPLE = ROOT / "traces" / "bundled" / "mini-moe.safetensors"
OVERWRITING: dict[str, tuple[str, ...]] = {
    "the CSV": ("trace", "import", "mine.csv", "-o", "mine.csv"),
    "the CSV by another path": ("trace", "import", "mine.csv", "-o", "../{here}/mine.csv"),
    "the CSV through a link": ("trace", "import", "link.csv", "-o", "mine.csv"),
    "the prompts": ("trace", "capture", "--model", "a/b", "--prompts", "p.safetensors", "-o", "p.safetensors"),
    "a file of the model": ("trace", "capture", "--model", "model", "--prompts", "p", "-o", "model/w.safetensors"),
    "the scenario": ("compare", "-s", "s.yaml", "--json", "s.yaml"),
    "the scenario, simulated": ("simulate", "-s", "s.yaml", "--spans", "s.yaml"),
    "the scenario's trace": ("simulate", "--set", "trace=q.safetensors", "--json", "q.safetensors"),
    "the trace": ("cache-curve", "q.safetensors", "--json", "q.safetensors"),
    "the trace with a curve": ("cache-curve", "mine.csv", "--png", "mine.csv"),
    "the described trace": ("trace", "info", "q.safetensors", "--json", "q.safetensors"),
    "one of the counted traces": ("trace", "stats", "mini-moe", "q.safetensors", "--json", "q.safetensors"),
    "the machine": ("hardware", "s.yaml", "--json", "s.yaml"),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_no_result_is_written_over_what_it_is_made_from(trilane: Trilane, tmp_path: Path, name: str) -> None:
    write_route_csv(tmp_path / "mine.csv")
    Path("link.csv").symlink_to("mine.csv")
    Path("model").mkdir()
    for file in ("p", "p.safetensors", "model/w.safetensors"):
        Path(file).write_text("A prompt.\n")
    Path("s.yaml").write_text("policy: fiddler\n")
    Path("q.safetensors").write_bytes(SAMPLE.read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = trilane(*(word.replace("{here}", tmp_path.name) for word in OVERWRITING[name]))
    assert done.status == 2
    assert "which would be lost" in done.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


CAPTURE: dict[str, tuple[tuple[str, ...], str]] = {
    "a binary for prompts": (
        ("--prompts", "binary"),
        "binary line 2: expected prompts as UTF-8 text, got the byte 0xff",
    ),
    "no prompts": (("--prompts", "nowhere.txt"), "nowhere.txt: expected a file of prompts"),
    "empty prompts": (("--prompts", "empty"), "expected at least one prompt"),
    "no calibration": (("--calibration", "nowhere.txt"), "nowhere.txt: expected a file of prompts"),
    "no number": (("--temperature", "nan"), "temperature must be >= 0, got nan"),
    "no batch": (("--batch-size", "0"), "batch_size must be >= 1, got 0"),
    "no type": (("--dtype", "float99"), "dtype: expected one of auto, float32"),
    "no model": (("--model", "nowhere"), "nowhere: no such folder"),
    "no folder": (("--model", "./some/where"), "./some/where: no such folder"),
    "no trace name": (("-o", "mine.txt"), "mine.txt: expected the name of a trace file, ending in .safetensors"),
}


@pytest.mark.parametrize("name", CAPTURE)
def test_capture_checks_before_it_loads(trilane: Trilane, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("trilane.verbs.trace._capture_function", lambda: pytest.fail("capture was loaded"))
    Path("p.txt").write_text("A prompt.\n")
    Path("empty").write_text("\n")
    Path("binary").write_bytes(b"fine\n\xff\xfe\n")
    words, expected = CAPTURE[name]
    done = trilane("trace", "capture", "--model", "a/b", "--prompts", "p.txt", "-o", "x.safetensors", *words)
    assert done.status == 2
    assert expected in done.err


def test_a_csv_is_no_trace_until_imported(trilane: Trilane, tmp_path: Path) -> None:
    write_route_csv(tmp_path / "mine.route.csv")
    for verb in ("compare", "simulate"):
        done = trilane(verb, "--set", "trace=mine.route.csv")
        assert done.status == 2
        assert "import it first: trilane trace import mine.route.csv -o mine.route.safetensors" in done.err


def test_regret_is_explained_only_where_there_is_a_clairvoyant_run(trilane: Trilane) -> None:
    assert "clairvoyant" not in trilane("compare", *SHORT, "--policies", "fiddler").out
    assert "regret    TPOT over that of the clairvoyant run" in trilane("compare", *SHORT, "--policies", "oracle").out


def test_a_machine_says_what_deciding_costs(trilane: Trilane) -> None:
    from sim.hardware import load_hardware

    machine = load_hardware("rtx3090-ddr4")
    [fact] = trilane("hardware", "rtx3090-ddr4", "--json", "-").json["hardware"]
    costs = {row["policy"]: row["plan_base_ns"] for row in fact["plan_costs"]}
    for policy in policy_names():
        assert costs[policy] == machine.plan_costs.plan_of(policy).base_ns * machine.host.plan_factor
        assert f"{costs[policy]:,.0f}" in trilane("hardware", "rtx3090-ddr4").out


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "trilane", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trilane ")


def test_damaged_trace(trilane: Trilane) -> None:
    whole = SAMPLE.read_bytes()
    for name, content in (("cut", whole[:-1000]), ("flipped", whole[:-1] + bytes([whole[-1] ^ 1])), ("empty", b"")):
        Path(name).write_bytes(content)
        done = trilane("trace", "info", name)
        assert done.status == 2
        assert f"/{name}: expected" in done.err


def test_our_own_mistakes_are_not_hidden(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scenario: Scenario) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("sim.simulate.simulate", broken)
    monkeypatch.setattr(sys, "argv", ["trilane", "simulate"])
    with pytest.raises(ZeroDivisionError):
        main()
