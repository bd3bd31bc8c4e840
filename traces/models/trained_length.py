"""The number of tokens that a model was trained for: ``trained_lengths.yaml``, or what its file says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from traces.models.catalogue import model_file, original
from traces.models.config_keys import ConfigKeys
from traces.models.names import parted
from traces.models.shape import ShapeError
from trilane.common.hints import Count, Name
from trilane.common.json_text import parse_json
from trilane.common.yaml_files import read_bundled

_FILE = Path(__file__).with_name("trained_lengths.yaml")


class TrainedLength(NamedTuple):
    """Tokens of prompt and answer together."""

    tokens: Count
    source: Name


def trained_tokens(name: str) -> int | None:
    """Of a model that ``load_model`` knows, prompt and answer together; None: not known. Raises ShapeError."""
    model = parted(name).model
    for known in (model, original(model)):
        if known in trained_lengths():
            return trained_lengths()[known].tokens
    path = model_file(model)
    if path is None:
        return None
    if path.suffix.lower() == ".gguf":
        from traces.models.gguf_header import GgufKeys, read_gguf_header  # it takes long to import

        return GgufKeys(read_gguf_header(path).metadata, str(path)).count("context_length", default=0) or None
    keys = ConfigKeys.of(parse_json(path.read_bytes(), str(path), ShapeError), str(path))
    return keys.count("max_position_embeddings", default=0) or None


@cache
def trained_lengths() -> Mapping[str, TrainedLength]:
    known: Mapping[str, TrainedLength] = read_bundled(Mapping[str, TrainedLength], _FILE, ShapeError)
    return known
