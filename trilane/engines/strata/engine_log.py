"""Requests from a log of Strata's engine: one row for each pair of lines on a prompt and on the hits of its answer.

What a start of the engine prints until ``session is up`` holds for the requests behind it: version, slots, share of
misses, workers, link. The first request of a start warms up, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from trilane.common.csv_files import write_csv
from trilane.common.errors import ErrorClass
from trilane.common.files import check_no_pipe
from trilane.common.schema import from_dict
from trilane.engines.strata.requests import RequestsError, StrataRequest

_MOST_BYTES = 64 * 2**20
_STARTS = {  # of a line before the session is up: columns and how a value is read
    "gpu": re.compile(r"GPU 0: (?:NVIDIA )?(?:GeForce )?(?:AMD Radeon (?=RX))?(.+?)(?: \(|$)"),
    "pcie_gb_s": re.compile(r"PCIe probe: ([\d.]+) GB/s"),
    "cache_slots": re.compile(r"expert cache (\d+) slots"),
    "workers": re.compile(r"(\d+) expert-pool workers"),
    "quant": re.compile(r"weights loaded from .*[/\\](\w+) \("),
    "pcie_frac": re.compile(r"-> pcie_frac ([\d.]+)"),
}
_PROMPT = re.compile(
    r"strata serve: prompt (?P<prompt_tokens>\d+) tokens = \d+ reused \+ (?P<read>\d+) read in (?P<prompt_ms>\d+) ms "
    r".*?, (?P<gen_tokens>\d+) generated in (?P<decode_ms>\d+) ms "
    r".*?drafts accepted (?P<accepted>\d+) of (?P<offered>\d+)"
)
_HITS = re.compile(r"decode expert cache hit rate: [\d.]+% \((?P<hits>\d+) hits / (?P<lookups>\d+) lookups\)")
_READS = re.compile(r"; (\d+) more read by the GPU over PCIe")
_UP = re.compile(r"session is up \(engine ([\w.-]+)\)")


def is_log(path: str | Path) -> bool:
    """True for a file that is a log by its name."""
    return Path(path).suffix in (".log", ".txt")


def is_of_strata(text: str) -> bool:
    """True for the text of a log that has lines of Strata's engine."""
    return "strata serve" in text or _UP.search(text) is not None


def log_text(path: str | Path, what: str, error: ErrorClass) -> str:
    """The text of a log, which is ``what`` in words; bytes that are no UTF-8 are replaced. Raises ``error``."""
    check_no_pipe(path, error)
    try:
        if (size := Path(path).stat().st_size) > _MOST_BYTES:
            raise error(f"{path}: expected at most {_MOST_BYTES:,} bytes, got {size:,}")
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as fault:
        raise error(f"{path}: expected {what}, which cannot be read: {fault.strerror}") from None


def read_log(path: str | Path) -> list[StrataRequest]:
    """The requests of a log. Raises RequestsError for a file that has none."""
    lines = log_text(path, "a log of Strata's engine", RequestsError).splitlines()
    rows = list(_requests(lines, Path(path).name))
    if not rows:
        raise RequestsError(
            f"{path}: expected a log of Strata's engine with lines such as 'strata serve: prompt ... tokens = ...' "
            f"after 'session is up', got none"
        )
    return rows


def _requests(lines: Iterable[str], name: str) -> Iterator[StrataRequest]:
    start: dict[str, Any] = {}
    prompt: re.Match[str] | None = None
    up = asked = number = 0
    for line in lines:
        if match := _UP.search(line):
            start["engine_version"], up, asked = match[1], 1, 0
        elif match := _PROMPT.search(line):
            prompt, asked = match, asked + 1
        elif (match := _HITS.search(line)) and prompt and up and asked > 1:
            number += 1
            yield _row(f"{name}-{number}", start, prompt, match, _READS.search(line))
        else:
            found = {column: match[1] for column, pattern in _STARTS.items() if (match := pattern.search(line))}
            start |= {column: _value(column, text) for column, text in found.items()}


def _row(
    name: str, start: dict[str, Any], prompt: re.Match[str], hits: re.Match[str], reads: re.Match[str] | None
) -> StrataRequest:
    counts: dict[str, Any] = {column: int(text) for column, text in (prompt.groupdict() | hits.groupdict()).items()}
    read = counts.pop("read")
    speed = read / counts["prompt_ms"] * 1000 if counts["prompt_ms"] else None
    known = {"gpu": "", "quant": "iq3_s", **start}
    reads_more = int(reads[1]) if reads else None
    cells = {"id": name, "pcie_reads": reads_more, "pp_tok_s": speed, **known, **counts}
    return from_dict(StrataRequest, cells, name, RequestsError)


def _value(column: str, text: str) -> Any:
    """Text as its column has it; what is no number stays, for the schema to refuse."""
    if column in ("gpu", "quant"):
        return text.lower() if column == "quant" else text
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return text


def write_requests(requests: Iterable[StrataRequest], path: str | Path) -> None:
    """A CSV file of requests, for parts of the machine to be filled in. Raises OSError."""
    names = [field.name for field in fields(StrataRequest)]
    cells = ([("" if (cell := getattr(one, name)) is None else cell) for name in names] for one in requests)
    write_csv([names, *cells], path)
