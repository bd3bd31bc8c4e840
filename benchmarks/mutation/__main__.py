"""Plants faults in the packages and counts those that the tests find: python -m benchmarks.mutation --seed 1

Prints each mutant that survives, with its lines before and after, and the score. A fault is found if a test fails or
does not end, or if mypy refuses it. Needs the extra `mutation`; 300 mutants take an hour and a half of one core. The
results go to out/mutation. They are tried in random order. --answers plants them in the packages of the printed answers
and picks tests by their place (mirrors.py), so that it needs no run of all tests first.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.mutation.mirrors import mirrors
from benchmarks.mutation.mutants import ANSWERS, PACKAGES, Mutant, sample
from benchmarks.mutation.outcomes import Covering, copy_of, cover, planted, play, play_files, preload, well_typed

ROOT = Path(__file__).parents[2]
LIBRARIES = ("numpy", "scipy.optimize", "pyarrow.parquet", "hypothesis", "typer", "yaml", "torch", "transformers")


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description=__doc__)
    parser.add_argument("--sample", type=int, default=300, metavar="N", help="how many mutants")
    parser.add_argument("--seed", type=int, required=True, help="which mutants")
    parser.add_argument("--seconds", type=float, default=20, help="of tests nearer and farther, each")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutation", help="folder of the results")
    parser.add_argument("--covering", type=Path, metavar="FILE", help="OUT/covering.json of a run on the same sources")
    parser.add_argument("--survivors", action="store_true", help="only those that survived the last run of the seed")
    parser.add_argument("--answers", action="store_true", help=f"in {', '.join(ANSWERS)}")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"seed-{given.seed}.json"
    known: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if given.survivors else {}
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = copy_of(ROOT, Path(folder))
        mutants = sample(copy, given.sample, given.seed, ANSWERS if given.answers else PACKAGES)
        random.Random(given.seed).shuffle(mutants)
        names = [name_of(mutant, copy) for mutant in mutants]
        covering = None if given.answers else covering_of(copy, given.covering, given.out)
        preload(covering.modules if covering else LIBRARIES)
        if not well_typed(copy):
            parser.error("mypy refuses the unchanged sources")
        for name, mutant in zip(names, mutants, strict=True):
            if known.get(name, "passed") == "passed":
                known[name] = outcome(mutant, covering, copy, given.seconds, given.out / "log.txt")
                file.write_text(json.dumps(known, indent=1), encoding="utf-8")
                if known[name] == "passed":
                    print(f"survived: {name}", flush=True)
    counts = Counter(known[name] for name in names)
    found = len(mutants) - counts["passed"]
    by = f"{counts['failed']} by tests that fail, {counts['timeout']} by tests without end, {counts['types']} by mypy"
    print(f"{found} of {len(mutants)} faults are found ({100 * found / len(mutants):.1f} %): {by}")


def covering_of(copy: Path, known: Path | None, out: Path) -> Covering:
    """Which tests run which lines: of an earlier run, or of all tests."""
    return Covering.load(known) if known else cover(copy, out / "covering.json")


def name_of(mutant: Mutant, copy: Path) -> str:
    """Place and change."""
    return f"{mutant.path}:{mutant.line}\n{mutant.diff(copy)}"


def outcome(mutant: Mutant, covering: Covering | None, copy: Path, seconds: float, log: Path) -> str:
    """How it was found: "failed" or "timeout" by a test, "types" by mypy; "passed": not at all."""
    with planted(mutant, copy):
        if covering is None:
            played = (play_files(group, copy, seconds, log) for group in mirrors(mutant.path, copy) if group)
        else:
            tests = covering.of(mutant, copy, seconds)
            expected = sum(covering.seconds[name] for name in tests)
            played = (play(tests, copy, 30 + 5 * expected, log) for _ in range(bool(tests)))
        found = next((how for how in played if how != "passed"), "passed")
        return found if found != "passed" or well_typed(copy) else "types"


if __name__ == "__main__":
    main()
