"""Help, and what becomes of bad input: one sentence, status 2, nothing half-written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from policies.mechanism.views import PolicyError
from policies.registry import policy_names
from sim.runs.scenario import Scenario
from tests.kit.commands import ROOT, SHORT, Trilane, write_route_csv
from traces.file import write_trace
from traces.library import load_trace
from trilane.cli import main

ROOMS = ("traces", "policies", "sim", "realrun", "trilane")
NO_BAD_INPUT = {
    "PolicyError",  # a policy, ours or a user's, broke a rule
    "LaneError",  # work failed on a real machine during a run
    "TrilaneError",  # the base
    "SkippedError", "_FaultError", "_MismatchError", "_EndedError",  # always caught
}

# --- help and errors --------------------------------------------------------------------------------------------------

VERBS = ("compare", "ablate", "simulate", "cache-curve", "policies", "models", "hardware", "trace")


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
    "an option without its value": (("accuracy", "--template"), "requires an argument; see `trilane accuracy --help`"),
    "no model": (("fit",), "expected a model, such as qwen3-30b-a3b (`trilane models` lists them), got none"),
    "a model twice": (("fit", "olmoe-1b-7b", "-m", "glm-4.5"), "got both 'olmoe-1b-7b' and --model 'glm-4.5'"),
    "unknown policy": (("compare", "--policies", "dalii"), "did you mean 'dali'"),
    "unknown policy to simulate": (("simulate", "--policy", "nobody"), "there is no policy 'nobody'"),
    "unknown key": (("compare", "--set", "bach=2"), "did you mean 'batch'"),
    "no value": (("compare", "--set", "batch"), "expected KEY=VALUE, got 'batch'"),
    "no YAML": (("compare", "--set", "batch=["), "not plain YAML"),
    "no date": (("compare", "--set", "seed=2020-13-45"), "expected a whole number, got '2020-13-45'"),
    "a number of 401 digits": (("compare", "--set", f"seed={10**400}"), "a number of 401 characters, expected 100 at"),
    "no scenario file": (("compare", "--scenario", "nowhere.yaml"), "nowhere.yaml"),
    "no trace": (("trace", "info", "nowhere"), "no bundled trace 'nowhere'"),
    "no CSV": (("trace", "import", "nowhere.csv", "-o", "x.safetensors"), "nowhere.csv"),
    "unknown machine": (("simulate", "--set", "hardware=abacus"), "no hardware preset or file 'abacus'"),
    "unknown model": (("simulate", "--set", "model=eliza"), "eliza"),
    "another topology": (("simulate", "--set", "model=mixtral-8x7b"), "moe_layers"),
    "another trace": (("simulate", "--set", "trace=gpt-oss-20b"), "`--set model=gpt-oss-20b`"),
    "too little memory": (("simulate", "--set", "gpu_memory_gb=3"), "GB are missing"),
    "too large a share": (("simulate", "--set", "cached_share=0.99"), "GB are missing"),
    "too large a batch": (("simulate", "--set", "batch=1000"), "batch 1000"),
    "unknown cache": (("cache-curve", "mini-moe", "--policies", "lru,fifo"), "there is no cache policy 'fifo'"),
    "no cache": (("cache-curve", "mini-moe", "--policies", ","), "expected at least one name"),
    "a misspelt cache": (("cache-curve", "mini-moe", "--policies", "layer_lri"), "did you mean 'layer-lru'? Choose"),
    "a cache below one expert": (("cache-curve", "mini-moe", "--pool", "1kB"), "at least one expert, "),
    "no policies": (("compare", "--policies", ""), "--policies: expected at least one name"),
    "a policy twice": (("compare", "--policies", "dali,fiddler, dali"), "expected every name once, got dali more"),
    "a misspelt trace": (("trace", "info", "mini-deepsek"), "did you mean 'mini-deepseek'?"),
    "a misspelt model": (("models", "mixtral_8x7"), "did you mean 'mixtral-8x7b' or"),
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
OWN = """
from dataclasses import dataclass
from trilane import register, system

@register("mine", "as on-demand")
@dataclass(frozen=True)
class Mine(system("on-demand").parameters):
    pass
"""
OVERWRITING: dict[str, tuple[str, ...]] = {
    "the CSV": ("trace", "import", "mine.csv", "-o", "mine.csv"),
    "the CSV by another path": ("trace", "import", "mine.csv", "-o", "../{here}/mine.csv"),
    "the CSV through a link": ("trace", "import", "link.csv", "-o", "mine.csv"),
    "the prompts": ("trace", "capture", "--model", "a/b", "--prompts", "p.safetensors", "-o", "p.safetensors"),
    "a file of the model": ("trace", "capture", "--model", "model", "--prompts", "p", "-o", "model/w.safetensors"),
    "the scenario": ("compare", "-s", "s.yaml", "--json", "s.yaml"),
    "the scenario, simulated": ("simulate", "-s", "s.yaml", "--json", "s.yaml"),
    "the scenario's trace": ("simulate", "--set", "trace=q.safetensors", "--json", "q.safetensors"),
    "the trace": ("cache-curve", "q.safetensors", "--json", "q.safetensors"),
    "the trace with a curve": ("cache-curve", "mine.csv", "--png", "mine.csv"),
    "the described trace": ("trace", "info", "q.safetensors", "--json", "q.safetensors"),
    "one of the counted traces": ("trace", "stats", "mini-moe", "q.safetensors", "--json", "q.safetensors"),
    "the policy": ("simulate", "--policy", "own_of_errors.py:Mine", "--json", "own_of_errors.py"),
    "the policy of --set": ("simulate", "--set", "policy=own_of_errors.py", "--json", "own_of_errors.py"),
    "the policy taken apart": ("ablate", "own_of_errors.py", "--json", "own_of_errors.py"),
    "the described policy": ("policies", "own_of_errors.py:Mine", "--json", "own_of_errors.py"),
    "a compared policy": ("compare", "--policies", "own_of_errors.py:Mine", "--json", "own_of_errors.py"),
    "a varied policy": (
        "whatif", "--vary", "batch=1", "--policies", "own_of_errors.py:Mine", "--json", "own_of_errors.py",
    ),
    "a policy for its cache": (
        "cache-curve", "mini-moe", "--policies", "own_of_errors.py:Mine", "--json", "own_of_errors.py",
    ),
    "a policy that is chosen from": (
        "fit",
        "-m",
        "olmoe-1b-7b",
        "--gpu",
        "rtx-4080",
        "--ram",
        "ddr5-5600",
        "--policies",
        "own_of_errors.py:Mine",
        "--json",
        "own_of_errors.py",
    ),
    "a validated policy": (
        "validate", "s.yaml", "--profile", "p", "--policies", "own_of_errors.py:Mine", "--json", "own_of_errors.py",
    ),
    "the machine": ("hardware", "s.yaml", "--json", "s.yaml"),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_no_result_is_written_over_what_it_is_made_from(trilane: Trilane, tmp_path: Path, name: str) -> None:
    Path("own_of_errors.py").write_text(OWN)
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


@pytest.mark.parametrize("there", [True, False])
def test_no_result_is_written_through_a_link(trilane: Trilane, there: bool) -> None:
    if there:
        Path("victim").write_text("precious")
    Path("link.json").symlink_to("victim")
    done = trilane("policies", "--json", "link.json")
    assert (done.status, done.out) == (2, "")
    assert "link.json: expected a file, this is a symbolic link to " in done.err
    assert Path("victim").exists() == there
    assert not there or Path("victim").read_text() == "precious"


@pytest.mark.parametrize("end", [".journal", ".journal.lock"])
def test_no_journal_is_written_through_a_link(trilane: Trilane, end: str) -> None:
    Path("f.yaml").write_text("{scenario: {prompt_tokens: 4, generated_tokens: 3}, grid: {batch: [1]}}")
    Path(f"o.parquet{end}").symlink_to("victim")
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done.status == 2
    assert f"o.parquet{end}: expected a file, this is a symbolic link to " in done.err
    assert not Path("victim").exists()


CAPTURE: dict[str, tuple[tuple[str, ...], str]] = {
    "a binary for prompts": (
        ("--prompts", "binary"), "binary line 2: expected prompts as UTF-8 text, got the byte 0xff",
    ),
    "no prompts": (("--prompts", "nowhere.txt"), "nowhere.txt: expected a file of prompts"),
    "empty prompts": (("--prompts", "empty"), "expected at least one prompt"),
    "no calibration": (("--calibration", "nowhere.txt"), "nowhere.txt: expected a file of prompts"),
    "no number": (("--temperature", "nan"), "temperature: expected a number from 0 to 1000, got nan"),
    "no batch": (("--batch-size", "0"), "batch_size: expected a whole number from 1 to 1e+06, got 0"),
    "no end": (("--generated-tokens", "10000000000"), "generated_tokens: expected a whole number from 0 to 1e+06"),
    "no seed": (("--seed", "-1"), "seed: expected a whole number from 0 to 1e+18"),
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


OF_A_GGUF: dict[str, tuple[tuple[str, ...], str]] = {
    "no model at all": ((), "expected --model PATH_OR_ID or --gguf FILE, got neither"),
    "both": (("--gguf", "m.gguf", "--model", "a/b"), "expected --gguf without --model, got --model a/b"),
    "vectors": (("--gguf", "m.gguf", "--vectors", "v"), "expected --gguf without --vectors, got --vectors v"),
    "a type": (("--gguf", "m.gguf", "--dtype", "float16"), "expected --gguf without --dtype, got --dtype float16"),
    "no prompts": (("--gguf", "m.gguf", "--prompts", "nowhere.txt"), "nowhere.txt: expected a file of prompts"),
    "batches": (("--gguf", "m.gguf", "--batch-size", "3"), "expected --gguf without --batch-size, got --batch-size 3"),
    "threads": (("--model", "a/b", "--threads", "2"), "expected --model without --threads, got --threads 2; leave"),
    "no such file": (("--gguf", "m.gguf"), "m.gguf"),
    "another forecast": (("--gguf", "m.gguf", "--forecasts", "partial@1"), "expected gate@1, gate@2, ..."),
}


@pytest.mark.parametrize("name", OF_A_GGUF)
def test_capture_of_a_gguf_checks_its_options(trilane: Trilane, name: str) -> None:
    Path("p.txt").write_text("A prompt.\n")
    words, expected = OF_A_GGUF[name]
    done = trilane("trace", "capture", "--prompts", "p.txt", "-o", "x.safetensors", *words)
    assert (done.status, len(done.err.splitlines())) == (2, 1)
    assert expected in done.err
    assert not Path("x.safetensors").exists()


def test_a_csv_is_no_trace_until_imported(trilane: Trilane, tmp_path: Path) -> None:
    write_route_csv(tmp_path / "mine.route.csv")
    for verb in ("compare", "simulate"):
        done = trilane(verb, "--set", "trace=mine.route.csv")
        assert done.status == 2
        assert "import it first: trilane trace import mine.route.csv -o mine.route.safetensors" in done.err


def test_a_log_of_another_kind_is_no_trace(trilane: Trilane) -> None:
    Path("mine.npz").write_bytes(b"PK\x03\x04 and so on, as a zip file begins")
    done = trilane("simulate", "--set", "trace=mine.npz")
    assert done.status == 2
    assert "`trilane trace import` reads logs of other programs" in done.err


def test_regret_is_explained_only_where_there_is_a_clairvoyant_run(trilane: Trilane) -> None:
    words = ("compare", *SHORT, "--draws", "1", "--policies")
    assert "clairvoyant" not in trilane(*words, "fiddler").out
    assert "regret    TPOT over that of the clairvoyant run" in trilane(*words, "oracle").out


def test_a_machine_says_what_deciding_costs(trilane: Trilane) -> None:
    from sim.machine.hardware import load_hardware

    machine = load_hardware("rtx3090-ddr4")
    [fact] = trilane("hardware", "rtx3090-ddr4", "--json", "-").json["hardware"]
    costs = {row["policy"]: row["plan_base_ns"] for row in fact["plan_costs"]}
    shown = trilane("hardware", "rtx3090-ddr4").out
    for policy in policy_names():
        assert costs[policy] == machine.plan_costs.of("plan", policy).base_ns * machine.host.plan_factor
        assert f"{costs[policy]:,.0f}" in shown


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "trilane", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trilane ")


def test_a_terminal_obeys_nothing_in_a_message(trilane: Trilane) -> None:
    name = "\x1b[31m\u202e\nx.safetensors"
    for words in (("trace", "info", name), ("models", "--\x1b[31m"), ("fit", "-m", "\x9b1m")):
        done = trilane(*words)
        assert done.status == 2
        assert done.err.startswith("trilane: ")
        assert done.err.removesuffix("\n").isprintable()


def test_damaged_trace(trilane: Trilane) -> None:
    whole = SAMPLE.read_bytes()
    for name, content in (("cut", whole[:-1000]), ("flipped", whole[:-1] + bytes([whole[-1] ^ 1])), ("empty", b"")):
        Path(name).write_bytes(content)
        done = trilane("trace", "info", name)
        assert done.status == 2
        assert f"/{name}: expected" in done.err


BUGS = (
    ZeroDivisionError("a bug"), PolicyError("a broken rule"), ValueError("of a library"),
    ConnectionResetError("of a policy"), BrokenPipeError("of a policy"), FileNotFoundError("of a policy"),
)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_a_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bug: Exception
) -> None:
    """Once, a broken rule of a policy was printed as if the input were bad."""

    def broken(scenario: Scenario) -> None:
        raise bug

    monkeypatch.setattr("sim.simulate.simulate", broken)
    monkeypatch.setattr(sys, "argv", ["trilane", "simulate", "--set", "parameters={window: 4}"])
    with pytest.raises(type(bug)):
        main()
    line = capsys.readouterr().err
    assert f"trilane {version('trilane')}" in line
    assert line.endswith(" trilane simulate --set 'parameters={window: 4}'\n")


def test_every_error_is_bad_input_or_a_named_exception() -> None:
    """All others are bugs to the command line."""
    code = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    classes = {m[1]: m[2] for path in code for m in re.finditer(r"class (\w+Error)\(([\w.]+)\)", path.read_text())}
    bad_input = {name for name in classes if "TrilaneError" in ancestors(name, classes)}
    assert classes.keys() - bad_input == NO_BAD_INPUT


def ancestors(name: str, bases: dict[str, str]) -> list[str]:
    """The base classes of a class, by its name."""
    return [bases[name], *ancestors(bases[name], bases)] if name in bases else []


def test_a_sentence_is_shorter_than_a_name_without_end(trilane: Trilane) -> None:
    found = trilane("simulate", "--set", f"trace=begin{'x' * 5000}end")
    assert found.status == 2
    assert len(found.err) < 1000
    assert found.err.startswith("trilane: begin")
    assert found.err.endswith("\n")


def test_a_trace_may_say_anything_of_its_origin(trilane: Trilane, tmp_path: Path) -> None:
    trace = replace(load_trace("mini-moe:1"), provenance={"domains": [{"a": 1}, ["b"], "c", "c"]})
    write_trace(trace, tmp_path / "t.safetensors")
    found = trilane("trace", "info", "t.safetensors")
    assert found.status == 0
    assert "{'a': 1}, ['b'], c" in found.out


@pytest.mark.parametrize("words", [
    ("accuracy", "--check", "pipe.csv"), ("policies", "pipe.py"), ("simulate", "--policy", "pipe.py"),
    ("plot", "pipe.parquet"), ("hardware", "pipe.yaml"), ("sweep", "pipe.yaml", "-o", "t.parquet"),
    ("models", "pipe.gguf"), ("trace", "import", "pipe.csv", "-o", "t.safetensors"), ("cache-curve", "pipe.csv"),
    ("trace", "info", "pipe.safetensors"), ("fit", "-m", "pipe.json", "--machine", "rtx3090-ddr4"),
])
@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_is_refused_since_its_writer_may_never_come(
    trilane: Trilane, words: tuple[str, ...]
) -> None:
    os.mkfifo(next(word for word in words if word.startswith("pipe.")))
    done = trilane(*words)
    assert (done.status, len(done.err.splitlines())) == (2, 1)
