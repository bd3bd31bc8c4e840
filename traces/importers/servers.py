"""Importers of what vLLM, SGLang and Megatron-LM record of their routing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.token_routes import Text, TokenRoutes, moe_layers_of, shape_for, trace_of, trace_of_texts
from traces.importers.values import answers, array_of, decoded, part, read_npz
from traces.layout import DECODE, PREFILL, TraceError
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from traces.trace import Trace
from trilane.common.quoting import quoted

CONVERT = (
    "python -c \"import numpy as np, torch, sys; d = torch.load(sys.argv[1], weights_only=True); r = d['records']; "
    "np.savez(sys.argv[2], topk_ids=np.concatenate([x['topk_ids_of_layer'].numpy().swapaxes(0, 1) for x in r]), "
    "positions=np.concatenate([x['positions'] for x in r]), "
    "modes=np.repeat([x['forward_mode'] for x in r], [len(x['positions']) for x in r]), "
    "physical_to_logical=d['last_physical_to_logical_map'].cpu().numpy())\" DUMP.pt ROUTING.npz"
)
_REQUEST = re.compile(r"(prompt|generated)_([0-9]{1,6})")
_RECORDER_AXES = {"topk_ids": 3, "positions": 1, "modes": 1, "physical_to_logical": 2}
_EXTEND, _DECODE = 1, 2  # forward modes of SGLang

Ints = NDArray[np.int64]


def import_vllm(path: Path, model: str | None) -> Trace:
    """Read answers of vLLM's server (JSON), or arrays of its Python interface (.npz): one sequence a completion.

    Since 2025-11 vLLM returns the ids that each router chose, with `--enable-return-routed-experts`. Two forms:
    - v0.21 (vllm-project/vllm, docs/training/routed_experts_replay.md, commit 0087e005): `prompt_routed_experts` of an
      answer and `routed_experts` of each of its `choices`, lists [tokens, MoE layers, top_k]; -1 for cached tokens.
    - later (vllm/entrypoints/openai/completion/protocol.py, commit 002032ee): `routed_experts` of each choice alone,
      the base64 of a .npy array [tokens - 1, layers, top_k] over prompt and answer; the last token was never routed.
    The .npz is ours: `prompt_0`, `generated_0`, `prompt_1` and so on, such arrays of the requests (docs/traces.md).
    Raises TraceError.
    """
    texts = _vllm_arrays if path.suffix.lower() == ".npz" else _vllm_answers
    return trace_of_texts(path, "vllm", model, texts(path))


def _vllm_arrays(path: Path) -> Iterator[Text]:
    arrays = read_npz(path)
    if strangers := [name for name in arrays if not _REQUEST.fullmatch(name)]:
        raise TraceError(f"{path}: expected arrays named prompt_N and generated_N, found {quoted(strangers)}")
    for number in sorted({int(name.partition("_")[2]) for name in arrays}):
        parts = [arrays[name] for name in (f"prompt_{number}", f"generated_{number}") if name in arrays]
        yield _joined(f"{path}: request {number}", parts, len(parts[0]) if f"prompt_{number}" in arrays else 0)


def _vllm_answers(path: Path) -> Iterator[Text]:
    for where, answer in answers(path):
        prompt = answer.get("prompt_routed_experts")
        for choice in part(where, answer, "choices", list):
            routed = choice.get("routed_experts") if isinstance(choice, dict) else None
            if isinstance(routed, str):
                prompt_tokens = part(where, part(where, answer, "usage", dict), "prompt_tokens", int)
                yield _joined(where, [array_of(decoded(where, routed), where)], prompt_tokens)
            elif routed is not None and prompt is not None:
                parts = [_listed(where, prompt), _listed(where, routed)]
                yield _joined(where, parts, len(parts[0]))
            else:
                missing = "routed_experts in each of its choices" if routed is None else "prompt_routed_experts"
                raise TraceError(
                    f"{where}: expected {missing}, found none; save the whole answer of vLLM, started with "
                    "--enable-return-routed-experts"
                )


def _listed(where: str, value: Any) -> Ints:
    try:
        array = np.asarray(value if value else np.zeros((0, 0, 0), np.int64))
    except ValueError:  # lists of several lengths
        array = np.zeros(0)
    if array.dtype.kind != "i" or array.ndim != 3:
        raise TraceError(
            f"{where}: expected routed_experts as lists [tokens][layers][top_k] of ids, got {quoted(value)}"
        )
    return array


def _joined(where: str, parts: list[Ints], prompt_tokens: int) -> Text:
    full = [array for array in parts if array.size]
    if len({array.shape[1:] for array in full}) != 1 or full[0].ndim != 3:
        raise TraceError(
            f"{where}: expected arrays [tokens, layers, top_k], got {', '.join(str(list(a.shape)) for a in parts)}"
        )
    ids = np.concatenate(full)
    if (ids < 0).all(axis=(1, 2)).any():
        raise TraceError(
            f"{where}: expected the experts of every token, some have -1, since vLLM took their part of the prompt "
            "from its prefix cache; record with --no-enable-prefix-caching, or prompts that share no beginning"
        )
    return Text(ids, prompt_tokens)


def import_sglang(path: Path, model: str | None) -> Trace:
    """Read answers of SGLang's `/generate`, saved as JSON, one sequence each.

    With `--enable-return-routed-experts` and `"return_routed_experts": true` in the request, `meta_info` of an answer
    has `routed_experts`: the base64 of int32 ids [prompt_tokens + completion_tokens - 1, layers, top_k] without their
    sizes, the last token having never been routed (sgl-project/sglang,
    python/sglang/srt/state_capturer/routed_experts.py, commit 024911f2; the number of rows: its test of expert id
    partitions, 2026). `layers` counts dense ones too, with 0 or -1. Raises TraceError.
    """
    shape = load_model(model) if model else shape_for(path, model, 0, 0)
    return trace_of_texts(path, "sglang", model, _sglang_answers(path, shape))


def _sglang_answers(path: Path, shape: ModelShape) -> Iterator[Text]:
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


def import_sglang_recorder(path: Path, model: str | None) -> Trace:
    """Read what SGLang's expert distribution recorder dumped, converted from .pt, which is a pickle, to .npz.

    `--expert-distribution-recorder-mode per_token` makes dumps that hold, for each forward pass, `topk_ids_of_layer`
    [layers, tokens, 8], padded with -1, `positions` and `forward_mode` (1 extend, 2 decode), and the experts' places
    `last_physical_to_logical_map` [layers, places] (sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py,
    2025). Which request a token belongs to is not among them, so that one must run at a time. Other modes count tokens
    per expert, from which no trace can be made. Raises TraceError, which for a dump says how to convert it.
    """
    if path.suffix.lower() == ".pt":
        raise TraceError(f"{path}: a dump of PyTorch is a pickle, which Trilane does not run; convert it: {CONVERT}")
    arrays = read_npz(path)
    if {name: array.ndim for name, array in arrays.items()} != _RECORDER_AXES or not len(arrays["topk_ids"]):
        raise TraceError(
            f"{path}: expected arrays with axes {_RECORDER_AXES}, found {quoted(sorted(arrays))}; convert it again"
        )
    tokens = len(arrays["topk_ids"])
    if not (tokens == len(arrays["positions"]) == len(arrays["modes"])):
        raise TraceError(f"{path}: expected a position and a mode for each of {tokens:,} tokens; convert it again")
    ids = moe_layers_of(_logical(path, arrays["topk_ids"], arrays["physical_to_logical"]), model)
    ids = ids[:, :, ~(ids == -1).all(axis=(0, 1))]
    phase = _phases(path, arrays["modes"])
    routing = TokenRoutes(ids, _requests(path, arrays["positions"], phase), phase)
    return trace_of(path, "sglang-recorder", shape_for(path, model, *ids.shape[1:]), routing)


def _logical(path: Path, ids: Ints, experts: Ints) -> Ints:
    """The experts [layers, places] that are in the recorded places ``ids`` [T, layers, k]; -1 stays."""
    layers, places = experts.shape
    if ids.shape[1] != layers or not places or (ids < -1).any() or (ids >= places).any():
        raise TraceError(
            f"{path}: expected places 0..{places - 1}, or -1, in {layers} layers, as physical_to_logical has, found "
            f"{ids.min(initial=0)} to {ids.max(initial=0)} in {ids.shape[1]}; convert it again"
        )
    return np.where(ids < 0, -1, experts[np.arange(layers)[:, None], ids])


def _phases(path: Path, modes: Ints) -> NDArray[np.uint8]:
    if strangers := sorted(set(modes.tolist()) - {_EXTEND, _DECODE}):
        raise TraceError(
            f"{path}: expected forward modes 1 (extend) and 2 (decode), found {quoted(strangers)}; record without "
            "chunked prefill together with decode, and without speculation"
        )
    return np.where(modes == _EXTEND, PREFILL, DECODE).astype(np.uint8)


def _requests(path: Path, positions: Ints, phase: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The request of each token: one begins where a prompt's positions do not go on; those of decode must."""
    goes_on = np.concatenate([[True], np.diff(positions) == 1])
    if (bad := ~goes_on & (phase == DECODE)).any():
        at = int(np.flatnonzero(bad)[0])
        raise TraceError(
            f"{path}: expected requests one at a time, each token one position after the one before, got position "
            f"{positions[at]} after {positions[at - 1]} (token {at}); record with --max-running-requests 1"
        )
    return np.cumsum(~goes_on).astype(np.int32)


def import_megatron(path: Path, model: str | None) -> Trace:
    """Read Megatron-LM's router trace of one rank: `router_trace_rank0.jsonl` of `--moe-routing-trace-path`.

    A line for each step, block and layer: `{"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3,
    "rank": 0, "num_tokens": 128, "topk": 22, "top_indices": [[12, 45, ...], ...]}`, "block" being absent from the first
    version; ids may be in any order (NVIDIA/Megatron-LM, megatron/core/transformer/moe/router_trace.py, 2026). Layers
    of multi-token prediction (`"block": "mtp"`) are left out.

    Which sequence a token belongs to is not written. What is unambiguous can be read: inference of one request at a
    time, a step of its prompt's tokens followed by steps of one; and training, all steps alike, each a text.
    Raises TraceError naming the line.
    """
    steps = _megatron_steps(path)
    counts = np.array([len(step) for step in steps])
    begins = _first_steps(path, counts)
    ids = np.concatenate(steps)
    sequence = np.repeat(np.cumsum(begins) - 1, counts).astype(np.int32)
    phase = np.repeat(np.where(begins, PREFILL, DECODE), counts).astype(np.uint8)
    return trace_of(path, "megatron", shape_for(path, model, *ids.shape[1:]), TokenRoutes(ids, sequence, phase))


def _megatron_steps(path: Path) -> list[Ints]:
    """Ids [tokens, layers, k] of each step. A layer's second record in a step is that of the next micro-batch."""
    turns: Counter[tuple[int, int]] = Counter()
    steps: dict[tuple[int, int], dict[int, tuple[str, Ints]]] = {}
    for where, line in answers(path):
        step, layer, tokens, k = (part(where, line, name, int) for name in ("step", "layer", "num_tokens", "topk"))
        rows = part(where, line, "top_indices", list)
        if line.get("block", "decoder") != "decoder":
            continue
        if len(rows) != tokens or not tokens or not all(_is_row(row, k) for row in rows):
            raise TraceError(
                f"{where}: expected top_indices to be {tokens} lists of {k} expert ids, got {quoted(rows)}; "
                "record it again"
            )
        steps.setdefault((step, turns[step, layer]), {})[layer] = where, np.array(rows, np.int64)
        turns[step, layer] += 1
    if not steps:
        raise TraceError(f"{path}: expected records of decoder layers, found none; record it again")
    layers = sorted(steps[min(steps)])
    return [_step_ids(number, dict(sorted(steps[number, turn].items())), layers) for number, turn in sorted(steps)]


def _is_row(row: Any, k: int) -> bool:
    return isinstance(row, list) and len(row) == k > 0 and all(type(value) is int for value in row)


def _step_ids(number: int, records: dict[int, tuple[str, Ints]], layers: list[int]) -> Ints:
    """Ids [tokens, layers, k] of a step's records by layer. Raises TraceError if it lacks some."""
    shapes = {ids.shape for _, ids in records.values()}
    if list(records) != layers or len(shapes) != 1:
        where, _ = next(iter(records.values()))
        raise TraceError(
            f"{where}: expected step {number} to have the same tokens in the layers {quoted(layers)}, "
            f"found layers {quoted(list(records))}, tokens and ids per token {quoted(sorted(shapes))}; record it again"
        )
    return np.stack([ids for _, ids in records.values()], axis=1)


def _first_steps(path: Path, counts: Ints) -> NDArray[np.bool_]:
    """Mask of the steps that begin a sequence: all if they have equally many tokens, otherwise those of several."""
    several = counts > 1
    if several.all() and (counts == counts[0]).all():
        return several
    if (doubtful := several[1:] & several[:-1]).any():
        at = int(np.flatnonzero(doubtful)[0])
        raise TraceError(
            f"{path}: expected one request at a time, a step of several tokens followed by steps of one, or steps of "
            f"equally many tokens, found steps of {counts[at]} and {counts[at + 1]} in a row; which sequence a token "
            "is of cannot be known: record requests one by one, without chunked prefill"
        )
    return np.asarray(several | (np.arange(len(counts)) == 0))
