"""Codings of blocks by their names, and of models by their formats."""

from __future__ import annotations

import pytest

from traces.models import codings
from traces.models.catalogue import load_model
from traces.models.codings import Codings, coding_of, codings_of
from traces.models.quantisation import WeightBlocks


@pytest.mark.parametrize(
    ("block", "coding"),
    [
        ("bf16", "plain"), ("f16", "plain"), ("fp8", "plain"), ("q8_0", "legacy"), ("q5_1", "legacy"),
        ("q4_k", "k_quant"), ("iq4_nl", "table"), ("iq4_xs", "table"), ("iq3_k", "table"), ("mxfp4", "table"),
        ("iq3_xxs", "codebook"), ("iq3_s", "codebook"), ("iq2_xs", "codebook"), ("iq1_m", "codebook"),
        ("group_128", "legacy"),
    ],
)  # fmt: skip
def test_the_name_of_a_block_says_how_it_is_unpacked(block: str, coding: str) -> None:
    assert coding_of(block) == coding


def test_a_model_without_a_format_is_plain_unless_it_is_published_in_four_bits() -> None:
    assert codings_of(load_model("qwen3-30b-a3b")) == Codings({"plain": 1.0}, {"plain": 1.0})
    assert codings_of(load_model("gpt-oss-20b")) == Codings({"table": 1.0}, {"plain": 1.0})


def test_two_of_three_matrices_of_an_expert_are_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = WeightBlocks.uniform("q4_k")._replace(gate_up={"iq2_xxs": 0.75, "q2_k": 0.25})
    monkeypatch.setattr(codings, "blocks_of", lambda shape: blocks)
    monkeypatch.setattr(codings, "_known_codings", codings._codings)  # which keeps what was found before
    found = codings_of(load_model("qwen3-30b-a3b@q2_k"))
    assert found.experts == pytest.approx({"codebook": 0.5, "k_quant": 0.5})
    assert found.others == {"k_quant": 1}
