"""The page of one run, from its times down to the details."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sim.runs.run import Run
from sim.runs.vocabulary import Label
from trilane.common.units import MIB
from trilane.output.pages.output import Part, heading, mebibytes, number, pairs, percent

LOSSES = ("substituted", "speculated_wrongly", "degraded", "dropped")


def run_page(about: str, row: Mapping[str, Any]) -> list[Part]:
    """The page of a run, given as ``Run.to_dict``."""
    labels = f"  ({', '.join(row['labels'])})" if row["labels"] else ""
    facts = [*_times(row), *_approximation(row), *_experts(row), *_lanes(row)]
    return [heading(f"{row['policy']}{labels}: {about}"), pairs(facts)]


def _times(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    null = row.get("null_model_tpot_ms")
    drafted = f" of {number(row['tokens_per_step'], 2)} tokens" if Label.SPECULATIVE in row["labels"] else ""
    return [
        ("time to first token", _ms(row["ttft_ms"], row.get("lower_bound_ttft_ms"))),
        ("time per output token", _ms(row["tpot_ms"], row.get("lower_bound_tpot_ms"))),
        *([] if null is None else [("  null model", f"{number(null, 2)} ms (bandwidths and active bytes alone)")]),
        ("tokens/s", f"{number(row['tokens_per_s'])} per sequence, {number(row['throughput_tokens_per_s'])} in all"),
        ("steps", f"{row['steps']} ({row['decode_steps']} decode{drafted})"),
    ]


def _approximation(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Shares of the model's own routing that were not followed; nothing if the run keeps the routing."""
    if row["approximated_weight_share"] is None:
        return []
    shares = {cause: row[f"{cause}_weight_share"] for cause in (*LOSSES, "stale", "deferred", "narrowed")}
    causes = ", ".join(f"{cause.replace('_', ' ')} {percent(share, 1)}" for cause, share in shares.items() if share)
    tokens = percent(row["approximated_token_share"], 1)
    weight = percent(row["approximated_weight_share"], 1)
    return [("approximated, decode", f"{weight} of the routing weight{f' ({causes})' if causes else ''}, "
                                     f"{tokens} of the tokens of a layer")]


def _ms(value: float | None, bound: float | None) -> str:
    least = "" if bound is None else f" (at least {number(bound, 2)} ms for policies that keep the routing)"
    return f"{number(value, 2)} ms{least}"


def _experts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    kinds = ("resident", "token", "gpu", "served")
    outcomes = ("used", "late", "wasted", "withdrawn")
    causes = ("demand", "prefetch_used", "prefetch_wasted", "swap")
    copied = {cause: row[f"pcie_{cause}_bytes_per_token"] for cause in causes}
    return [
        ("GPU memory", f"{row['cache_bytes'] / MIB:,.0f} MiB expert cache ({row['cache_slots']} slots), "
                       f"{row['staging_bytes'] / MIB:,.0f} MiB staging"),
        ("hit rate, decode", ", ".join(f"{kind} {percent(row[f'decode_{kind}_hit_rate'], 1)}" for kind in kinds)),
        ("prefetches", ", ".join(f"{row[f'prefetches_{outcome}']} {outcome}" for outcome in outcomes)),
        ("copied per token", ", ".join(f"{c.replace('_', ' ')} {mebibytes(v)}" for c, v in copied.items()) + " MiB"),
        *_disk(row),
    ]


def _disk(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The memory of the host above a disk, of a run that has one."""
    if "ram_hit_rate" not in row:
        return []
    read, ahead = row["disk_bytes_per_token"], row["disk_ahead_bytes_per_token"]
    return [
        ("host memory", f"held {percent(row['ram_hit_rate'], 1)} of the experts that the CPU computed or a layer had "
                        f"copied, decode"),
        ("read per token", f"{mebibytes(read)} MiB from the disk, of which {mebibytes(ahead)} ahead"),
    ]


def _lanes(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    busy = {key.removesuffix("_busy_share"): row[key] for key in row if re.fullmatch(r"[^_]+_busy_share", key)}
    waits = [key.split("_")[1] for key in row if re.fullmatch(r"stall_[^_]+_ms", key)]
    stalls = ((lane, row[f"stall_{lane}_ms"], row[f"stall_{lane}_share"]) for lane in waits)
    return [
        ("lanes busy", ", ".join(f"{lane} {percent(share)}" for lane, share in busy.items())),
        ("GPU waits for", ", ".join(f"{lane} {number(ms, 2)} ms ({percent(part)})" for lane, ms, part in stalls)),
        ("planning", f"{percent(row['plan_overhead_share'], 1)} of the time"),
    ]


def record_of(run: Run) -> dict[str, Any]:
    """A run as verbs write it with ``--json``: the resolved scenario, the numbers, the approximation of each layer."""
    layers = None if run.routing_errors is None else run.routing_errors.to_dict("records")
    return {"scenario": run.scenario.to_dict(), "run": run.to_dict(), "approximation": layers}
