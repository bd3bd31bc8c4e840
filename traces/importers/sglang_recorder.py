"""Importer of SGLang's expert distribution recorder, converted from its .pt dumps, which are pickles, to .npz.

`--expert-distribution-recorder-mode per_token` makes dumps that hold, for each forward pass, `topk_ids_of_layer`
[layers, tokens, 8], padded with -1, `positions` and `forward_mode` (1 extend, 2 decode), and the experts' places
`last_physical_to_logical_map` [layers, places] (sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py,
2025). Which request a token belongs to is not among them, so that one must run at a time. Other modes count tokens per
expert, from which no trace can be made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.npy import read_npz
from traces.importers.token_routes import TokenRoutes, moe_layers_of, shape_for, trace_of
from traces.layout import DECODE, PREFILL, TraceError
from traces.trace import Trace
from trilane.common.quoting import quoted

CONVERT = (
    "python -c \"import numpy as np, torch, sys; d = torch.load(sys.argv[1], weights_only=True); r = d['records']; "
    "np.savez(sys.argv[2], topk_ids=np.concatenate([x['topk_ids_of_layer'].numpy().swapaxes(0, 1) for x in r]), "
    "positions=np.concatenate([x['positions'] for x in r]), "
    "modes=np.repeat([x['forward_mode'] for x in r], [len(x['positions']) for x in r]), "
    "physical_to_logical=d['last_physical_to_logical_map'].cpu().numpy())\" DUMP.pt ROUTING.npz"
)
_NAMES = {"topk_ids": 3, "positions": 1, "modes": 1, "physical_to_logical": 2}  # axes of each
_MODES = {1: PREFILL, 2: DECODE}


def import_sglang_recorder(path: Path, model: str | None) -> Trace:
    """Read a converted dump of requests that ran one at a time. Raises TraceError, which for a dump says how to convert
    it.
    """
    if path.suffix.lower() == ".pt":
        raise TraceError(f"{path}: a dump of PyTorch is a pickle, which Trilane does not run; convert it: {CONVERT}")
    arrays = read_npz(path)
    if {name: array.ndim for name, array in arrays.items()} != _NAMES or not len(arrays["topk_ids"]):
        raise TraceError(
            f"{path}: expected arrays with axes {_NAMES}, found {quoted(sorted(arrays))}; convert it again"
        )
    tokens = len(arrays["topk_ids"])
    if not (tokens == len(arrays["positions"]) == len(arrays["modes"])):
        raise TraceError(f"{path}: expected a position and a mode for each of {tokens:,} tokens; convert it again")
    ids = moe_layers_of(_logical(path, arrays), model)
    ids = ids[:, :, ~(ids == -1).all(axis=(0, 1))]
    phase = _phases(path, arrays["modes"])
    routing = TokenRoutes(ids, _sequences(path, arrays["positions"], phase), phase)
    return trace_of(path, "sglang-recorder", shape_for(path, model, *ids.shape[1:]), routing)


def _logical(path: Path, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """The experts in the places that were recorded; -1 stays."""
    ids, experts = arrays["topk_ids"], arrays["physical_to_logical"]
    layers, places = experts.shape
    if ids.shape[1] != layers or not places or (ids < -1).any() or (ids >= places).any():
        raise TraceError(
            f"{path}: expected places 0..{places - 1}, or -1, in {layers} layers, as physical_to_logical has, found "
            f"{ids.min(initial=0)} to {ids.max(initial=0)} in {ids.shape[1]}; convert it again"
        )
    return np.where(ids < 0, -1, experts[np.arange(layers)[:, None], ids])


def _phases(path: Path, modes: NDArray[Any]) -> NDArray[np.uint8]:
    if strangers := sorted(set(modes.tolist()) - set(_MODES)):
        raise TraceError(
            f"{path}: expected forward modes 1 (extend) and 2 (decode), found {quoted(strangers)}; record without "
            "chunked prefill together with decode, and without speculation"
        )
    return np.where(modes == 1, PREFILL, DECODE).astype(np.uint8)


def _sequences(path: Path, positions: NDArray[Any], phase: NDArray[np.uint8]) -> NDArray[np.int32]:
    """A request begins where a prompt's positions do not go on; those of decode must."""
    goes_on = np.concatenate([[True], np.diff(positions) == 1])
    if (bad := ~goes_on & (phase == DECODE)).any():
        at = int(np.flatnonzero(bad)[0])
        raise TraceError(
            f"{path}: expected requests one at a time, each token one position after the one before, got position "
            f"{positions[at]} after {positions[at - 1]} (token {at}); record with --max-running-requests 1"
        )
    return np.cumsum(~goes_on).astype(np.int32)
