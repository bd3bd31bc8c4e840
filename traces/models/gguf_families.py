"""Families of models whose GGUF files are read, and what the files leave unsaid: ``gguf_families.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from traces.models.gguf_keys import GgufKeys
from traces.models.shape import ShapeError
from trilane.common.hints import Count
from trilane.common.quoting import quoted
from trilane.common.yaml_files import read_table

_FILE = Path(__file__).with_name("gguf_families.yaml")


class GgufFamily(NamedTuple):
    """Attention of a family's layers, where its files do not say it; the fields are explained in the YAML file."""

    window_every: Count = 1
    full_first: bool = False
    chunk_tokens: Count | None = None


@cache
def gguf_families() -> Mapping[str, GgufFamily]:
    """By the name of the architecture."""
    known: Mapping[str, GgufFamily] = read_table(Mapping[str, GgufFamily], _FILE, ShapeError)
    return known


def family_of(keys: GgufKeys) -> GgufFamily:
    """The family of a file. Raises ShapeError for one that is not known, naming it."""
    if keys.architecture not in gguf_families():
        raise ShapeError(
            f"{keys.where}: expected a family with experts that is read, one of those in {_FILE.name}, this is of the "
            f"architecture {quoted(keys.architecture)}; give its config.json instead"
        )
    return gguf_families()[keys.architecture]
