"""Speeds in what programs print: llama-bench (JSON, JSON Lines, CSV, Markdown), a server, ``trilane measure``.

Fields of llama-bench are those of its README (ggml-org/llama.cpp, tools/llama-bench).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trilane.common.errors import TrilaneError
from trilane.common.files import check_no_pipe
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

MOST_BYTES = 1_000_000
_MOST_SPEEDS = 200
_MOST_TOKENS_PER_S = 1_000_000
_TABLE_ROW = re.compile(r"^\|.*\|\s*$", re.MULTILINE)
_TEST = re.compile(r"(pp|tg)(\d{1,7})(?: @ d(\d{1,8}))?")
_LOG = re.compile(
    r"(prompt )?eval time =\s*[\d.]+ ms /\s*(\d{1,8}) (?:tokens|runs).*?([\d.]+) tokens per second"
)
_DECODE, _PROMPT = re.compile(r"decode at ([\d,]{1,12}) tokens"), re.compile(r"prompt of ([\d,]{1,12})")


class OutputTextError(TrilaneError):
    """A text with no speeds that can be read."""


class ReadSpeed(NamedTuple):
    """A speed with what the text says of its setting; None for what it does not say.

    ``tokens``: of a prompt, or of an answer; ``depth``: tokens in the KV cache before them.
    """

    decode: bool
    tokens: int
    tokens_per_s: float
    depth: int = 0
    file: str | None = None
    gpu: str | None = None
    cpu: str | None = None
    back_end: str | None = None
    threads: int | None = None
    piece_tokens: int | None = None
    cpu_layers: int | None = None  # N of --n-cpu-moe
    gpu_layers: int | None = None
    kv: str | None = None
    overridden: bool = False  # tensors were placed by -ot
    build: str | None = None
    date: str | None = None

    @property
    def can_be(self) -> bool:
        """True if a machine can have such numbers."""
        return 0 < self.tokens_per_s <= _MOST_TOKENS_PER_S and (self.threads is None or self.threads > 0)


def read_output(path: str | Path) -> list[ReadSpeed]:
    """The speeds in a file. Raises OutputTextError."""
    check_no_pipe(path, OutputTextError)
    if (size := Path(path).stat().st_size) > MOST_BYTES:
        raise OutputTextError(f"{path}: expected at most {MOST_BYTES:,} bytes, got {size:,}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise OutputTextError(f"{path}: expected text, got bytes that are no UTF-8") from None
    return speeds_in(text, str(path))


def speeds_in(text: str, where: str = "the text") -> list[ReadSpeed]:
    """The speeds in a text, which may have other lines around them. Raises OutputTextError."""
    if len(text) > MOST_BYTES:
        raise OutputTextError(f"{where}: expected at most {MOST_BYTES:,} characters, got {len(text):,}")
    found = _first_read(text)
    if not found:
        raise OutputTextError(
            f"{where}: expected the output of llama-bench (best with -o json), a server's timings, or the --json of "
            f"trilane measure --engine llama.cpp; it begins {quoted(text[:60])}"
        )
    if len(found) > _MOST_SPEEDS:
        raise OutputTextError(f"{where}: expected at most {_MOST_SPEEDS} speeds, got {len(found)}")
    if odd := next((one for one in found if not one.can_be), None):
        raise OutputTextError(
            f"{where}: expected speeds above 0 and up to {_MOST_TOKENS_PER_S:,} tokens/s, with one thread or more, got "
            f"{odd.tokens_per_s:g} tokens/s with {odd.threads} threads"
        )
    return found


def _first_read(text: str) -> list[ReadSpeed]:
    """Speeds by the first form that fits; none where no form does."""
    for reader in (_in_json, _in_lines, _in_csv, _in_table, _in_log):
        with suppress(TrilaneError, ValueError, TypeError, OverflowError, csv.Error):
            if found := [*reader(text)]:
                return found
    return []


def _in_json(text: str) -> Iterator[ReadSpeed]:
    start = min((place for place in (text.find("["), text.find("{")) if place >= 0), default=0)
    value = parse_json(text[start:], "output", OutputTextError)
    if isinstance(value, dict) and isinstance(value.get("timings"), dict):
        yield from _timings(value["timings"])
    elif isinstance(value, dict) and "settings" in value:
        yield from _of_measure(value)
    else:
        yield from _tests(value if isinstance(value, list) else [value])


def _in_lines(text: str) -> Iterator[ReadSpeed]:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    yield from _tests(parse_json(line, "output", OutputTextError) for line in lines)


def _in_csv(text: str) -> Iterator[ReadSpeed]:
    lines = text.splitlines()
    first = next((place for place, line in enumerate(lines) if line.startswith("build_commit,")), None)
    if first is not None:
        yield from _tests(csv.DictReader(lines[first:], strict=True))


def _tests(values: Iterable[Any]) -> Iterator[ReadSpeed]:
    """Yield tests of llama-bench: of a prompt, or of an answer, not of both at once."""
    for test in values:
        if not isinstance(test, Mapping) or "avg_ts" not in test:
            continue
        prompt, generated = _whole(test, "n_prompt") or 0, _whole(test, "n_gen") or 0
        if bool(prompt) == bool(generated):
            continue
        override = str(test.get("tensor_buft_overrides") or "none")
        yield ReadSpeed(
            decode=generated > 0, tokens=prompt or generated, tokens_per_s=float(test["avg_ts"]),
            depth=_whole(test, "n_depth") or 0, file=_text(test, "model_filename"), gpu=_text(test, "gpu_info"),
            cpu=_text(test, "cpu_info"), back_end=_text(test, "backends"), threads=_whole(test, "n_threads"),
            piece_tokens=_whole(test, "n_ubatch"), cpu_layers=_whole(test, "n_cpu_moe"),
            gpu_layers=_whole(test, "n_gpu_layers"), kv=_text(test, "type_k"), overridden=override != "none",
            build=_text(test, "build_commit"), date=(_text(test, "test_time") or "")[:10] or None,
        )


def _in_table(text: str) -> Iterator[ReadSpeed]:
    """Yield the rows of llama-bench's Markdown, whose first line names the columns."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in _TABLE_ROW.findall(text)]
    head = next((line for line in lines if "test" in line and "t/s" in line), None)
    for line in lines:
        row = dict(zip(head or (), line, strict=False))
        test = _TEST.fullmatch(row.get("test", ""))
        if test is None or len(line) != len(head or ()):
            continue
        yield ReadSpeed(
            decode=test[1] == "tg", tokens=int(test[2]), depth=int(test[3] or 0),
            tokens_per_s=float(row["t/s"].split()[0]), back_end=row.get("backend"), threads=_whole(row, "threads"),
            piece_tokens=_whole(row, "n_ubatch"), cpu_layers=_whole(row, "n_cpu_moe"), gpu_layers=_whole(row, "ngl"),
            kv=row.get("type_k"), overridden="ot" in row,
        )


def _timings(timings: Mapping[str, Any]) -> Iterator[ReadSpeed]:
    """Yield the timings of one request of llama-server."""
    cached = _whole(timings, "cache_n") or 0
    prompt, generated = _whole(timings, "prompt_n") or 0, _whole(timings, "predicted_n") or 0
    if prompt and "prompt_per_second" in timings:
        yield ReadSpeed(False, prompt, float(timings["prompt_per_second"]), cached)
    if generated and "predicted_per_second" in timings:
        yield ReadSpeed(True, generated, float(timings["predicted_per_second"]), cached + prompt)


def _in_log(text: str) -> Iterator[ReadSpeed]:
    """Yield the speeds of a server's log: a prompt, then the answer to it."""
    depth = 0
    for prompt, tokens, rate in _LOG.findall(text):
        yield ReadSpeed(not prompt, int(tokens), float(rate), 0 if prompt else depth)
        depth = int(tokens) if prompt else 0


def _of_measure(value: Mapping[str, Any]) -> Iterator[ReadSpeed]:
    """Yield the speeds of ``trilane measure --engine llama.cpp --json``."""
    settings = value["settings"]
    known: dict[str, Any] = {"file": _text(value, "gguf"), "threads": _whole(value, "threads"),
             "piece_tokens": _whole(settings, "piece_tokens"), "cpu_layers": _whole(settings, "cpu_layers"),
             "gpu_layers": 99 if settings.get("gpu") else 0, "kv": _text(settings, "kv")}
    for name, result in value.items():
        decode, prompt = _DECODE.fullmatch(name), _PROMPT.fullmatch(name)
        if decode:
            yield ReadSpeed(True, 16, float(result["tokens_per_s"]), _plain(decode[1]), **known)
        elif prompt:
            yield ReadSpeed(False, _plain(prompt[1]), float(result["tokens_per_s"]), **known)


def _plain(digits: str) -> int:
    return int(digits.replace(",", ""))


def _whole(values: Mapping[str, Any], key: str) -> int | None:
    text = str(values.get(key, ""))
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None


def _text(values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    return json.dumps(value).strip('"')[:300] if value not in (None, "") else None
