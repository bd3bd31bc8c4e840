"""Importer of vLLM's routed experts: answers of its server (JSON), or arrays of its Python interface (.npz).

Since 2025-11 vLLM returns the ids that each router chose, with `--enable-return-routed-experts`. Two forms:
- v0.21 (vllm-project/vllm, docs/training/routed_experts_replay.md, commit 0087e005): `prompt_routed_experts` of an
  answer and `routed_experts` of each of its `choices`, lists [tokens, MoE layers, top_k]; -1 for cached prompt tokens.
- later (vllm/entrypoints/openai/completion/protocol.py, commit 002032ee): `routed_experts` of each choice alone, the
  base64 of a .npy array [tokens - 1, layers, top_k] over prompt and generated tokens; the last was never routed.
The .npz is ours: `prompt_0`, `generated_0`, `prompt_1` and so on, such arrays of the requests (docs/traces.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.npy import array_of, read_npz
from traces.importers.requests import answers, decoded, part
from traces.importers.token_routes import Text, trace_of_texts
from traces.layout import TraceError
from traces.trace import Trace
from trilane.common.quoting import quoted

_NAME = re.compile(r"(prompt|generated)_([0-9]{1,6})")


def import_vllm(path: Path, model: str | None) -> Trace:
    """Read saved answers or arrays, one sequence a completion. Raises TraceError."""
    read = _of_arrays if path.suffix.lower() == ".npz" else _of_answers
    return trace_of_texts(path, "vllm", model, read(path))


def _of_arrays(path: Path) -> Iterator[Text]:
    arrays = read_npz(path)
    if strangers := [name for name in arrays if not _NAME.fullmatch(name)]:
        raise TraceError(f"{path}: expected arrays named prompt_N and generated_N, found {quoted(strangers)}")
    for number in sorted({int(name.partition("_")[2]) for name in arrays}):
        parts = [arrays[name] for name in (f"prompt_{number}", f"generated_{number}") if name in arrays]
        yield _joined(f"{path}: request {number}", parts, len(parts[0]) if f"prompt_{number}" in arrays else 0)


def _of_answers(path: Path) -> Iterator[Text]:
    for where, answer in answers(path):
        prompt = answer.get("prompt_routed_experts")
        for choice in part(where, answer, "choices", list):
            routed = choice.get("routed_experts") if isinstance(choice, dict) else None
            if isinstance(routed, str):
                counted = part(where, part(where, answer, "usage", dict), "prompt_tokens", int)
                yield _joined(where, [array_of(decoded(where, routed), where)], counted)
            elif routed is not None and prompt is not None:
                parts = [_listed(where, each) for each in (prompt, routed)]
                yield _joined(where, parts, len(parts[0]))
            else:
                missing = "routed_experts in each of its choices" if routed is None else "prompt_routed_experts"
                raise TraceError(
                    f"{where}: expected {missing}, found none; save the whole answer of vLLM, started with "
                    "--enable-return-routed-experts"
                )


def _listed(where: str, value: Any) -> NDArray[np.int64]:
    try:
        array = np.asarray(value if value else np.zeros((0, 0, 0), np.int64))
    except ValueError:  # lists of several lengths
        array = np.zeros(0)
    if array.dtype.kind != "i" or array.ndim != 3:
        raise TraceError(
            f"{where}: expected routed_experts as lists [tokens][layers][top_k] of ids, got {quoted(value)}"
        )
    return array


def _joined(where: str, parts: list[NDArray[Any]], prompt: int) -> Text:
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
    return Text(ids, prompt)
