"""Summaries of measured quality, their tables, and measuring with a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trilane.study.journal import journal_of
from trilane.study.player import Progress
from trilane.study.quality.fronts import FRONTS, changing, with_fronts
from trilane.study.quality.measure import STUDY, PolicyAt, check, journal_path
from trilane.study.quality.summary import SHARES, Quality, QualityError, front, resampled, summaries
from trilane.study.quality.table import COLUMNS, read_table, write_table


def row(text: int, kl: float, policy: str = "smoe", tpot_ms: float = 4.0) -> dict[str, Any]:
    """Of five tokens, four of which are scored against the text."""
    return {
        "model": "mini", "policy": policy, "parameters": {}, "cached_share": 0.5, "text": text, "tpot_ms": tpot_ms,
        **dict.fromkeys(SHARES, 0.0), "dropped_weight_share": 0.1, "stale_weight_share": 0.2,
        "kl": [kl] * 5, "agrees": [1, 1, 1, 1, 0], "nats": [2.5] * 4, "exact_nats": [2.0] * 4,
        "drift_by_layer": [0.0, 0.5],
    }


def test_means_are_over_texts_and_perplexity_is_a_ratio() -> None:
    [found] = summaries([row(0, 0.1), row(1, 0.3)])
    assert found.kl.mean == pytest.approx(0.2)
    assert found.agreement.mean == pytest.approx(0.8)
    assert found.perplexity_change.mean == pytest.approx(np.exp(0.5) - 1)
    assert found.exact_perplexity == pytest.approx(np.exp(2))
    assert found.moved_share == pytest.approx(0.3)


def test_an_interval_is_over_texts_and_not_over_tokens() -> None:
    [alike] = summaries([row(n, 0.2) for n in range(8)])
    [apart] = summaries([row(n, 0.4 * (n % 2)) for n in range(8)])
    assert alike.kl == pytest.approx((0.2, 0.2, 0.2))
    assert apart.kl.low < 0.15 < 0.25 < apart.kl.high


def test_an_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).exponential(1.0, (200, 40))
    covered = np.mean([low <= 1.0 <= high for _, low, high in map(resampled, draws)])
    assert 0.88 <= covered <= 0.99


def test_the_front_has_what_nothing_beats_in_both() -> None:
    found = summaries([
        *(row(n, 0.3, "fast", 1.0) for n in range(2)), *(row(n, 0.4, "worse", 2.0) for n in range(2)),
        *(row(n, 0.1, "fair", 3.0) for n in range(2)), *(row(n, 0.0, "exact", 4.0) for n in range(2)),
    ])
    assert [quality.choice for quality in front(found)] == ["fast", "fair", "exact"]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = summaries([row(0, 0.125), row(1, 0.375)])
    write_table(found, tmp_path / "table.csv")
    [again] = read_table(tmp_path / "table.csv")
    assert again.kl.mean == found[0].kl.mean
    assert again.shares == pytest.approx(found[0].shares)
    write_table([again], tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "table.csv").read_bytes()


@pytest.mark.parametrize(
    ("text", "told"),
    [("a,b\n1,2\n", "expected the table of trilane quality"), (",".join(COLUMNS) + "\nm,c,x\n", "number")],
)
def test_another_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(QualityError, match=told):
        read_table(path)


@pytest.mark.parametrize("policy", ["oracle", "pre-gated", "seqmoe"])
def test_policies_that_see_the_future_are_refused(policy: str) -> None:
    with pytest.raises(QualityError, match="not known while a model"):
        check(PolicyAt(policy, {}))


def test_fronts_are_of_policies_that_change_the_routing() -> None:
    assert {*FRONTS} - {"adapmoe"} <= {*changing()}
    assert with_fronts(["daop", "router-pf"]) == ["daop", "daop{degrade: false}", "router-pf"]
    for choice in with_fronts([*FRONTS]):
        from trilane.study.policy_choice import policy_in

        check(PolicyAt(*policy_in(choice)))


def test_every_text_is_kept_and_not_measured_again(tmp_path: Path, mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trilane.study.quality import measure as measuring

    output, seen = tmp_path / "out.csv", list[Progress]()
    first = measuring.measure(mini, ["cache-prior"], output, seen.append)
    assert [(p.total, p.done, p.kept) for p in seen] == [(2, 1, 0), (2, 2, 0)]
    with journal_of(journal_path(output), STUDY) as journal:
        assert len(journal.entries) == 2
    monkeypatch.setattr(measuring, "_row", lambda *_: pytest.fail("measured again"))
    assert measuring.measure(mini, ["cache-prior"], output) == first


def test_an_interrupted_study_goes_on_where_it_stopped(
    tmp_path: Path, mini: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trilane.study.quality import measure as measuring

    row_of, output = measuring._row, tmp_path / "out.csv"

    def stops(*given: Any) -> Any:
        if given[3] == 1:
            raise KeyboardInterrupt
        return row_of(*given)

    monkeypatch.setattr(measuring, "_row", stops)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(mini, ["router-pf"], output)
    seen = list[Progress]()
    monkeypatch.setattr(measuring, "_row", row_of)
    rows = measuring.measure(mini, ["router-pf"], output, seen.append)
    assert [(p.done, p.kept) for p in seen] == [(2, 1)]
    assert rows == measuring.measure(mini, ["router-pf"])


@pytest.fixture(scope="module")
def mini() -> Any:
    """Mini-moe on two short texts."""
    pytest.importorskip("transformers")
    from realrun.quality.models import model_on_cpu
    from realrun.quality.played_model import GivenText
    from sim.runs.scenario import Scenario
    from tests.kit.generating import MINI
    from trilane.study.quality.measure import QualitySetting

    texts = (GivenText((5, 17, 33, 60, 9, 41, 77, 12), 4), GivenText((3, 8, 21, 90, 55, 14, 2, 30), 4))
    return QualitySetting(model_on_cpu(MINI), texts, Scenario(cached_share=0.5), "qwen3-30b-a3b")


def test_quality_is_a_named_tuple_of_plain_numbers() -> None:
    [found] = summaries([row(0, 0.1), row(1, 0.3)])
    assert isinstance(found, Quality)
    assert found.to_dict()["kl_low"] == found.kl.low
