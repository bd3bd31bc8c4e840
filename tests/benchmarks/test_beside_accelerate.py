"""The comparison with accelerate, on a tiny model: all generate the same, and pay for what they move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[test]'")

from benchmarks.beside_accelerate import (  # noqa: E402
    POLICIES,
    compete,
    first_stray,
    hosted,
    rows,
    said_in_memory,
)
from benchmarks.contestants import (  # noqa: E402  # noqa: E402
    Contestant,
    Size,
    learn,
    prompts,
    split,
    with_accelerate,
    with_ours,
    write_model,
)
from realrun.machine.host_lanes import HostLanes, HostLaneSettings  # noqa: E402
from sim.runs.scenario import Scenario  # noqa: E402
from tests.kit.depth import deep  # noqa: E402

SIZE = Size(hidden=64, layers=3, experts=8, top_k=2, width=32, vocab=96)
EXPERT_BYTES = 3 * 64 * 32 * 2
LAYER_BYTES = 8 * EXPERT_BYTES
GENERATED = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beside")
    write_model(SIZE, folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def smallest(checkpoint: Path) -> int:
    """The limit that holds all but experts, and one layer that comes and goes."""
    with pytest.raises(ValueError, match="too small for this model") as refused:
        split(checkpoint, 0, "cpu", "disk")
    return int(str(refused.value).split(" is ")[1].split()[0].replace(",", ""))


@pytest.fixture(scope="module")
def lanes() -> Iterator[HostLanes]:
    machine = HostLanes(HostLaneSettings(link_bytes_per_s=1e9), inline=True)
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def played(checkpoint: Path, smallest: int, lanes: HostLanes) -> list[Contestant]:
    """Everybody, twice, with one layer of three on the GPU, or as many experts."""
    model, (prompt, *others) = hosted(checkpoint, lanes), prompts(SIZE, 3, 6)
    learnt = learn(model, others, GENERATED, lanes, checkpoint.parent)
    limit = smallest + LAYER_BYTES
    contestants = with_accelerate(checkpoint, checkpoint.parent, limit, prompt, GENERATED, lanes)
    contestants += with_ours(POLICIES, model, prompt, GENERATED, lanes, Scenario(cached_share=1 / 3), learnt)
    assert list(compete(contestants, runs=2)) == [1, 2]
    return contestants


def test_as_many_layers_stay_as_fit_beside_one_that_comes_and_goes(checkpoint: Path, smallest: int) -> None:
    for more, here in ((0, 0), (LAYER_BYTES - 1, 0), (LAYER_BYTES, 1), (3 * LAYER_BYTES, 3), (9 * LAYER_BYTES, 3)):
        there = split(checkpoint, smallest + more, "cpu", "disk")
        assert there.layers_on_gpu == here
        assert there.moved_bytes == (3 - here) * LAYER_BYTES
        assert [name for name, place in there.places.items() if place == "disk"] == [
            f"model.layers.{layer}.mlp.experts" for layer in range(here, 3)
        ]


@deep
def test_all_generate_what_the_model_in_memory_does(checkpoint: Path, played: list[Contestant]) -> None:
    prompt = prompts(SIZE, 1, 6)[0]
    truth = said_in_memory(checkpoint, prompt, GENERATED)
    assert len(set(truth)) > 1
    assert {each.who: [turn.tokens for turn in each.turns] for each in played} == {
        each.who: [truth, truth] for each in played
    }


def test_accelerate_pays_the_link_for_all_experts_of_the_layers_that_are_away(
    played: list[Contestant], checkpoint: Path, smallest: int, lanes: HostLanes
) -> None:
    least_ms = 2 * LAYER_BYTES / lanes.settings.link_bytes_per_s * 1e3
    assert min(played[0].steps_ms) >= least_ms
    assert {turn.link_bytes for turn in played[0].turns} == {2 * LAYER_BYTES}
    assert {turn.experts_on_gpu for each in played for turn in each.turns} == {8}


def test_ours_moves_whole_experts_and_no_more_than_were_routed_to_or_fetched_ahead(played: list[Contestant]) -> None:
    on_demand = next(each for each in played if each.who == "ours, on-demand")
    for turn in on_demand.turns:
        assert turn.link_bytes is not None
        assert turn.link_bytes * GENERATED % EXPERT_BYTES == 0
        assert 0 < turn.link_bytes <= 3 * 2 * EXPERT_BYTES


def test_the_table_compares_with_the_first(played: list[Contestant]) -> None:
    table = rows(played, played[0].turns[0].tokens)
    assert [row[0] for row in table] == [
        "accelerate", "accelerate to disk, no link", "ours, on-demand", "ours, fiddler", "ours, dali",
    ]
    assert table[0][3] == 1
    assert all(row[3] == pytest.approx(table[0][1] / row[1]) for row in table)


def test_a_stray_token_is_found() -> None:
    assert first_stray((4, 5, 6), (4, 5, 6)) is None
    assert first_stray((4, 9, 7), (4, 5, 6)) == 2


def test_prompts_are_the_same_however_many_are_asked_for() -> None:
    assert prompts(SIZE, 1, 6) == prompts(SIZE, 3, 6)[:1]
