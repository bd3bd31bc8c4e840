"""How routers are balanced and score: of every model of the catalogue, and of files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from traces.models.catalogue import alike_in_counts, load_model, model_names
from traces.models.routers import config_router, read_router, router_of
from traces.models.shape import ShapeError
from trilane.common.yaml_files import read_yaml

MODELS = Path("traces/models/models.yaml")
BY_A_BIAS = (
    "deepseek-v3", "deepseek-v4-flash", "deepseek-r1", "kimi-k2", "glm-4.5", "glm-4.5-air", "glm-5", "glm-5.3-flash",
    "glm-4.7-flash", "minimax-m2",
)


@pytest.mark.parametrize("name", model_names())
def test_the_router_of_every_model_is_known_with_its_source_however_it_is_cut(name: str) -> None:
    router = router_of(load_model(name))
    assert router is not None
    assert router.source
    assert router_of(load_model(f"{name}:1")) == router


@pytest.mark.parametrize("name", BY_A_BIAS)
def test_routers_since_deepseek_v3_are_balanced_by_a_bias_and_score_experts_by_themselves(name: str) -> None:
    router = router_of(load_model(name))
    assert router is not None
    assert router.balance == "bias"
    assert router.scoring in ("sigmoid", "sqrtsoftplus")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "olmoe-1b-7b", "deepseek-v2-lite"])
def test_others_compete_in_a_softmax_without_a_bias(name: str) -> None:
    router = router_of(load_model(name))
    assert router is not None
    assert router.balance != "bias"
    assert router.scoring == "softmax"


def test_groups_are_those_of_the_configuration() -> None:
    groups = {name: router.groups for name in ("deepseek-v3", "kimi-k2") if (router := router_of(load_model(name)))}
    assert groups == {"deepseek-v3": 8, "kimi-k2": 1}


@pytest.mark.parametrize("name", sorted(read_yaml(MODELS)))
def test_what_transformers_computes_agrees_with_the_entry(name: str) -> None:
    """Where the source names transformers' code: the bias is there if, and only if, it balances."""
    models = pytest.importorskip("transformers").models
    router = read_router(read_yaml(MODELS)[name]["router"], name)
    named = re.search(r"modeling_(\w+)", router.source)
    if named is None:
        pytest.skip("another source")
    code = (Path(models.__path__[0]) / named[1] / f"modeling_{named[1]}.py").read_text(encoding="utf-8")
    assert bool(re.search(r"e_score_correction_bias|expert_bias", code)) == (router.balance == "bias")
    assert router.scoring in code or router.scoring == "sqrtsoftplus"


@pytest.mark.parametrize(("keys", "balance", "scoring"), [
    ({"topk_method": "noaux_tc", "scoring_func": "sigmoid"}, "bias", "sigmoid"),
    ({"use_routing_bias": True}, "bias", "sigmoid"),
    ({"router_aux_loss_coef": 0.001}, "loss", "softmax"),
])
def test_a_configuration_says_it(keys: dict[str, Any], balance: str, scoring: str) -> None:
    router = config_router(keys, Path("config.json"))
    assert router is not None
    assert (router.balance, router.scoring) == (balance, scoring)


def test_a_configuration_that_says_nothing_of_balance_leaves_it_open() -> None:
    assert config_router({"router_aux_loss_coef": 0.0}, Path("config.json")) is None


def test_the_router_of_a_file_is_that_of_the_model_with_its_counts_or_what_it_says(tmp_path: Path) -> None:
    entry = read_yaml(MODELS)["glm-5.3-flash"]["config"]
    same, other = tmp_path / "a" / "config.json", tmp_path / "b" / "config.json"
    for path, config in ((same, entry), (other, {**entry, "n_routed_experts": 96, "topk_method": "noaux_tc"})):
        path.parent.mkdir()
        path.write_text(json.dumps(config), encoding="utf-8")
    assert router_of(load_model(str(same))) == router_of(load_model("glm-5.3-flash"))
    assert alike_in_counts(load_model(str(other))) is None
    router = router_of(load_model(str(other)))
    assert router is not None
    assert (router.balance, router.source) == ("bias", "config.json")


def test_an_entry_with_another_balance_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"router: balance: expected 'bias', 'loss' or 'none'"):
        read_router({"balance": "luck", "scoring": "softmax", "source": "nowhere"}, "x")
