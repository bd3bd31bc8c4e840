"""Words for values and settings, for what was run, and for what a sweep shows, by stated rules.

*Fastest*: the lowest mean TPOT. Along an axis the fastest policy stays the fastest as long as it is within 2 % of the
lowest TPOT, since less is within the noise. *The policy hardly matters* from the value on at which, and at all later
ones, half of the policies are within 10 % of the fastest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from policies.baselines.best import TUNED_ON_SEQUENCES, TUNED_ON_TRACES, TUNED_POLICIES
from policies.protocols import PolicyKind
from sim.runs.scenario import Scenario
from sim.runs.vocabulary import Label
from trilane.common.quoting import printable
from trilane.output.figures.marks import marked
from trilane.study.sampling_error import MEASURED_RUNS, measured_error
from trilane.study.sweep.axes import PARAMETER, SCENARIO_KEYS, axis_label

_LARGER: Mapping[str, tuple[tuple[float, str], ...]] = {  # units that are easier to read, from this value on
    "bytes": ((1e9, "GB"),),
    "bytes/s": ((1e9, "GB/s"),),
    "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")),
}
_PLAIN = 1e9  # whole numbers below it are written with all their digits
_NAMES = ("hardware", "model", "trace", "parameters")  # axes whose values need no name in front of them
_NULLS: Mapping[str, tuple[str, str]] = {  # what null means: as a value next to the axis' name, and on its own
    "gpu_memory_gb": ("the card's own", "the card's own memory"),
    "cached_share": ("what fits", "what fits cached"),
    "model": ("the trace's own", "the trace's own model"),
    "prompt_tokens": ("as recorded", "prompts as recorded"),
    "gpus": ("as named", "the GPUs that are named"),
    "generated_tokens": ("as recorded", "as many tokens as recorded"),
    "prefill_chunk_tokens": ("whole", "whole prompts"),
    "sampled_steps": ("all", "all decode steps"),
    "sampled_prompt_tokens": ("all", "all prompt tokens"),
    "sequences": ("from the first", "sequences from the first"),
    "calibration": ("the bundled one", "the bundled calibration"),
    "noisy_forecast_recall": ("the trace's own", "the trace's own forecasts"),
    "draft_acceptance": ("the trace's own", "the trace's own acceptance of drafts"),
    "draft_ns": ("by its layers", "drafts as long as their layers take"),
    "parameters": ("default", "default parameters"),
}
_MEMORY = ("cached_share", "gpu_memory_gb", "gpu.memory_bytes")  # axes that set the memory for experts
_LENGTHS = ("prompt_tokens", "generated_tokens")
_UNUSUAL = (  # named where they differ from the default
    "prefill_chunk_tokens", "noisy_forecast_recall", "sampled_steps", "sampled_prompt_tokens",
    "draft_tokens", "draft_acceptance", "draft_layers", "draft_again", "draft_ns",
)
_DEFAULT = Scenario()

# --- values -----------------------------------------------------------------------------------------------------------


def value_text(name: str, value: Any) -> str:
    """A value of an axis, with a unit only where that is larger than the axis' own: "16", "30%", "8 GB"."""
    number, unit = _scaled(name, value)
    return f"{number} {unit}" if unit else number


def value_words(name: str, value: Any) -> str:
    """A value of an axis that can stand alone: "30% cached", "16 GB/s", "batch 4", "rtx3090-ddr4"."""
    text = value_text(name, value)
    if is_null(name, value):
        return _null(name)[1]
    if name == "cached_share":
        return f"{text} cached"
    words, unit = _parts(axis_label(name))
    if isinstance(value, str):
        return text if name in _NAMES else f"{words.split()[0]} {text}"
    if _scaled(name, value)[1]:
        return text
    return f"{text} {unit}" if unit and name != "batch" else f"{words} {text}"


def setting_words(name: str, value: Any) -> str:
    """A value of an axis as a title: "PCIe bandwidth 16 GB/s", otherwise as ``value_words``."""
    words, unit = _parts(axis_label(name))
    named = unit and name != "batch" and not isinstance(value, str) and not is_null(name, value)
    return f"{words} {value_words(name, value)}" if named else value_words(name, value)


def is_share(name: str) -> bool:
    """True if the values of an axis are fractions, which are written as percentages."""
    return name.endswith("share")


def is_null(name: str, value: Any) -> bool:
    """True if a value is missing, or is the text that stands for a missing one."""
    return value is None or value != value or value == null_text(name)


def null_text(name: str) -> str:
    """Text of null as a value of an axis, such as "the card's own" (memory)."""
    return _null(name)[0]


def numeric(values: Sequence[Any]) -> bool:
    """True if all values are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _null(name: str) -> tuple[str, str]:
    if name in _NULLS:
        return _NULLS[name]
    words = _parts(axis_label(name))[0]
    if name.startswith(PARAMETER):
        return "default", f"default {words}"
    return ("none", f"no {words}") if name in SCENARIO_KEYS else ("the machine's own", f"the machine's own {words}")


def _scaled(name: str, value: Any) -> tuple[str, str]:
    """The text of a value, and its unit where that is larger than the axis' own."""
    if is_null(name, value):
        return null_text(name), ""
    if isinstance(value, str) and value.startswith("{"):  # parameters, as the table of a sweep keeps them
        return parameters_text(json.loads(value)), ""
    if isinstance(value, str) or not numeric([value]):
        return printable(str(value)), ""
    if is_share(name):
        return f"{100 * value:.3g}%", ""
    for size, unit in _LARGER.get(_parts(axis_label(name))[1], ()):
        if value >= size:
            return f"{value / size:,g}", unit
    return f"{value:,.0f}" if value == round(value) and abs(value) < _PLAIN else f"{value:,g}", ""


def parameters_text(values: Mapping[str, Any]) -> str:
    """Parameters of a policy in short: "window=8, share=0.5"."""
    return ", ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())


def _parts(label: str) -> tuple[str, str]:
    """The name of an axis, and its unit."""
    name, _, unit = label.removesuffix(")").partition(" (") if label.endswith(")") else (label, "", "")
    return name, unit


# --- what was run -----------------------------------------------------------------------------------------------------


def about(runs: pd.DataFrame, axes: Collection[str]) -> str:
    """The settings that the runs of a sweep share: model, machine, engine, memory, batch, lengths, trace and draws."""
    fixed = {name: runs[name].iloc[0] for name in runs.columns if name in SCENARIO_KEYS and name not in axes}
    labels = {label for labels in runs["labels"] for label in json.loads(labels)}
    draws = runs["draw"].nunique()
    parts = [
        " on ".join(fixed[name] for name in ("model", "hardware") if isinstance(fixed.get(name), str)),
        setting_words("engine", fixed["engine"]) if fixed.get("engine") else "",
        _changed(runs, axes, "hardware_overrides", "machine"),
        _changed(runs, axes, "engine_overrides", "engine"),
        "" if set(_MEMORY) & set(axes) else memory_words(fixed["cached_share"], fixed["gpu_memory_gb"]),
        f"batch {fixed['batch']:g}" if "batch" in fixed else "",
        _lengths(runs, axes),
        *(setting_words(name, fixed[name]) for name in _UNUSUAL if pd.notna(fixed.get(name))
          and fixed[name] != getattr(_DEFAULT, name)),
        f"routing of {fixed['trace']}" if "trace" in fixed else "",
        *(label for label in (Label.SYNTHETIC_TRACE, Label.SYNTHETIC_PROMPTS) if label in labels),
        f"{draws} draw{'s' * (draws > 1)}",
    ]
    return ", ".join(filter(None, parts))


def _changed(runs: pd.DataFrame, axes: Collection[str], overrides: str, of: str) -> str:
    """Words for the numbers of the machine or the engine that all runs have changed to the same value."""
    if overrides in axes:
        return ""
    count = len(set.intersection(*(set(json.loads(text).items()) for text in runs[overrides].unique())))
    return f"{count} number{'s' * (count > 1)} of the {of} changed" if count else ""


def memory_words(cached_share: float | None, gpu_memory_gb: float | None) -> str:
    """The memory for experts, by the keys of a scenario; None, or NaN in a table, where one is not set."""
    if pd.notna(cached_share):
        return f"{cached_share:.0%} of the experts cached"
    return f"{gpu_memory_gb:g} GB of GPU memory" if pd.notna(gpu_memory_gb) else _NULLS["gpu_memory_gb"][1]


def short_name(trace: str) -> str:
    """A trace's name without folder and suffix."""
    if trace.startswith("synthetic:"):
        return trace
    return Path(trace).name.removesuffix(".safetensors").removesuffix(".csv").removesuffix(".route")


def _lengths(runs: pd.DataFrame, axes: Collection[str]) -> str:
    """Tokens of prompt and answer, where all runs have the same number."""
    lengths = {name: runs[name].dropna().unique() for name in _LENGTHS if name in runs.columns and name not in axes}
    known = {name: f"{values[0]:g}" for name, values in lengths.items() if len(values) == 1}
    if len(known) == len(_LENGTHS):
        return f"{'+'.join(known.values())} tokens"
    return "".join(f"{count} {name.replace('_', ' ')}" for name, count in known.items())


def tuned(policies: Collection[str], trace: str, sequences: Collection[int]) -> str:
    """A remark where policies are shown on sequences that their parameters were tuned on; otherwise empty."""
    mine = [policy for policy in TUNED_POLICIES if policy in policies]
    if not mine or trace.partition(":")[0] not in TUNED_ON_TRACES or not set(sequences) & set(TUNED_ON_SEQUENCES):
        return ""
    where = f"sequences {TUNED_ON_SEQUENCES[0]} to {TUNED_ON_SEQUENCES[-1]} of {' and '.join(TUNED_ON_TRACES)}"
    return f"{' and '.join(mine)} {'were' if len(mine) > 1 else 'was'} tuned on {where}, some of which are played here"


def sampled(played: int, answer: int, batch: int) -> str:
    """A remark where ``played`` decode steps stand for a longer answer, with the measured error; otherwise empty."""
    if played >= answer:
        return ""
    error = measured_error(played, batch)
    setting = f"{error.steps} steps at batch {error.batch}, measured in {MEASURED_RUNS} runs"
    fewer = f"; fewer than {error.steps} were not measured" if played < error.steps else ""
    return (
        f"{played} of {answer:,} decode steps were played: error of TPOT from {setting}: "
        f"{error.mean:.1%} on average, {error.largest:.1%} at most{fewer}"
    )


def sampled_in(results: pd.DataFrame) -> str:
    """``sampled`` of the run of a sweep with the fewest decode steps, and of these with the smallest batch."""
    fewer = results["sampled_steps"].notna() & (results["decode_steps"] < results["generated_tokens"])
    runs = results[fewer].sort_values(["decode_steps", "batch"])
    lengths = runs[["decode_steps", "generated_tokens", "batch"]].astype(int)
    return "" if runs.empty else sampled(*lengths.iloc[0].tolist())


# --- what a sweep found -----------------------------------------------------------------------------------------------

Policy: TypeAlias = tuple[str, PolicyKind]

TIE = 0.02
NEAR = 0.10
_FEW = 3  # intervals, or policies, that one sentence names


class Interval(NamedTuple):
    """Neighbouring values of an axis with the same fastest policy."""

    policy: Policy
    values: tuple[Any, ...]


def times_table(rows: pd.DataFrame, axis: str, values: Sequence[Any]) -> pd.DataFrame:
    """Mean TPOT (ms): a row a value of ``axis``, a column a (policy, kind); NaN where a policy could not run.

    ``rows`` are those of ``SweepMeans``, of one setting of the other axes.
    """
    columns = {key: mine.set_index(axis)["tpot_ms"] for key, mine in rows.groupby(["policy", "kind"], sort=False)}
    return pd.DataFrame(columns).reindex(pd.Index(list(values), name=axis)).dropna(how="all")


def best_of(times: pd.DataFrame) -> list[Policy]:
    """The very fastest policy at each value."""
    columns: list[Any] = times.idxmin(axis=1).tolist()
    return [(str(policy), PolicyKind(kind)) for policy, kind in columns]


def intervals(times: pd.DataFrame) -> list[Interval]:
    """The fastest policies along the axis."""
    winners: list[Policy] = []
    for best, (_, row) in zip(best_of(times), times.iterrows(), strict=True):
        stays = bool(winners) and row[winners[-1]] <= (1 + TIE) * row.min()
        winners.append(winners[-1] if stays else best)
    runs = groupby(zip(winners, times.index.tolist(), strict=True), key=lambda pair: pair[0])
    return [Interval(policy, tuple(value for _, value in pairs)) for policy, pairs in runs]


def settled_from(times: pd.DataFrame) -> Any | None:
    """The value from which on the policy hardly matters; None if it matters at the last one."""
    near = (times.median(axis=1) <= (1 + NEAR) * times.min(axis=1)).tolist()
    tail = next((count for count, value in enumerate(reversed(near)) if not value), len(near))
    return times.index[len(near) - tail] if tail and times.shape[1] > 2 else None


def fastest(times: pd.DataFrame) -> str:
    """Words for the fastest policies along the axis; of many intervals, for the settings that each is fastest in."""
    parts, axis, lowest = intervals(times), str(times.index.name), times.min(axis=1)
    if len(parts) > _FEW or (len(parts) > 1 and not numeric(times.index.tolist())):
        return tally(part.policy for part in parts for _ in part.values)
    tied = any((times.loc[list(part.values), part.policy] > lowest[list(part.values)]).any() for part in parts)
    first = f"{marked(*parts[0].policy)} is fastest{f' or within {TIE:.0%} of the fastest' if tied else ''}"
    if len(times) == 1:
        return f"{first} at {value_words(axis, times.index[0])}: {lowest.iloc[0]:.1f} ms per token"
    if len(parts) == 1:
        return f"{first} throughout: {lowest.iloc[0]:.1f} to {lowest.iloc[-1]:.1f} ms per token"
    ends = [*(f"below {value_words(axis, after.values[0])}" for after in parts[1:]), "from there on"]
    others = (f"{marked(*part.policy)} {end}" for part, end in zip(parts[1:], ends[1:], strict=True))
    return ", ".join([f"{first} {ends[0]}", *others])


def gain(times: pd.DataFrame) -> str:
    """Words for the change of the lowest TPOT from the first to the last value; empty for a single value."""
    if len(times) == 1:
        return ""
    lowest = times.min(axis=1)
    first, last = lowest.iloc[0], lowest.iloc[-1]
    where = " to ".join(value_words(str(times.index.name), value) for value in (times.index[0], times.index[-1]))
    if abs(first / last - 1) <= TIE:
        return f"from {where} the lowest time per token hardly changes, {first:.1f} to {last:.1f} ms"
    by = f"falls by {first / last:.2f}x" if first > last else f"rises by {last / first:.2f}x"
    return f"from {where} the lowest time per token {by}, from {first:.1f} to {last:.1f} ms"


def hardly_matters(times: pd.DataFrame) -> str:
    """Words for the value from which on the policy hardly matters; empty where it matters at the last one."""
    settled = settled_from(times)
    if settled is None:
        return ""
    where = f"from {value_words(str(times.index.name), settled)} on" if settled != times.index[0] else "throughout,"
    return f"{where} the policy hardly matters: half of the policies are within {NEAR:.0%} of the fastest"


def tally(best: Iterable[Policy], does: str = "is fastest") -> str:
    """The best policy of each setting, counted: "dali is fastest in 3 of 4 settings, smoe ~ in 1"."""
    counts = Counter(best).most_common()
    settings = sum(count for _, count in counts)
    if len(counts) == 1:
        return f"{marked(*counts[0][0])} {does} in {f'all {settings} settings' if settings > 1 else 'the one setting'}"
    named = [f"{marked(*policy)} in {count}" for policy, count in counts[1:_FEW]]
    rest = [f"others in {sum(count for _, count in counts[_FEW:])}"] if len(counts) > _FEW else []
    return ", ".join([f"{marked(*counts[0][0])} {does} in {counts[0][1]} of {settings} settings", *named, *rest])
