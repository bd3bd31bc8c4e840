"""Valid logs of other programs, small ones, for the readers that import them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from tests.traces.importers.routes import routes

_IDS = routes(6)  # the last three tokens are generated
_LISTS: dict[str, Any] = {
    "choices": [{"routed_experts": _IDS[3:].tolist()}], "prompt_routed_experts": _IDS[:3].tolist(),
}


def _npy(array: Any) -> bytes:
    np.save(stream := BytesIO(), array)
    return stream.getvalue()


def _npz(**arrays: Any) -> bytes:
    np.savez(stream := BytesIO(), **arrays)
    return stream.getvalue()


def _answers() -> list[bytes]:
    """Of vLLM, in both forms, and of SGLang."""
    coded = {"choices": [{"routed_experts": b64encode(_npy(_IDS)).decode()}], "usage": {"prompt_tokens": 3}}
    routed = b64encode(_IDS.astype("<i4").tobytes()).decode()
    meta = {"prompt_tokens": 3, "completion_tokens": 4, "routed_experts": routed}
    return [json.dumps(each).encode() for each in (_LISTS, [coded, _LISTS], {"meta_info": meta})]


def _llama_cpp() -> list[bytes]:
    narrow = [
        f"{layer},{expert}" for ids in (_IDS[:3], *_IDS[3:, None]) for layer in (0, 1) for expert in ids[:, layer].flat
    ]
    wide = [f"{at - 3},{layer},{a},{b}" for part in (range(3), [3], [4], [5]) for layer in (0, 1)
            for at in part for a, b in [_IDS[at, layer]]]
    return ["\n".join(lines).encode() for lines in (narrow, wide)]


def _megatron() -> bytes:
    lines = [
        {"step": max(0, at - 2), "block": "decoder", "layer": layer, "num_tokens": len(ids), "topk": 2,
         "top_indices": ids[:, layer].tolist()}
        for at, ids in ((0, _IDS[:3]), *((at, _IDS[at : at + 1]) for at in (3, 4, 5))) for layer in (0, 1)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def _arrays() -> list[bytes]:
    """Of vLLM, and converted ones of SGLang's recorder."""
    places = np.tile(np.arange(16), (2, 1))
    modes = [1, 1, 1, 2, 2, 2]
    return [
        _npz(prompt_0=_IDS[:3], generated_0=_IDS[3:].astype(np.uint8)),
        _npz(topk_ids=_IDS, positions=np.arange(6), modes=modes, physical_to_logical=places),
    ]


def _moe_beyond() -> bytes:
    rows = [f'{layer},0,"a, ""b""","{ids[layer].tolist()}"' for layer in (0, 1) for ids in _IDS]
    return "\n".join(["Layer ID,Batch Number,Token,Activated Expert IDs", *rows]).encode()


def _layer() -> bytes:
    ids = pa.array(_IDS[:, 0].tolist(), pa.list_(pa.int16()))
    scores = pa.array([[np.float16(0.5), np.float16(0.25)]] * len(_IDS), pa.list_(pa.float16()))
    pq.write_table(pa.table({"indices": ids, "scores": scores}), stream := BytesIO())
    return stream.getvalue()


def _shard() -> bytes:
    ids = np.ascontiguousarray(np.swapaxes(_IDS, 0, 1)[None], np.int16)
    weights, lengths = np.full(ids.shape, 0.5, np.float16), np.array([6], np.int32)
    tensors = {"topk_indices": ids, "topk_weights": weights, "sequence_lengths": lengths}
    return save(tensors, metadata={"about": "{}"})


def log_samples() -> Mapping[str, Any]:
    """Bytes, or several of a kind, by the names of ``Samples``."""
    manifest = {"model": {"num_experts": 16}, "collection": {"kind": "autoregressive_decode"},
                "shards": [{"tensor_file": "r.safetensors"}]}
    return {
        "answers": _answers(), "arrays": _arrays(), "llama_cpp": _llama_cpp(), "megatron": _megatron(),
        "moe_beyond": _moe_beyond(), "layer": _layer(), "shard": _shard(), "manifest": json.dumps(manifest).encode(),
    }
