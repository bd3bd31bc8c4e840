"""Errors of predicted speeds, on rows of which every error is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import load_hardware
from tests.kit.results import row
from traces.models.catalogue import load_model
from trilane.engines.accuracy.errors import (
    FEWEST_MACHINES,
    REGIMES,
    Errors,
    ErrorToExpect,
    Regime,
    RegimeAccuracy,
    Speeds,
    architecture_of_row,
    error_of,
    error_table,
    error_to_expect,
    kept_errors,
    quantile,
    read_predictions,
    regime_errors,
    regime_of_row,
)
from trilane.engines.accuracy.measured_rows import RowsError, read_rows

OTHER = "rtx-4090+ddr5-5600+ryzen-9-7950x"
ROWS = [
    row("1", 100.0, prompt_tokens_per_s=1000.0, prompt_tokens=512), row("2", 50.0, cpu_layers=10), row("3", 20.0),
    row("4", 10.0, machine=OTHER, quality="B", weights="q8_0"), row("5", 10.0, quality="C"),
]
PREDICTED = {"1": Speeds(110.0, 1500.0), "2": Speeds(45.0), "3": Speeds(20.2), "4": Speeds(14.0), "5": Speeds(30.0)}


def errors(quantity: str, by: str, group: str, predicted: dict[str, Speeds] = PREDICTED) -> Errors:
    return next(line.errors for line in error_table(ROWS, predicted) if line[:3] == (quantity, by, group))


def test_errors_are_predicted_over_measured_less_one() -> None:
    assert error_of(ROWS[0], PREDICTED, "decode") == pytest.approx(0.1)
    assert error_of(ROWS[0], PREDICTED, "prompts") == pytest.approx(0.5)
    assert error_of(ROWS[1], PREDICTED, "decode") == pytest.approx(-0.1)
    assert error_of(ROWS[1], PREDICTED, "prompts") is None


def test_statistics_of_all_rows() -> None:
    """+10, -10, +1 % on one machine, +40 % on another; a row of quality C is not among them."""
    found = errors("decode", "all", "all")
    assert (found.rows, found.machines) == (4, 2)
    assert found.median == pytest.approx(0.10)  # of 1, 10, 10, 40
    assert found.bias == pytest.approx(0.055)  # of -10, 1, 10, 40
    assert found.p90 == pytest.approx(0.40)
    assert found.by_machine == pytest.approx(0.25)  # of 10 and 40
    assert found.bias_by_machine == pytest.approx(0.205)  # of 1 and 40
    assert found.band == pytest.approx(0.4)  # the machine of one row has half of the votes
    assert found.inside is None


def test_rows_inside_their_band() -> None:
    inside = {"1": True, "2": True, "3": False, "4": True}
    lines = {line[:3]: line.errors.inside for line in error_table(ROWS, PREDICTED, inside)}
    assert lines["decode", "all", "all"] == 0.75
    assert lines["decode", "regime", "mixed"] == 1.0
    assert lines["prompts", "all", "all"] is None


def test_a_quantile_counts_weights() -> None:
    assert quantile([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)], 0.5) == 2.0
    assert quantile([(3.0, 1.0), (1.0, 8.0), (2.0, 1.0)], 0.8) == 1.0
    assert quantile([(3.0, 1.0), (1.0, 8.0), (2.0, 1.0)], 0.81) == 2.0


def test_groups() -> None:
    assert errors("decode", "regime", "mixed").bias == pytest.approx(-0.1)
    assert errors("decode", "format", "q8_0").median == pytest.approx(0.4)
    assert errors("decode", "engine", "llama.cpp") == errors("decode", "all", "all")
    assert errors("decode", "architecture", "qwen3moe") == errors("decode", "all", "all")
    assert errors("prompts", "all", "all").rows == 1


def test_quality_c_is_shown_apart() -> None:
    assert errors("decode", "quality", "C").median == pytest.approx(2.0)


def test_a_broken_prediction_is_seen() -> None:
    broken = {name: Speeds(None if speeds.decode is None else 2 * speeds.decode) for name, speeds in PREDICTED.items()}
    assert errors("decode", "all", "all", broken).bias == pytest.approx(1.11)


def test_rows_without_a_prediction_do_not_count() -> None:
    assert errors("decode", "all", "all", {"1": Speeds(110.0)}).rows == 1
    assert error_table(ROWS, {}) == []


@pytest.mark.parametrize(
    ("model", "architecture"),
    [("qwen3-30b-a3b", "qwen3moe"), ("qwen3-coder-30b-a3b", "qwen3moe"), ("deepseek-v2-lite", "deepseek2"),
     ("qwen3-coder-next", "qwen3next"), ("glm-4.7-flash", "glm4moelite"), ("qwen3.6-35b-a3b", "qwen35moe")],
)
def test_architectures(model: str, architecture: str) -> None:
    assert architecture_of_row(row(model=model)) == architecture


@pytest.mark.parametrize(
    "text", ["id,decode_tokens_per_s\n1,2\n", "id,decode_tokens_per_s,prompt_tokens_per_s\n1,x,\n"]
)
def test_predictions_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(RowsError, match="expected a CSV file of predicted speeds"):
        read_predictions(tmp_path / "p.csv")


# --- regimes ----------------------------------------------------------------------------------------------------------


UNKNOWN = replace(load_fitted("llama.cpp"), program="mine")


@pytest.mark.parametrize(("machine", "cpu_layers", "regime"), [
    ("rtx-4080+ddr5-5600+ryzen-9-7950x", 0, "all GPU"),
    ("rtx-4080+ddr5-5600+ryzen-9-7950x", 14, "mixed"),
    ("rtx-4080+ddr5-5600+ryzen-9-7950x", 48, "experts on CPU"),
    ("rtx-4080+ddr4-3200-ecc+threadripper-pro-5975wx", 48, "server"),
    ("rtx-3090+ddr5-6000-ecc+epyc-9355", 10, "server"),
    ("rtx-3090+ddr5-6000-ecc+epyc-9355", 0, "all GPU"),
    ("none+ddr5-6000-ecc+epyc-9355", 48, "CPU only"),
    ("none+ddr4-2666+core-i7-8700", 48, "CPU only"),
    ("none+lpddr5x-7500+ryzen-ai-9-hx-370", 48, "laptop"),
    ("rtx-4060-laptop+ddr5-5600+core-i9-13900hk", 20, "laptop"),
    ("rtx-4070-laptop+ddr5-5600", 20, "laptop"),
    ("rtx-3060+ddr4-2666+core-i9-9900t", 20, "mixed"),
    ("gb10", 0, "unified"),
    ("strix-halo", 0, "unified"),
])
def test_regimes_of_machines(machine: str, cpu_layers: int, regime: str) -> None:
    assert regime_of_row(row(machine=machine, cpu_layers=cpu_layers)) == regime


def test_vulkan_is_a_regime_where_there_is_a_card() -> None:
    assert regime_of_row(row(engine="llama.cpp-vulkan", cpu_layers=48)) == "Vulkan"
    assert regime_of_row(row(engine="llama.cpp-vulkan", machine="none+ddr4-3200", cpu_layers=48)) == "CPU only"


def test_some_experts_of_every_layer_on_the_gpu_are_mixed() -> None:
    assert regime_of_row(row(cpu_layers=48, gpu_experts=32)) == "mixed"


def test_kept_errors_are_those_of_the_held_out_predictions() -> None:
    rows = [each for each in read_rows() if not each.left_out]
    assert kept_errors() == tuple(regime_errors(rows, read_predictions())), (
        "renew them with: python -m tests.trilane.engines.accuracy.renew"
    )


def test_every_machine_has_one_vote() -> None:
    """Three rows of one machine are 10 % too fast, one row of each of two others 50 % too slow and 60 % too fast."""
    machines = ["rtx-4080+ddr5-5600"] * 3 + ["rtx-3060+ddr4-3200", "rtx-3090+ddr4-3200"]
    rows = [row(str(n), machine=name, cpu_layers=14) for n, name in enumerate(machines)]
    predicted = {str(n): Speeds(speed) for n, speed in enumerate((110.0, 110.0, 110.0, 50.0, 160.0))}
    whole = RegimeAccuracy("mixed", "", "", "", median=0.5, bias=0.1, band=1.0, machines=3, rows=5)
    one = RegimeAccuracy("", "qwen3moe", "", "RTX 3060 12GB", median=0.5, bias=-0.5, band=1.0, machines=1, rows=1)
    assert list(regime_errors(rows, predicted)) == [
        whole, whole._replace(engine="llama.cpp"), whole._replace(architecture="qwen3moe"),
        whole._replace(regime=""), whole._replace(regime="", architecture="qwen3moe"), one,
        one._replace(gpu="RTX 3090", median=0.6, bias=0.6, band=0.6),
        one._replace(gpu="RTX 4080", median=0.1, bias=0.1, band=0.1, rows=3),
    ]


LLAMA = load_fitted("llama.cpp")


def expected(
    model: str = "qwen3-30b-a3b", gpu: str = "rtx-3060", regime: Regime = "mixed", engine: FittedEngine = LLAMA
) -> ErrorToExpect:
    return error_to_expect(load_model(model), load_hardware(f"{gpu}+ddr5-5600"), regime, engine)


def test_an_error_is_that_of_the_engine_where_enough_machines_ran_it() -> None:
    for each in kept_errors():
        if each.engine and each.regime:
            like = expected(regime=each.regime, engine=load_fitted(each.engine)).like_machines
            assert like == each if each.machines >= FEWEST_MACHINES else like is not None and like.engine == ""
    assert expected(engine=load_fitted("llama.cpp-2025")) == expected()
    like = expected(engine=UNKNOWN).like_machines
    assert like is not None
    assert like[:4] == ("mixed", "", "", "")


def test_the_band_of_few_machines_is_not_narrower_than_that_of_all() -> None:
    for regime in REGIMES:
        error = expected(regime=regime, engine=UNKNOWN, model="glm-4.5-air")
        assert error.like_machines is not None
        assert error.few == (error.like_machines.machines < FEWEST_MACHINES)
        both = max(error.like_machines.band, error.all_machines.band)
        assert error.band == (both if error.few else error.like_machines.band)


def test_an_architecture_has_its_own_error_on_such_machines_or_else_on_all() -> None:
    for model, architecture in (("qwen3-coder-30b-a3b@q6_k", "qwen3moe"), ("qwen3.5-35b-a3b", "qwen35moe")):
        own = expected(model).like_models
        assert own is not None
        assert own[:4] == ("mixed", architecture, "", "")
    for model, architecture in (("hunyuan-a13b@q6_k", "hunyuan-moe"), ("deepseek-v2-lite", "deepseek2")):
        elsewhere = expected(model).like_models  # never measured, or one speed, on such machines
        assert elsewhere is not None
        assert elsewhere[:4] == ("", architecture, "", "")
    assert expected("phi-3.5-moe").like_models is None


def test_the_band_is_no_narrower_than_on_the_card_itself() -> None:
    """Qwen3.5 was predicted far too fast on this one card, of which there are four speeds."""
    error = expected("qwen3.5-35b-a3b", "rtx-5060-ti-16gb")
    assert error.like_card is not None
    assert error.like_card[:4] == ("", "qwen35moe", "", "RTX 5060 Ti 16GB")
    assert error.band >= error.like_card.band
    assert error._replace(like_card=error.like_card._replace(band=9.0)).band == 9.0
    assert expected("qwen3.5-35b-a3b", "rtx-4080").like_card is None


def kept(regime: str, architecture: str, gpu: str, machines: int, rows: int) -> RegimeAccuracy:
    return RegimeAccuracy(regime, architecture, "", gpu, 0.5, 0.5, 0.5, machines, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(("machines", "rows", "alone"), [(1, 1, True), (2, 2, True), (1, 9, True), (2, 3, False)])
def test_fewer_than_three_speeds_or_one_machine_stand_behind_those_of_all_machines(
    machines: int, rows: int, alone: bool
) -> None:
    everywhere = kept("", "deepseek2", "", 4, 30)
    known = [kept("", "", "", 60, 400), kept("mixed", "", "", 9, 42), kept("mixed", "deepseek2", "", machines, rows),
             everywhere, kept("", "deepseek2", "RTX 3060 12GB", 1, 2)]
    shape, hardware = load_model("deepseek-v2-lite@q4_k_m"), load_hardware("rtx-3060+ddr4-3200")
    error = error_to_expect(shape, hardware, "mixed", load_fitted("llama.cpp"), known)
    assert error.like_models == (everywhere if alone else known[2])
    assert error.like_card is None  # of two speeds
