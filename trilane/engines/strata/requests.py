"""Requests that Strata answered, a row each, with what its log says of their windows.

With R entries, pairs of a row and an expert that it chose, R / (layers x top-k) rows were computed: a token and its
drafts in each of W windows. Look-ups are the entries that did not cross the link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from trilane.common.csv_files import read_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import Count, Name, above, at_least, at_most, between

BUNDLED = Path(__file__).with_name("requests.csv")
FEWEST_WINDOWS = 20  # of a request that tells times: fewer are those of a short answer
_Number = Annotated[float, between(0, 1e12)]
_Positive = Annotated[float, above(0), at_most(1e12)]
_Tokens = Annotated[int, at_least(0), at_most(2**31)]
STRATA_WEIGHTS = ("iq3_s", "iq3_xxs", "iq2_xs", "q2_0")  # published for Strata; unsloth's keep their names
USUAL_KV_BITS = 8.25  # int8, of which 64 share a scale of 16 bits (include/strata/kernels/kv_stream.hpp)
_KV_TOKENS = re.compile(r"(\d+) cells in VRAM")


class RequestsError(TrilaneError):
    """A file of requests that cannot be read; the message says where and why."""


class WindowCounts(NamedTuple):
    """Mean counts of a window. Entries are pairs of a row and an expert that it chose, of a layer."""

    rows: float
    drafts: float
    hits: float  # entries whose expert the GPU has
    cpu: float  # entries that the CPU computes
    pcie: float  # entries whose expert crosses the link


@dataclass(frozen=True, kw_only=True)
class StrataRequest:
    """One request, or the median of some (``stat``); parts by their titles, times in ms.

    ``accepted`` of ``offered`` drafts; ``hits`` of ``lookups`` entries; ``pcie_reads`` more crossed the link, None
    where the log does not say. ``prompt_tokens``: all of the prompt; ``prompt_ms``: of those that were read.
    """

    id: Name
    stat: Literal["request", "median", "prompt"] = "request"
    source: str = ""
    engine_version: str = ""
    os: str = ""
    model: Name = "qwen3.8-flash-next"
    quant: Name
    gpu: str
    n_gpus: Count = 1
    gpu_vram_gb: _Positive | None = None
    pcie_gb_s: _Positive | None = None
    cpu: str = ""
    workers: Count | None = None
    ram: str = ""
    ram_gb: _Number | None = None
    tier: str = ""
    context: Count | None = None
    kv: str = ""
    cache_slots: _Tokens | None = None
    cache_gib: _Positive | None = None
    pcie_frac: Annotated[float, between(0, 1)] | None = None
    spec_min_p: Annotated[float, between(0, 1)] | None = None
    prompt_tokens: _Tokens | None = None
    gen_tokens: _Tokens | None = None
    prompt_ms: _Number | None = None
    pp_tok_s: _Number | None = None
    decode_ms: _Number | None = None
    tg_tok_s: _Number | None = None
    accepted: _Tokens | None = None
    offered: _Tokens | None = None
    hits: _Tokens | None = None
    lookups: _Tokens | None = None
    pcie_reads: _Tokens | None = None
    note: str = ""

    @cached_property
    def shape(self) -> ModelShape:
        """The model in its weights, with its KV cache."""
        weights = f"gsq-{self.quant}" if self.quant in STRATA_WEIGHTS else self.quant
        return replace(load_model(f"{self.model}@{weights}"), kv_bits=USUAL_KV_BITS)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values the card has, while the host has all; 0: the card has all."""
        return int(match[1]) if (match := _KV_TOKENS.search(self.kv)) else 0

    @property
    def machine(self) -> str:
        """The machine in words, under which its rows are counted."""
        cards = f"{self.n_gpus}x " if self.n_gpus > 1 else ""
        return f"{cards}{self.gpu}, {self.cpu or 'CPU not named'}"

    @property
    def read_tokens(self) -> int | None:
        """Tokens of the prompt that were read; the others were known from an earlier request."""
        if self.pp_tok_s is not None and self.prompt_ms is not None:
            return round(self.pp_tok_s * self.prompt_ms / 1000)
        return self.prompt_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens in the KV cache in the middle of the answer."""
        return (self.prompt_tokens or 0) + (self.gen_tokens or 0) // 2

    @property
    def read_ms(self) -> float | None:
        """Time of the prompt's tokens that were read."""
        if self.prompt_ms is not None or self.pp_tok_s is None or not self.prompt_tokens:
            return self.prompt_ms
        return self.prompt_tokens / self.pp_tok_s * 1000

    @cached_property
    def windows(self) -> int | None:
        """Windows of the answer; None where the row does not say.

        Rows less drafts, where all entries are known; else tokens less accepted drafts, up to 3 too few where a limit
        of tokens cut the last window.
        """
        if None in (self.accepted, self.offered, self.lookups, self.gen_tokens):
            return None
        entries = self.shape.moe_layers * self.shape.top_k
        if self.pcie_reads is not None:
            return (self.lookups + self.pcie_reads) // entries - self.offered  # type: ignore[operator]
        return self.gen_tokens - self.accepted  # type: ignore[operator]

    @property
    def window_ms(self) -> float | None:
        """Time of a window, with its drafts; None where windows are not known, or too few."""
        if self.windows is None or not self.decode_ms or self.windows < FEWEST_WINDOWS:
            return None
        return self.decode_ms / self.windows

    @property
    def counts(self) -> WindowCounts | None:
        """WindowCounts of a window and, of entries, a layer; None where ``window_ms`` is, or no hits are known."""
        if self.window_ms is None or self.hits is None or not self.windows:
            return None
        hits, lookups, offered = self.hits, self.lookups or 0, self.offered or 0
        layers, rows = self.shape.moe_layers, self.windows + offered
        entries = rows * layers * self.shape.top_k
        each = self.windows * layers
        return WindowCounts(
            rows / self.windows, offered / self.windows, hits / each, (lookups - hits) / each,
            max(entries - lookups, 0) / each,
        )


def read_requests(path: str | Path = BUNDLED) -> list[StrataRequest]:
    """The rows of a CSV file; columns that are not known are passed over. Raises RequestsError."""
    return read_csv(StrataRequest, path, "a CSV file of Strata's requests", RequestsError)
