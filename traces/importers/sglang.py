"""Importer of SGLang's routed experts: answers of `/generate`, saved as JSON.

With `--enable-return-routed-experts` and `"return_routed_experts": true` in the request, `meta_info` of an answer has
`routed_experts`: the base64 of int32 ids [prompt_tokens + completion_tokens - 1, layers, top_k] without their sizes,
the last token having never been routed (sgl-project/sglang, python/sglang/srt/state_capturer/routed_experts.py, commit
024911f2; the number of rows: its test of expert id partitions, 2026). `layers` counts dense ones too, with 0 or -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from traces.importers.requests import answers, decoded, part
from traces.importers.token_routes import Text, shape_for, trace_of_texts
from traces.layout import TraceError
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from traces.trace import Trace


def import_sglang(path: Path, model: str | None) -> Trace:
    """Read saved answers, one sequence each. Raises TraceError."""
    shape = load_model(model) if model else shape_for(path, model, 0, 0)
    return trace_of_texts(path, "sglang", model, _texts(path, shape))


def _texts(path: Path, shape: ModelShape) -> Iterator[Text]:
    for where, answer in answers(path):
        meta = part(where, answer, "meta_info", dict)
        prompt, generated = (part(where, meta, f"{name}_tokens", int) for name in ("prompt", "completion"))
        ids = decoded(where, part(where, meta, "routed_experts", str))
        tokens = prompt + generated - 1
        layers, rest = divmod(len(ids), max(tokens, 1) * 4 * shape.top_k)
        if prompt < 1 or generated < 0 or rest or layers not in (shape.moe_layers, shape.layers):
            raise TraceError(
                f"{where}: expected the int32 ids of {tokens:,} tokens in {shape.moe_layers} or {shape.layers} layers, "
                f"{shape.top_k} each, as {shape.name} has, got {len(ids):,} bytes; name the model that was recorded, "
                "and record without routed_experts_start_len"
            )
        yield Text(np.frombuffer(ids, "<i4").reshape(tokens, layers, shape.top_k), min(prompt, tokens))
