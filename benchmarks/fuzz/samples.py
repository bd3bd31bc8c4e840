"""Valid inputs, small ones: each reader's inputs are these with changes."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import chdir
from dataclasses import fields
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors.numpy import save

from realrun.execution.call_log import LoggedSession
from sim.machine.interpolation import Table, TimeGrid
from sim.machine.profile import MeasuredModel
from sim.runs.prepare import prepare
from sim.simulate import play
from tests.kit.commands import write_route_csv
from tests.kit.small_sweeps import keep
from tests.traces.importers.routes import routes
from tests.traces.models.gguf_files import grouped, mamba, mixture, model, write_gguf
from traces.capture.vectors import Vectors, popular_half, write_vectors
from traces.file import write_trace
from traces.layout import DECODE, PREFILL
from traces.library import load_trace
from traces.trace import Trace, first_layers
from trilane.engines.accuracy.measured_rows import BUNDLED
from trilane.study.sweep.sweep import sweep
from trilane.study.sweep.table import COLUMNS
from trilane.study.validation.journal import Kept, journal_of, question_of
from trilane.study.validation.parity import answers_of
from trilane.study.validation.validate import ValidationPlan

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = {
    "trace": "mini-moe:2", "model": None, "hardware": "rtx3090-ddr4", "policy": "dali", "cached_share": 0.3, "batch": 2,
    "prompt_tokens": 4, "generated_tokens": 2,
}
TINY = "--set trace=mini-moe:2 --set model=null --set cached_share=0.3 --set prompt_tokens=4 --set generated_tokens=2"
SCENARIOS: tuple[dict[str, Any], ...] = (
    {**RUN, "parameters": {"window": 8}, "hardware_overrides": {"link.h2d_bytes_per_s": 12e9}, "sequences": [3, 0]},
    {**RUN, "cached_share": None, "gpu_memory_gb": 3, "prefill_chunk_tokens": 3, "engine": "graphs", "seed": 1},
    {**RUN, "sampled_steps": 2, "sampled_prompt_tokens": 2, "calibration": "mini-moe-calibration:2"},
    {**RUN, "policy": "fiddler", "model": "mini-moe:2", "noisy_forecast_recall": [0.9, 0.5]},
)
_MIXES: tuple[dict[str, Any], ...] = (
    {"placement": "random", "assigner": "greedy", "cache": "mrs", "alpha": 0.3, "keep": 4, "prior": True},
    {"placement": "popular", "pool": True, "prefetch": "impact", "lookahead": 2, "into": "cache", "demand_slots": 1},
    {"substitution": 0.5, "assigner": "two_pointer", "cache": "score-window", "prefetch": "top", "forecast": "gate"},
)
_SHORT = {name: RUN[name] for name in ("trace", "model", "prompt_tokens", "generated_tokens")}
SWEEP: dict[str, Any] = {
    "scenario": _SHORT,
    "grid": {"policy": ["fiddler", {"dali": {"window": 4}}, "on-demand"], "cached_share": [0.25, 0.5], "batch": "1..2"},
    "draws": 1, "clairvoyant": True,
}
_SWEEPS: tuple[dict[str, Any], ...] = (
    SWEEP,
    {"scenario": RUN, "grid": [{"pcie_gbps": "8..64/3"}, {"parameters.window": [1, 2], "pcie": ["3x16"]}], "draws": 2},
    {"scenario": RUN, "grid": {"link.h2d_bytes_per_s": [1e9, 12e9], "sequences": [[0, 1], [1, 2]], "model": [None]}},
)
_PLAN: dict[str, Any] = {
    "scenario": {**_SHORT, "trace": "mini-deepseek:2", "model": "deepseek-v2-lite:2"}, "repeats": 2,
    "vary": {"cached_share": [0.25, 0.5], "batch": [1, 4]}, "policies": ["fiddler", {"dali": {"window": 4}}],
}
_MEASURED = {**_PLAN, "repeats": 1, "vary": {"cached_share": [0.25]}}
SPEEDS = (0, 4, 15, 172, 178)  # lines of the bundled speeds: columns, CPU only, mixed with every kind of speed
PROMPTS = (
    {"text": "What is it?", "domain": "code"},
    {"text": "Once upon a time"},
    {"text": "1 + 1 =", "domain": "math"},
)


_SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99}
_CONFIGS: tuple[dict[str, Any], ...] = (
    {**_SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0],
     "intermediate_size": 128, "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 16},
    {**_SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
     "first_k_dense_replace": 1, "intermediate_size": 128, "kv_lora_rank": 16, "q_lora_rank": None, "v_head_dim": 8,
     "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    {"text_config": {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32,
     "hybrid_override_pattern": "ME*E", "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
     "conv_kernel": 4, "n_groups": 1, "mlp_hidden_act": "relu2"}},
)


class Samples:
    """All of them, as bytes; made in a folder that may go afterwards."""

    def __init__(self, folder: Path) -> None:
        presets = ROOT / "sim" / "machine" / "presets"
        self.scenarios = [_yaml(each) for each in SCENARIOS] + [(ROOT / "examples" / "reference.yaml").read_bytes()]
        self.mixes, self.sweeps, self.plan = (
            [_yaml({**RUN, "policy": "mix", "parameters": each}) for each in _MIXES],
            [_yaml(each) for each in _SWEEPS],
            _yaml(_PLAN),
        )
        self.sweep = self.sweeps[0]
        self.machines = [(presets / f"{name}.yaml").read_bytes() for name in ("rtx3090-ddr4", "rtx4090-ddr5")]
        self.profile = (ROOT / "docs" / "validation" / "host-lanes" / "profile.yaml").read_bytes()
        (folder / "p.yaml").write_bytes(measured := _yaml(_MEASURED))
        (folder / "m.yaml").write_bytes(self.profile)
        self.configs = [json.dumps(each).encode() for each in _CONFIGS]
        self.ggufs = [whole_gguf(folder, each) for each in small_models()]
        self.measured = {"p.yaml": measured, **measured_journal(folder, "p.yaml", "m.yaml")}
        trace = small_trace()
        write_trace(trace, folder / "trace.safetensors")
        self.trace = (folder / "trace.safetensors").read_bytes()
        self.vectors = write_vectors(small_vectors(), folder / "vectors.safetensors").read_bytes()
        write_route_csv(folder / "route.csv")
        self.route = (folder / "route.csv").read_bytes()
        self.logs = log_samples()
        self.speeds = b"".join(BUNDLED.read_bytes().splitlines(keepends=True)[place] for place in SPEEDS)
        self.prompts = "".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS).encode()
        self.other_prompts = b'{"text": "Another one."}\n'
        table = folder / "table.parquet"
        sweep(SWEEP, table)
        self.table = table.read_bytes()
        pq.write_table(found := pq.read_table(table), folder / "unsigned.parquet")
        self.tables = [self.table, *[(folder / "unsigned.parquet").read_bytes()] * 3]  # most without a checksum of all
        rows = found.select(["point", *COLUMNS]).to_pylist()
        keep(folder / "half.parquet", rows[:5])
        self.journal = (folder / "half.parquet.journal").read_bytes()

    def named(self, name: str) -> Any:
        """A sample, or several."""
        return self.logs.get(name) or getattr(self, name)


def small_trace() -> Trace:
    """Three sequences of a bundled trace: two layers, six tokens of the prompt and six that were generated."""
    trace = first_layers(load_trace("mini-moe"), 2)
    kinds = product(range(3), (PREFILL, DECODE))
    rows = np.concatenate([np.flatnonzero((trace.sequence == it) & (trace.phase == phase))[:6] for it, phase in kinds])
    return Trace.from_tensors(
        trace.shape, {name: array[rows] for name, array in trace.tensors().items()}, trace.provenance
    )


def whole_gguf(folder: Path, made: Any) -> bytes:
    """A file with its weights, all zero."""
    return write_gguf(folder / "m.gguf", *made).read_bytes()


def small_models() -> list[Any]:
    """Metadata and tensors of GGUF files: grouped queries with windows, and Mamba-2 in blocks."""
    keys = {"expert_count": 4, "expert_used_count": 2, "embedding_length": 32, "attention.head_count": 4}
    windows = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]}
    states = {"ssm.conv_kernel": 4, "ssm.inner_size": 32, "ssm.state_size": 8, "ssm.group_count": 1}
    layer = grouped(32, 4, 2, 8) + mixture(32, 16, 4, 16)
    blocks = [mamba(32, 84, 48, 32), mixture(32, 16, 4), grouped(32, 4, 2, 8), mixture(32, 16, 4)]
    return [
        model("qwen3moe", {**keys, **windows}, 99, [layer] * 2),
        model("nemotron_h_moe", {**keys, **states}, 99, blocks, tied=True),
    ]


def small_vectors() -> Vectors:
    """Vectors of a model with two layers of four experts, hidden width 3; no estimator."""
    tokens = np.arange(8, dtype=np.int64).reshape(2, 4)
    default = np.ones((2, 4, 3), np.float32)
    return Vectors(
        np.ones((1, 3), np.float32), default, tokens, popular_half(tokens), {}, {"model": "toy", "tokens": 28}
    )


def _yaml(document: Any) -> bytes:
    return yaml.safe_dump(document, sort_keys=False).encode()


# --- logs of other programs -------------------------------------------------------------------------------------------


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
    """Answers of vLLM, in both forms, and of SGLang."""
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
    """Arrays of vLLM, and converted ones of SGLang's recorder."""
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


# --- a validation that has been measured ------------------------------------------------------------------------------


def measured_journal(folder: Path, plan: str, profile: str) -> dict[str, bytes]:
    """The files of the journal of a plan in ``folder``, by their names there; it is made in ``out/journal``."""
    with chdir(folder):
        chosen = ValidationPlan.from_yaml(plan, {"hardware": profile})
        settings = [prepare(scenario) for scenario in chosen.scenarios]
        path = Path("out/journal")
        with journal_of(path, question_of(settings)) as journal:
            for place, setting in enumerate(settings):
                session = setting.session_of(LoggedSession)
                kept = Kept(play(setting, session), answers_of(session), True)
                for turn in range(chosen.repeats):
                    journal.add(place, turn, kept)
            model = settings[0].hardware.measured_profile().model_of(settings[0].shape, profile)
            journal.add_samples(chosen.repeats, dict(_samples(model)))
        return {str(path): path.read_bytes()}


def _samples(model: MeasuredModel) -> Iterator[tuple[Any, list[float]]]:
    """One sample of everything that was measured, by its name and sizes."""
    for part in fields(model):
        found = getattr(model, part.name)
        if isinstance(found, Table):
            yield from (((part.name, at), [float(ns)]) for at, ns in zip(found.at, found.ns, strict=True))
        elif isinstance(found, TimeGrid):
            for batch, row in zip(found.batch, found.ns, strict=True):
                yield from (((part.name, batch, n), [float(ns)]) for n, ns in zip(found.length, row, strict=True))
        elif found is not None and part.name != "sizes":
            yield (part.name,), [float(getattr(found, fields(found)[0].name))]
