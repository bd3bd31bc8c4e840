"""A policy in a file of the user's own, named on the command line of every verb that runs policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.commands import SHORT, Trilane

CODE = """
from dataclasses import dataclass
from trilane import register, system

@register("mine", "as Fiddler")
@dataclass(frozen=True)
class Mine(system("fiddler").parameters):
    pass

@register("mine-lru", "as on-demand")
@dataclass(frozen=True)
class Lru(system("on-demand").parameters):
    pass
"""
CARELESS = """
from dataclasses import dataclass, replace
from trilane import register, system
from trilane.parts import LruCache

class Careless(LruCache):
    def victim(self, incoming, group, blocked):
        return super().victim(incoming, group, blocked=())

@register("careless", "evicts experts that are needed")
@dataclass(frozen=True)
class Mine(system("on-demand").parameters):
    def compose(self, context):
        return replace(super().compose(context), cache=Careless())
"""
FILE = "own_of_verbs.py"
SWEEP = "{scenario: {prompt_tokens: 4, generated_tokens: 2}, grid: {policy: [mine, on-demand]}, clairvoyant: false}"


@pytest.fixture(autouse=True)
def _own_policies(trilane: Trilane) -> None:
    """The file, in the folder that commands run in."""
    Path(FILE).write_text(CODE)


@pytest.mark.parametrize(("text", "mine"), [(f"{FILE}:Mine", ["mine"]), (FILE, ["mine", "mine-lru"])])
def test_compare(trilane: Trilane, text: str, mine: list[str]) -> None:
    done = trilane("compare", *SHORT, "--policies", f"on-demand,{text}", "--draws", "1", "--jobs", "1", "--json", "-")
    assert {run["policy"] for run in done.json["runs"]} == {"on-demand", *mine}


def test_worker_processes_load_the_file(trilane: Trilane) -> None:
    words = ("compare", *SHORT, "--policies", f"on-demand,{FILE}:Mine", "--draws", "2", "--json", "-", "--jobs")
    assert trilane(*words, "2").json == trilane(*words, "1").json


@pytest.mark.parametrize("policies", ["dali,nonsense", "{file},dali"])
def test_a_sweep_takes_files_alone(trilane: Trilane, policies: str) -> None:
    """The names are in its file."""
    Path("grid.yaml").write_text(SWEEP)
    done = trilane("sweep", "grid.yaml", "-o", "t.parquet", "--policies", policies.format(file=FILE), "--jobs", "1")
    assert done.status == 2
    assert "expected FILE.py or FILE.py:NAME, got 'dali'" in done.err
    assert not Path("t.parquet").exists()


GRID = "{{scenario: {{prompt_tokens: 4, generated_tokens: 2}}, grid: {{policy: {policy}}}, clairvoyant: false}}"


@pytest.mark.parametrize(("policy", "points"), [
    (f"[{FILE}, on-demand]", 3), (f"['{FILE}:Lru', on-demand]", 2), (f"[{{'{FILE}:Lru': {{}}}}]", 1),
])
def test_a_grid_names_the_file_and_so_must_the_command_line(trilane: Trilane, policy: str, points: int) -> None:
    """What a file of settings names is not executed by itself; the error says what to add."""
    Path("grid.yaml").write_text(GRID.format(policy=policy))
    words = ("sweep", "grid.yaml", "-o", "t.parquet", "--jobs", "2")
    Path(FILE).write_text(CODE + "\nopen('executed', 'w')\n")
    done = trilane(*words)
    assert done.status == 2
    named = FILE if points == 3 else f"{FILE}:Lru"
    assert f"add --policies {named}" in done.err
    assert not Path("executed").exists()
    done = trilane(*words, "--policies", named)
    assert done.status == 0, done.err
    assert done.err == f"{points} point{'s' * (points > 1)} in t.parquet\n"


def test_one_policy_may_be_named_twice(trilane: Trilane) -> None:
    words = ("simulate", *SHORT, "--policy", f"{FILE}:Mine", "--json", "-", "--set")
    for text in ("mine", f"./{FILE}:Mine"):
        assert trilane(*words, f"policy={text}").json["run"]["policy"] == "mine"
    done = trilane(*words, f"policy={FILE}:Lru")
    assert done.status == 2
    assert "--policy mine and --set policy=mine-lru" in done.err


def test_a_grid_names_it(trilane: Trilane) -> None:
    Path("grid.yaml").write_text(SWEEP)
    done = trilane("sweep", "grid.yaml", "-o", "t.parquet", "--policies", f"{FILE}:Mine", "--jobs", "2")
    assert done.status == 0, done.err
    assert done.err == "2 points in t.parquet\n"


@pytest.mark.parametrize(("words", "place"), [
    (("simulate", *SHORT, "--policy"), ("run", "policy")), (("simulate", *SHORT, "--set"), ("run", "policy")),
    (("ablate", *SHORT, "--draws", "1", "--jobs", "1"), ("ladder", -1, "policy")),
    (("policies",), ("policies", 0, "name")),
])
def test_verbs_of_one_policy(trilane: Trilane, words: tuple[str, ...], place: tuple[str | int, ...]) -> None:
    text = f"policy={FILE}:Mine" if words[-1] == "--set" else f"{FILE}:Mine"
    found = trilane(*words, text, "--json", "-").json
    for key in place:
        found = found[key]
    assert found == "mine"


def test_whatif(trilane: Trilane) -> None:
    words = ("whatif", *SHORT, "--vary", "cached_share=0.2,0.4", "--policies", f"{FILE}:Mine", "--jobs", "1")
    done = trilane(*words, "--json", "-")
    assert {row["policy"] for row in done.json["rows"]} >= {"mine"}


def test_whatif_shows_it_in_every_cell_of_two_axes(trilane: Trilane) -> None:
    axes = ("--vary", "cached_share=0.2,0.4", "--vary", "batch=1,2")
    words = ("whatif", *SHORT, *axes, "--policies", f"{FILE}:Lru,fiddler", "--jobs", "1")
    done = trilane(*words)
    _, _, own = done.out.partition("TPOT of mine-lru in ms, and over that of the fastest\n")
    rows = {(row["cached_share"], row["batch"]): row["tpot_ms"] for row in trilane(*words, "--json", "-").json["rows"]
            if row["policy"] == "mine-lru"}
    for line, share in zip(own.splitlines()[1:3], (0.2, 0.4), strict=True):
        assert [f"{rows[share, batch]:,.2f}" in line for batch in (1, 2)] == [True, True]


def test_its_cache_is_replayed(trilane: Trilane) -> None:
    words = ("cache-curve", "mini-moe", "--pool", "2GiB", "--json", "-", "--policies")
    points = {point["policy"]: point for point in trilane(*words, f"lru,{FILE}:Lru").json["points"]}
    assert points["mine-lru"]["hit_rate"] == points["lru"]["hit_rate"] > 0


def test_fit(trilane: Trilane) -> None:
    machine = ("--gpu", "rtx-4080", "--ram", "ddr5-5600", "--prompt", "16", "--generated", "2")
    done = trilane("fit", "-m", "olmoe-1b-7b", *machine, "--policies", f"{FILE}:Mine", "--jobs", "2", "--json", "-")
    assert '"mine"' in done.out


@pytest.mark.parametrize("words", [("simulate", "--policy"), ("compare", "--policies"), ("whatif", "--vary", "batch=1",
                                   "--policies"), ("ablate",), ("measure", "--policy"), ("policies",)])
@pytest.mark.parametrize(("text", "said"), [("no.py:Mine", "no.py: no such file"), (f"{FILE}:Yours", "Mine, Lru")])
def test_refusals_are_one_sentence(trilane: Trilane, words: tuple[str, ...], text: str, said: str) -> None:
    done = trilane(*words, text)
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert said in line


def test_one_policy_must_be_named(trilane: Trilane) -> None:
    done = trilane("simulate", "--policy", FILE)
    assert done.status == 2
    assert "mine, mine-lru" in done.err


TIGHT = ("--set", "cached_share=0.1", "--set", "generated_tokens=2")


@pytest.mark.parametrize("words", [
    ("simulate", *TIGHT, "--policy"), ("compare", *TIGHT, "--draws", "1", "--jobs", "2", "--policies"),
])
@pytest.mark.parametrize(("edit", "said"), [
    (("blocked=()", "blocked=()"), "line 7, in victim: cache Careless chose ExpertId"),
    (("return super().victim", "return 1 / 0 or super().victim"), "line 8, in victim: ZeroDivisionError"),
    (("return super().victim", "return 7 or super().victim"), "line 7, in victim: cache Careless chose 7 "),
    (("cache=Careless()", "demand_slots=None"), "line 13, in compose: policy 'careless': demand_slots: "),
    (("cache=Careless()", "demand_slots=0"), "line 10: policy 'careless' runs every expert on the GPU"),
])
def test_a_mistake_in_it_is_one_sentence_with_its_line(
    trilane: Trilane, words: tuple[str, ...], edit: tuple[str, str], said: str
) -> None:
    Path(FILE).write_text(CARELESS.replace(*edit))
    done = trilane(*words, f"{FILE}:Mine")
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert line.startswith(f"trilane: {Path(FILE).resolve()}, {said}")


@pytest.mark.parametrize(("victim", "line", "said"), [
    ("1 / 0", 8, "ZeroDivisionError"), ("7", 7, "cache Careless chose"),
])
def test_a_mistake_in_a_cache_that_is_replayed_has_its_line(
    trilane: Trilane, victim: str, line: int, said: str
) -> None:
    Path(FILE).write_text(CARELESS.replace("return super", f"return {victim} or super"))
    done = trilane("cache-curve", "mini-moe", "--pool", "2MiB", "--policies", f"{FILE}:Mine")
    assert done.status == 2
    assert f"{FILE}, line {line}, in victim: {said}" in done.err
