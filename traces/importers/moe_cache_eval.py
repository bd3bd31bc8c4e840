"""Importer of moe-cache-eval's route traces: a folder with `manifest.json` and shards in safetensors.

`manifest["shards"]` names the files; in each, `topk_indices` [texts, layers, tokens, k], -1 after a text's end,
`topk_weights` of the same shape, which sum to 1, and `sequence_lengths` [texts]. `collection.kind` is
"autoregressive_decode" where each token was generated (shijiuzhang/moe-cache-eval, scripts/collect_routes.py and
collect_decode_routes.py, commit f7bacc2e). Its event traces (`events.safetensors`) hold unions over tokens instead, and
cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from traces.importers.requests import MOST_JSON, part
from traces.importers.token_routes import Text, plain_file, trace_of_texts
from traces.layout import TraceError
from traces.trace import Trace
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

MANIFEST = "manifest.json"
_TENSORS = ("topk_indices", "topk_weights", "sequence_lengths")


def import_moe_cache_eval(path: Path, model: str | None) -> Trace:
    """Read a folder, or its manifest. Raises TraceError."""
    path = plain_file(path / MANIFEST) if path.is_dir() else path
    manifest = _manifest(path)
    known = part(f"{path}: model", manifest.get("model"), "num_experts", int)
    collection = manifest.get("collection")
    generated = isinstance(collection, dict) and collection.get("kind") == "autoregressive_decode"
    found = (text for file in _shards(path, manifest) for text in _texts(file))
    texts = (Text(ids, 0 if generated else len(ids), weights) for ids, weights in found)
    return trace_of_texts(path, "moe-cache-eval", model, texts, known)


def _manifest(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_JSON:
        raise TraceError(f"{path}: expected a manifest of at most {MOST_JSON:,} bytes")
    manifest = parse_json(path.read_bytes(), str(path), TraceError)
    if not isinstance(manifest, dict) or "shards" not in manifest:
        raise TraceError(
            f"{path}: expected the manifest of a route trace, with shards; of an event trace, import the route trace "
            "that it was made from"
        )
    return manifest


def _shards(path: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    for number, shard in enumerate(part(str(path), manifest, "shards", list)):
        name = part(f"{path}: shards[{number}]", shard, "tensor_file", str)
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise TraceError(
                f"{path}: shards[{number}]: expected a .safetensors file of this folder, got {quoted(name)}"
            )
        yield plain_file(path.parent / name)


def _texts(path: Path) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """ids and weights [tokens, layers, k] of each text that has tokens."""
    try:
        with safe_open(path, framework="np") as file:
            ids, weights, lengths = (file.get_tensor(name) for name in _TENSORS)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: expected a shard with {', '.join(_TENSORS)}: {error}; copy it again") from None
    if (
        (ids.dtype.kind, weights.dtype.kind, lengths.dtype.kind) != ("i", "f", "i")
        or ids.ndim != 4
        or weights.shape != ids.shape
        or lengths.shape != ids.shape[:1]
        or not ((lengths >= 0) & (lengths <= ids.shape[2])).all()
    ):
        raise TraceError(
            f"{path}: expected ids and weights [texts, layers, tokens, k] and lengths [texts] up to "
            f"{ids.shape[2:3]}, got {list(ids.shape)}, {list(weights.shape)} and {list(lengths.shape)}; collect the "
            "routes again"
        )
    for text, length in enumerate(lengths.tolist()):
        if length:
            yield np.swapaxes(ids[text, :, :length], 0, 1), np.swapaxes(weights[text, :, :length], 0, 1)
