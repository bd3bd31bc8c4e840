"""Routers of models, how they are trained and how they score: what decides how persistent their routing is.

``balance``: whether experts were kept busy by a bias that is added to the scores only to choose (DeepSeek-V3, Sec.
2.1.2), by a loss, or in a way that is not published (``none``). ``scoring``: softmax lets experts compete, sigmoid and
sqrtsoftplus score each by itself. Models of the catalogue have an entry in ``models.yaml``; of others, files say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from traces.models.catalogue import MINI_MODELS, alike_in_counts, catalogue_entry, model_file
from traces.models.hf_config import ConfigKeys
from traces.models.names import parted
from traces.models.shape import ModelShape, ShapeError
from trilane.common.hints import Count, Name
from trilane.common.json_text import parse_json
from trilane.common.schema import from_dict

Balance: TypeAlias = Literal["bias", "loss", "none"]
Scoring: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_TRAINING = "traces/bundled/training"
_BIAS_KEYS = ("use_routing_bias", "moe_router_enable_expert_bias", "use_expert_bias")
_LOSS_KEYS = ("router_aux_loss_coef", "aux_loss_alpha")
_GATING: Mapping[int, Scoring] = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}  # llama.cpp's expert_gating_func


@dataclass(frozen=True)
class ModelRouter:
    """A model's router; ``groups``: of experts, of which a token's choices come from some."""

    balance: Balance
    scoring: Scoring
    source: Name
    groups: Count = 1


_MINI = ModelRouter("loss", "softmax", _TRAINING)


def router_of(shape: ModelShape) -> ModelRouter | None:
    """The router of a model of the catalogue, in whatever format and however cut, of one with its counts, or what a
    model's file says. None: not known. Raises ShapeError for an entry or a file that is faulty.
    """
    name = parted(shape.name).model.lower()
    if name in MINI_MODELS:
        return _MINI
    entry = catalogue_entry(name) or alike_in_counts(shape)
    if entry is not None:
        return read_router(entry.get("router"), name)
    try:
        path = model_file(parted(shape.name).model)
    except ShapeError:  # a trace names a file of the machine that it was recorded on
        return None
    return None if path is None else _file_router(path)


def read_router(entry: object, name: str) -> ModelRouter:
    """An entry of ``models.yaml``. Raises ShapeError."""
    router: ModelRouter = from_dict(ModelRouter, entry, f"models.yaml: {name}: router", ShapeError)
    return router


def _file_router(path: Path) -> ModelRouter | None:
    if path.suffix.lower() == ".gguf":
        return _gguf_router(path)
    return config_router(ConfigKeys.of(parse_json(path.read_bytes(), str(path), ShapeError), str(path)).values, path)


def config_router(values: Mapping[str, Any], path: Path) -> ModelRouter | None:
    """The router that a config.json names; None if it says nothing of balance."""
    noaux = values.get("topk_method") == "noaux_tc"
    biased = noaux or any(values.get(key) is True for key in _BIAS_KEYS)
    if not biased and not any(values.get(key) for key in _LOSS_KEYS):
        return None
    scoring = values.get("scoring_func", "sigmoid" if biased else "softmax")
    groups = values.get("n_group") or 1
    return read_router(
        {"balance": "bias" if biased else "loss", "scoring": scoring, "source": path.name, "groups": groups}, str(path)
    )


def _gguf_router(path: Path) -> ModelRouter | None:
    from traces.models.gguf_reader import GgufKeys, read_gguf_header  # it takes long to import

    header = read_gguf_header(path)
    gating = _GATING.get(GgufKeys(header.metadata, str(path)).count("expert_gating_func", default=0))
    biased = any(".exp_probs_b" in tensor.name for tensor in header.tensors)
    return None if gating is None else ModelRouter("bias" if biased else "loss", gating, path.name)
