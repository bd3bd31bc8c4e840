"""Small commands of the kinds that write files, and what each leaves behind: output and files, as bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.running import ROOT, SHORT, write_route_csv
from tests.kit.small_sweeps import SMALL

Words = tuple[str, ...]
MODEL = str(ROOT / "traces" / "bundled" / "mini-moe")
POLICIES = ("--policies", "fiddler,dali,smoe,oracle")
GRID = {"scenario": SMALL, "grid": {"policy": ["fiddler", "dali"], "cached_share": [0.25, 0.5], "batch": [1, 2]}}
SYNTH = ("--like", "mixtral-8x7b:2", "--sequences", "2", "--prompt-tokens", "4", "--generated-tokens", "4")
CAPTURE = ("--model", MODEL, "--prompts", "prompts.txt", "--calibration", "other.txt", "--prompt-tokens", "6",
           "--generated-tokens", "4", "--batch-size", "2")

# By name, the words of each step. {out}: the folder to write to; {jobs}: the number of processes.
COMMANDS: Mapping[str, Sequence[Words]] = {
    "compare": [("compare", *POLICIES, *SHORT, "--draws", "2", "--jobs", "{jobs}", "--out", "{out}/o", "--json",
                 "{out}/c.json")],
    "simulate": [("simulate", "--policy", "dali", *SHORT, "--spans", "{out}/s.parquet", "--perfetto", "{out}/p.json.gz",
                  "--gantt", "{out}/g.svg", "--json", "{out}/s.json")],
    "whatif": [("whatif", "--vary", "pcie=3x16,4x16", *POLICIES, *SHORT, "--jobs", "{jobs}", "--png", "{out}/w.svg",
                "--json", "{out}/w.json")],
    "fit": [("fit", "--model", "olmoe-1b-7b", "--gpu", "rtx-4080", "--ram", "ddr5-5600", "--policies", "fiddler,dali",
             "--jobs", "{jobs}", "--json", "{out}/f.json")],
    "pays": [("pays", "memory", "--model", "mixtral-8x7b:2", "--weights", "bf16", "--gpu", "gtx-1650-super", "--ram",
              "ddr4-3200", "--prompt", "64", "--generated", "4", "--draws", "1", "--jobs", "{jobs}", "--out",
              "{out}/m.svg", "--json", "{out}/m.json")],
    "ablate": [("ablate", "dali", *SHORT, "--draws", "2", "--jobs", "{jobs}", "--png", "{out}/a.svg", "--json",
                "{out}/a.json")],
    "sweep": [("sweep", "grid.yaml", "-o", "{out}/s.parquet", "--jobs", "{jobs}")],
    "plot": [("sweep", "grid.yaml", "-o", "{out}/s.parquet", "--jobs", "{jobs}"),
             ("plot", "{out}/s.parquet", "--out", "{out}/pictures")],
    "cache-curve": [("cache-curve", "mini-moe:3", "--png", "{out}/c.svg", "--json", "{out}/c.json"),
                    ("cache-curve", "mini-moe:3", "--png", "{out}/c.pdf")],
    "trace synth": [("trace", "synth", *SYNTH, "-o", "{out}/t.safetensors", "--json", "{out}/t.json")],
    "trace import": [("trace", "import", "route.csv", "-o", "{out}/t.safetensors"),
                     ("trace", "info", "{out}/t.safetensors", "--json", "{out}/i.json"),
                     ("trace", "stats", "{out}/t.safetensors", "--json", "{out}/s.json")],
    "trace capture": [("trace", "capture", *CAPTURE, "-o", "{out}/t.safetensors")],
    "lists": [("policies",), ("policies", "dali"), ("models",), ("models", "qwen3-30b-a3b", "--json", "{out}/m.json"),
              ("hardware", "--parts"), ("hardware", "rtx3090-ddr4", "--json", "{out}/h.json")],
}


def write_inputs(folder: Path) -> None:
    """The files that the commands read."""
    (folder / "grid.yaml").write_text(json.dumps(GRID))
    (folder / "prompts.txt").write_text("The river runs to the sea.\nOnce there was a small house.\nTwo and two.\n")
    (folder / "other.txt").write_text("A cat sat there.\nThe night was cold and long.\n")
    write_route_csv(folder / "route.csv")


def start(
    words: Words, folder: Path, environment: Mapping[str, str], out: str = ".", jobs: int = 1,
    program: Words = ("-m", "trilane"),
) -> subprocess.Popen[bytes]:
    """Start one step of a command in ``folder``, in a session of its own, with few variables but those given."""
    filled = [word.replace("{out}", out).replace("{jobs}", str(jobs)) for word in words]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    given = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, *program, *filled], cwd=folder, env=given, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)


def left_in(folder: Path) -> dict[str, bytes]:
    """The content of every file by its name, and folders by theirs."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder" for path in found}
