"""Tables of rows: their bytes by kind of file."""

from __future__ import annotations

import pytest

from traces.models.catalogue import load_model
from traces.models.row_tables import row_table

ROWS = 320_001_536


@pytest.mark.parametrize(("model", "bits"), [
    ("qwen3.8-flash-next@q4_k_m", 4.5), ("qwen3.8-flash-next@q4_k_m:2", 4.5), ("qwen3.8-flash-next@fp8", 8),
])
def test_the_table_has_the_bits_of_its_kind_of_file(model: str, bits: float) -> None:
    table = row_table(load_model(model))
    assert table is not None
    assert (table.name, table.size_bytes) == ("n-gram table", ROWS * 160 * bits / 8)
    assert (table.rows_per_token, table.row_bytes) == (16, 160 * bits / 8)


def test_the_first_files_agree() -> None:
    table = row_table(load_model("qwen3.8-flash-next@q4_k_m"))
    assert table is not None
    assert table.size_bytes / 2**30 == pytest.approx(26.82, abs=0.005)  # Tanguille/cluster PR 4764


def test_other_models_have_none() -> None:
    assert row_table(load_model("qwen3-30b-a3b@q4_k_m")) is None
