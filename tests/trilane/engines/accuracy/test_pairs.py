"""A/B pairs, on rows of which every gain is known."""

from __future__ import annotations

import pytest

from tests.kit.results import row
from trilane.engines.accuracy.errors import Speeds
from trilane.engines.accuracy.pairs import SettingScore, pairs_of, setting_scores

ROWS = [
    row("1", 100.0, cpu_layers=0), row("2", 50.0, cpu_layers=10), row("3", 101.0, cpu_layers=0, threads=8),
    row("4", 80.0, cpu_layers=0, kv_bits=8.5), row("5", 70.0, cpu_layers=10, kv_bits=8.5, depth_tokens=9),
    row("6", 30.0, machine="gb10", cpu_layers=5),
]
PREDICTED = {"1": Speeds(90.0), "2": Speeds(60.0), "3": Speeds(95.0), "4": Speeds(99.0), "5": Speeds(1.0)}


def test_rows_that_differ_in_one_setting_and_in_speed_are_pairs() -> None:
    """Not 1 and 3, of one speed; not 3 and 2, which differ in two settings; not those of another machine."""
    found = {(pair.slower.id, pair.faster.id): pair for pair in pairs_of(ROWS, PREDICTED)}
    assert found.keys() == {("2", "1"), ("4", "1")}
    layers, kv = found.values()
    assert (layers.setting, layers.quantity, layers.right) == ("cpu_layers", "decode", True)
    assert layers.measured_gain == pytest.approx(1.0)
    assert layers.predicted_gain == pytest.approx(0.5)
    assert layers.followed == pytest.approx(0.75)
    assert (kv.setting, kv.right) == ("kv_bits", False)


def test_scores_by_setting() -> None:
    assert setting_scores(ROWS, PREDICTED) == [
        SettingScore("decode", "cpu_layers", 1, 1, 1, pytest.approx(0.75)),
        SettingScore("decode", "kv_bits", 1, 1, 0, pytest.approx((90 / 99) / (100 / 80))),
    ]
    assert setting_scores(ROWS, {}) == []


def test_prompts_of_other_lengths_and_the_pieces_of_decoding_are_no_pairs() -> None:
    prompts = [
        row(str(n), 100.0 + n, prompt_tokens=tokens, piece_tokens=piece, prompt_tokens_per_s=speed)
        for n, (tokens, piece, speed) in enumerate([(512, 512, 500.0), (4096, 512, 700.0), (4096, 2048, 900.0)])
    ]
    predicted = {each.id: Speeds(1.0 + int(each.id), 100.0 + int(each.id)) for each in prompts}
    assert [(pair.quantity, pair.setting, pair.faster.id) for pair in pairs_of(prompts, predicted)] == [
        ("prompts", "piece_tokens", "2")
    ]


def test_another_source_is_another_machine() -> None:
    assert not list(pairs_of([ROWS[0], row("2", 50.0, cpu_layers=10, source="elsewhere")], PREDICTED))
