"""Every parameter of every policy reaches a part: no two of its values compose the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import combinations
from random import Random
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest

from policies.papers.dali.system import default_sizes
from policies.parts.future import Future
from policies.registry import SYSTEMS, BuildContext, added, compose
from tests.kit.views import costs
from trilane.common.hints import hints_of
from trilane.testing.worlds import toy_calibration

LAYERS, EXPERTS, TOP_K = 8, 64, 2
CALIBRATION = toy_calibration(LAYERS, EXPERTS, TOP_K)
CONTEXT = BuildContext(
    "toy", EXPERTS, LAYERS, top_k=TOP_K, batch=2, costs=[costs((10,), (40,))] * LAYERS,
    calibration=replace(CALIBRATION, activations=np.repeat(CALIBRATION.activations, 8, axis=0)), future=Future([]),
)

ABOVE_DISK = replace(CONTEXT, costs=[costs((10,), (40,))._replace(read_ns=50)] * LAYERS)

UPLOADING = ("llama-cache-lru", "llama-cache-lru@impl", "llama-cache-pool")
# Parameters that are read with another one, and values that are not those of the type.
WITH: Mapping[tuple[str, str], Mapping[str, object]] = {
    ("dali", "beam_width"): {"assigner": "beam"},
    ("dali", "solver"): {"assigner": "exact"},
    **{(policy, "window"): {"admits": "second"} for policy in UPLOADING},
    **{(policy, "half_life"): {"admits": "hotter"} for policy in UPLOADING},
    **{("mix", name): {"cache": "mrs"} for name in ("alpha", "keep", "prior", "background")},
}
VALUES: Mapping[tuple[str, str], list[object]] = {
    **{(policy, "threshold"): [1.5, 3.0] for policy in ("daop", "daop@impl")},
    ("llama-cache-heat", "margin"): [1.25, 3.0],
    ("hobbit", "skip_above"): [0.75, 1.0],  # at least narrow_above
    ("strata@tail-skip", "tail_rank"): [3, 5],
    ("buddy", "buddies"): [1, 2],  # of the few that were used together
    ("ik-prefetch", "ahead"): [1, 2],
}


def alternatives(hint: Any, default: object) -> list[Any]:
    """Values of a parameter besides its default."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0], default)
    if get_origin(hint) in (Union, UnionType):
        return [value for kind in get_args(hint) if kind is not type(None) for value in alternatives(kind, default)]
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if value != default]
    if hint is bool:
        return [not default]
    if hint is int:
        return [3, 7]
    return [0.125, 0.625] if hint is float else [(1,), (1, 2)]


def described(part: object, depth: int = 0) -> object:
    """A part with all that it holds, as values that can be compared."""
    if isinstance(part, np.ndarray):
        return part.tolist()
    if isinstance(part, Random):
        return part.getstate()
    if isinstance(part, Mapping):
        return [(described(key), described(value, depth + 1)) for key, value in part.items()]
    if isinstance(part, list | tuple | set | frozenset):
        return [described(value, depth + 1) for value in part]
    if callable(part) and hasattr(part, "__qualname__"):
        return part.__qualname__
    held = getattr(part, "__dict__", None)
    if held is None or depth > 6:
        return repr(part) if held is None else type(part).__qualname__
    return type(part).__qualname__, [(name, described(value, depth + 1)) for name, value in held.items()]


def parts_of(policy: str, parameters: Mapping[str, object]) -> Mapping[str, object]:
    """All of a composition but the parameters themselves."""
    made = compose(policy, parameters, context=ABOVE_DISK if "disk" in parameters else CONTEXT)
    return {field.name: described(getattr(made, field.name)) for field in fields(made) if field.name != "parameters"}


PARAMETERS = [
    (policy, name)
    for policy in SYSTEMS if not added(policy)
    for name, *_ in SYSTEMS[policy].parameter_table()
]


@pytest.mark.parametrize(("policy", "name"), PARAMETERS)
def test_every_parameter_reaches_a_part_whatever_its_value(policy: str, name: str) -> None:
    kind: Any = SYSTEMS[policy].parameters
    default = getattr(kind(), name)
    values = [default, *VALUES.get((policy, name), alternatives(hints_of(kind)[name], default))]
    assert len(values) > 1
    composed = [parts_of(policy, {**WITH.get((policy, name), {}), name: value}) for value in values]
    assert all(one != other for one, other in combinations(composed, 2))


# --- the default of every parameter of the registered policies, and where the value is from ---------------------------


DALI = "dali dali-ilp dali-beam"
LRU = "llama-cache-lru llama-cache-lru@impl llama-cache-pool"
UPLOADS = f"{LRU} llama-cache-heat"
SPECULATING = "router-pf router-pf@exact quasi-pf quasi-pf@exact est-pf est-pf@exact hybrid-pf hybrid-pf@exact"
HYBRID = "hybrid-pf hybrid-pf@exact"
SEARCHED = "best-exact best-approx"

DEFAULTS: list[tuple[str, str, object, str]] = [
    # policies, parameter, value, source
    ("on-demand", "pool", False, "ours; Mixtral-Offloading, 3.1: one cache per layer"),
    ("on-demand", "cache", "lru", "Mixtral-Offloading, 3.1"),
    ("on-demand", "start", "empty", "ours"),
    ("llama.cpp@impl", "offload_min_tokens", 32, "ggml: GGML_OP_OFFLOAD_MIN_BATCH"),
    ("llama.cpp@cache", "host_layers", None, "--cpu-moe; --n-cpu-moe N"),
    ("llama.cpp@cache", "most_tokens", 32, "llama.cpp, src/llama-moe-cache.cpp: max_batch"),
    ("llama.cpp@cache", "offload_min_tokens", 32, "ggml: GGML_OP_OFFLOAD_MIN_BATCH"),
    (UPLOADS, "inserts", 2, "llama.cpp #27861: --moe-expert-cache-inserts; others: ours"),
    (UPLOADS, "start", "empty", "everett6/moe-prefetch, patches/0002"),
    (LRU, "admits", "every", "llama.cpp #27861; patches/0007: off by default"),
    (LRU, "window", 8, "patches/0007: LLAMA_MOE_ADMIT_WINDOW"),
    (LRU, "half_life", 64, "patches/0007: LLAMA_MOE_ADMIT_HALF"),
    ("llama-cache-lru", "frees", "ahead", "patches/0002: LLAMA_MOE_EARLY_ISSUE"),
    ("llama-cache-lru@impl", "repeats", True, "llama.cpp #27861, llama_moe_cache_step: no look at what waits"),
    ("llama-cache-heat", "margin", 1.5, "llama-wackMall v5: LLAMA_EXPERT_HYSTERESIS"),
    ("llama-cache-heat", "dwell", 32, "llama-wackMall v5"),
    ("ktransformers kt-deferral", "prefill", "gpu", "HybriMoE, Table I: the CPU is used in decode only"),
    ("ktransformers kt-deferral", "strategy", "frequency", "kt-kernel/python/experts_base.py; HybriMoE, VI-A"),
    ("ktransformers kt-deferral", "demand_slots", 2, "ours: one is filled while the other is used"),
    ("kt-deferral", "deferred", None, "Section 4: the fewest with which the CPU is always at work"),
    ("kt-deferral", "immediate", 2, "Section 4: at least two"),
    ("ktransformers@layer-wise", "prefill", "cpu", "DALI, 6.2"),
    ("moe-lightning", "steps", 400, "ours"),
    ("moe-lightning", "prefetch_slots", 4, "ours"),
    ("deepspeed", "resident", False, "ours"),
    ("deepspeed", "prefetch", True, "HybriMoE, II-B"),
    ("deepspeed moe-lightning@impl", "prefetch_slots", None, "ours"),
    ("mixtral-offloading", "speculate", 2, "3.2: one or two"),
    ("mixtral-offloading@impl", "buffers", 4, "src/expert_cache.py: buffer_size"),
    ("moe-infinity", "library", 1000, "released code: trace_capacity"),
    ("moe-infinity", "lookahead", None, "the paper has no limit"),
    ("moe-infinity", "prefetch", 16, "ours"),
    ("moe-infinity", "floor", 0.5, "ours; 0 is the paper's"),
    ("moe-infinity edgemoe", "start", "ranked", "silent"),
    ("edgemoe", "prefetch", None, "open: top-k of the model"),
    ("edgemoe", "among", "all", "open"),
    ("edgemoe", "batch", "tokens", "open"),
    ("edgemoe", "pool", True, "open"),
    ("adapmoe", "prefetch", 1, "src/linear_cache.py: one expert of the next layer"),
    ("adapmoe", "drop_below", None, "ours: off, since it changes the routing"),
    ("adapmoe", "start", "popular", "silent"),
    ("fiddler", "uniform", False, "3.2: the most popular experts of the whole model"),
    ("fiddler@impl", "costs", "constants", "src/fiddler/mixtral.py L38-39"),
    (f"{DALI} static-threshold random-prefetch", "prefetch", None, "Fig. 12: by model"),
    (DALI, "window", None, "6.1, A.6: by model"),
    (DALI, "update", None, "6.1, A.6: by model"),
    (DALI, "forecast", "residual", "4.2, Eq. 10-11"),
    (DALI, "guard", False, "Algorithm 2 does not check"),
    (DALI, "stagger", False, "Algorithm 2: all layers in one step"),
    (DALI, "early", False, "4.3: after w steps"),
    (DALI, "evict", "idlest", "4.3: the lowest scores"),
    (DALI, "among", "absent", "silent; 4.2 may mean all"),
    (DALI, "admits", "none", "silent; Algorithm 2 knows swaps alone"),
    (f"{DALI} random-prefetch", "prefetch_slots", None, "silent: twice the prefetches"),
    ("dali dali-beam", "beam_width", 2, "Appendix A.2"),
    ("dali dali-ilp", "solver", "own", "not named"),
    ("dali", "assigner", "greedy", "Algorithm 1"),
    ("hybrimoe", "rule", "finish", "IV-B: the earliest completion time"),
    ("hybrimoe", "guard", True, "ours"),
    ("hybrimoe", "prefetch", 4, "ours; IV-C: until the layer ends"),
    ("hybrimoe", "lookahead", 3, "IV-C: the next three layers"),
    ("hybrimoe", "discount", 1.0, "IV-C has none"),
    ("hybrimoe", "arrival", True, "ours"),
    ("hybrimoe static-threshold", "alpha", 0.3, "unpublished"),
    ("hybrimoe hybrimoe@impl static-threshold", "keep", None, "IV-D: 2 K"),
    ("hybrimoe", "background", False, "silent"),
    ("hybrimoe", "admit_by_score", False, "silent"),
    ("hybrimoe", "pool", False, "ours"),
    ("hybrimoe smoe", "start", "random", "silent"),
    ("hybrimoe@impl", "prefetch_size", 0, "the README's example"),
    ("hybrimoe@impl", "alpha", 0.5, "ktransformers/operators/experts.py L662-712"),
    ("static-threshold", "theta", None, "unpublished: the break-even"),
    ("static-threshold", "residents", "stay", "open"),
    ("static-threshold", "uniform", False, "DALI, 6.1"),
    ("smoe", "alpha", 0.25, "Table III, setting S3"),
    ("smoe", "listing", False, "IV-B: the text"),
    ("smoe", "window", 16, "unpublished"),
    ("smoe", "assigner", "two_pointer", "Algorithm 2"),
    ("smoe", "history", 32, "unpublished"),
    ("smoe", "prefetch", True, "IV-C"),
    ("smoe", "pool", False, "silent"),
    ("daop", "first_predicted_block", 5, "IV-C: i >= 4"),
    ("daop", "swap_share", 0.5, "Algorithm 1, line 5"),
    ("daop", "threshold", 1.05, "IV-B: SwapInOut"),
    ("daop", "swap_rule", "guarded", "ours"),
    ("daop", "degrade", True, "IV-C"),
    ("daop@impl", "first_predicted_block", 6, "model/modeling_daop.py L340-349"),
    ("daop@impl", "most_swaps", 8, "model/modeling_daop.py L393-408: largest_num"),
    ("daop@impl", "threshold", 1.05, "model/modeling_daop.py L393-408"),
    ("daop@impl", "degrade", True, "model/modeling_daop.py L595-665"),
    ("daop@impl", "cpu_tokens", None, "ours: the planner's costs in place of typed-in ones"),
    ("daop@impl", "demand_slots", None, "ours: a slot for each swap"),
    (SPECULATING, "buffer_experts", None, "Algorithm 1: K for each sequence"),
    (SPECULATING, "cache", "none", "5.1: nothing is kept"),
    (HYBRID, "router_side", "quasi_hidden", "5.1"),
    (HYBRID, "threshold", 0.8, "unpublished"),
    (HYBRID, "layers", None, "6.3: where the router's hit rate is low"),
    (f"{SEARCHED} mix", "demand_slots", 2, "ours"),
    (SEARCHED, "placement", "popular", "notebooks/better_compositions.ipynb"),
    (SEARCHED, "pool", True, "notebooks/better_compositions.ipynb"),
    ("best-exact mix", "substitution", 0.0, "the model's own routing"),
    ("best-approx", "substitution", 0.2, "notebooks/better_compositions.ipynb"),
    (f"{SEARCHED} mix", "assigner", "pipeline", "notebooks/better_compositions.ipynb"),
    (f"{SEARCHED} mix", "copy_weight", 1.0, "ours: the whole of a copy's time"),
    (f"{SEARCHED} mix", "prefetch", "forecast", "notebooks/better_compositions.ipynb"),
    (SEARCHED, "forecast", "quasi_hidden", "notebooks/better_compositions.ipynb"),
    (f"{SEARCHED} mix", "lookahead", 1, "notebooks/better_compositions.ipynb"),
    (f"{SEARCHED} mix oracle", "into", "cache", "notebooks/better_compositions.ipynb"),
    (SEARCHED, "cache", "mrs", "notebooks/better_compositions.ipynb"),
    (SEARCHED, "alpha", 0.1, "notebooks/better_compositions.ipynb"),
    (SEARCHED, "keep", 12, "notebooks/better_compositions.ipynb"),
    (f"{SEARCHED} mix", "prior", False, "notebooks/better_compositions.ipynb"),
    (SEARCHED, "background", "prefill", "ours: docs/design.md, Better machines"),
    ("mix", "background", "none", "ours"),
    ("cache-prior", "bonus", 0.2, "ours: the paper has curves"),
    ("cache-prior", "unit", "range", "arXiv 2412.00099"),
    ("cache-prior buddy", "keep", 1, "arXiv 2412.00099; buddy: ours"),
    ("cache-prior buddy", "start", "random", "silent"),
    ("cache-prior buddy", "demand_slots", 2, "ours"),
    ("buddy", "buddies", 16, "ours"),
    ("buddy", "entropy", 0.0, "ours"),
    ("buddy", "prefetch", None, "open: top-k of the model"),
    ("hobbit", "narrow_above", 0.6, "3.2: T1"),
    ("hobbit", "skip_above", 0.9, "3.2: T2"),
    ("hobbit", "narrow_share", 0.25, "5: float16 and int4, int8 and int2"),
    ("hobbit", "lookahead", 3, "3.3: several layers; ours"),
    ("hobbit", "recent", 0.25, "3.4: found by measuring; ours"),
    ("hobbit", "frequent", 0.25, "3.4: found by measuring; ours"),
    ("hobbit", "precise", 0.25, "3.4: found by measuring; ours"),
    ("hobbit", "near", 0.25, "3.4: found by measuring; ours"),
    ("hobbit", "demand_slots", 2, "ours"),
    ("least-stale", "prefetch", None, "open: top-k of the model"),
    ("least-stale", "demand_slots", 2, "ours"),
    ("strata strata@tail-skip", "pcie_share", "auto", "release 0.1.42: found at the start"),
    ("strata strata@tail-skip", "most_copies", 16, "include/strata/core/verify.hpp: kStagingBlobs"),
    ("strata strata@tail-skip", "every", 4, "--adapt-every"),
    ("strata strata@tail-skip", "swaps", 96, "--adapt-swaps"),
    ("strata strata@tail-skip", "decay", 0.7, "--adapt-decay"),
    ("strata strata@tail-skip", "awaits_swaps", True, "src/program/generate.cpp: apply_pending"),
    ("strata strata@tail-skip", "stream_from_tokens", 64, "ours: --short-read has no number"),
    ("strata@tail-skip", "tail_rank", 7, "STRATA_ROUTE_TAIL_SKIP"),
    ("prescope", "lookahead", 2, "4.4: two layers, as others quote it"),
    ("prescope", "start", "random", "ours"),
    ("prescope", "demand_slots", 2, "ours"),
    ("seqmoe", "steps", 2, "ours; arXiv 2609.12978 has 8"),
    ("seqmoe", "prefetch", True, "arXiv 2609.12978, abstract"),
    ("seqmoe", "discount", 0.5, "ours"),
    ("seqmoe", "half_life", 16.0, "ours"),
    ("seqmoe", "demand_slots", 2, "ours"),
    ("pre-gated", "cache", "none", "arXiv 2308.12066"),
    ("pre-gated", "buffer_experts", None, "arXiv 2308.12066: the active experts"),
    ("moe-stream ds4 flashmoe", "demand_slots", 2, "ours"),
    ("ds4", "host_tier", True, "issue #629"),
    ("colibri", "pinned", 0.5, "PR #815: half of the budget"),
    ("colibri", "lookahead", None, "README: the next layer's experts"),
    ("ik-prefetch", "ahead", 3, "GGML_MOE_PREFETCH_AHEAD"),
    ("flashmoe", "window", 32, "ours"),
    ("edgemoe", "tier", "gpu", "as DALI and others use it"),
    ("moe-infinity", "host", "scenario", "its source has no further tier"),
    (SEARCHED, "disk", "seen", "ours"),
    ("mix", "placement", "random", "ours"),
    ("mix oracle", "pool", False, "ours"),
    ("mix", "forecast", "gate", "ours"),
    ("mix", "cache", "lru", "ours"),
    ("mix", "alpha", 0.3, "as hybrimoe"),
    ("mix", "keep", None, "as hybrimoe"),
    ("oracle", "prefetch", None, "ours"),
    ("oracle", "prefetch_slots", 4, "ours"),
    ("oracle", "solver", "own", "as dali"),
    (
        f"{DALI} on-demand moe-lightning moe-lightning@impl deepspeed mixtral-offloading moe-infinity "
        "moe-infinity@impl edgemoe adapmoe fiddler hybrimoe hybrimoe@impl static-threshold random-prefetch smoe oracle",
        "demand_slots", 2, "silent: one is filled while the other is used",
    ),
]
BY_POLICY = {(policy, name): value for policies, name, value, _ in DEFAULTS for policy in policies.split()}


@pytest.mark.parametrize("policy", [name for name in SYSTEMS if not added(name)])
def test_every_default_has_a_source(policy: str) -> None:
    expected = {name: value for (of, name), value in BY_POLICY.items() if of == policy}
    assert {name: default for name, _, default in SYSTEMS[policy].parameter_table()} == expected


@pytest.mark.parametrize(("experts", "sizes"), [(8, (4, 1, 1)), (31, (4, 1, 1)), (32, (4, 8, 4)), (64, (4, 8, 4))])
def test_sizes_of_dali_are_those_of_the_model(experts: int, sizes: tuple[int, int, int]) -> None:
    """Fig. 12: 4, 1, 1 for Mixtral's 8 experts and 4, 8, 4 for DeepSeek's 64; which of them others have is ours."""
    assert default_sizes(BuildContext("toy", experts, 2)) == sizes
