"""An edited, renamed or new source is other code; a compiled file is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.kit.small_sweeps import SMALL
from trilane.study.sweep.code_fingerprint import code_fingerprint, fingerprint_of, sources_in

ROOT = Path(__file__).resolve().parents[4]
FOLDERS = [ROOT / name for name in ("traces", "policies", "sim", "trilane/common")]


def test_sources_and_their_names_count(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    one = tmp_path / "policies" / "lru.py"
    checksums = []
    for text in ("a = 1", "a = 2"):
        one.write_text(text)
        checksums.append(fingerprint_of([tmp_path]))
    (tmp_path / "costs.yaml").write_text("a = 2")
    checksums.append(fingerprint_of([tmp_path]))
    one.rename(tmp_path / "lru.py")
    checksums.append(fingerprint_of([tmp_path]))
    assert len(set(checksums)) == 4
    (tmp_path / "lru.pyc").write_bytes(b"compiled")
    assert fingerprint_of([tmp_path]) == checksums[-1]


def test_what_no_simulation_follows_from_does_not_count() -> None:
    names = set(sources_in(FOLDERS))
    assert {"sim/simulate.py", "sim/timeline/timeline.py", "policies/registry.py", "traces/models/models.yaml"} < names
    for name in ("traces/capture/load.py", "traces/capture/capture.py"):
        assert (ROOT / name).exists()
        assert name not in names
    rooms = {"traces", "policies", "sim", "common"}
    assert {name.partition("/")[0] for name in names} == rooms, "no pages, no verbs"


def test_whatever_a_simulation_imports_counts() -> None:
    """In a process that does nothing else: with a bundled trace, and with one that is made up."""
    program = (
        "import json, sys\n"
        "import sim.simulate\n"
        "from trilane.study.sweep.grid import Grid, points\n"
        "from trilane.study.sweep.sweep import Player\n"
        "grid = {'scenario': json.loads(sys.argv[1]), 'grid': {'policy': ['dali', 'daop', 'smoe'],\n"
        "        'hardware': ['rtx3090-ddr4', 'rtx-4080+ddr5-5600']}}\n"
        "assert not any(Player().row(point)['error'] for point in points(Grid.from_dict(grid)))\n"
        "from traces.library import load_trace\n"
        "import traces.synthesis.named, traces.synthesis.synthetic_trace\n"
        "print(json.dumps([module.__file__ for module in list(sys.modules.values()) if getattr(module, '__file__', '')"
        "]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(SMALL)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {Path(name).resolve() for name in json.loads(done.stdout)}
    ours = {path for path in loaded if any(path.is_relative_to(folder) for folder in FOLDERS)}
    assert len(ours) > 80
    assert sorted(ours - set(sources_in(FOLDERS).values())) == []


def test_it_is_the_same_in_the_whole_process() -> None:
    assert code_fingerprint() == code_fingerprint()
