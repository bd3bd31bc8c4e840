"""Importers of other programs' routing logs, in a table of formats."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from traces.importers.token_routes import played_as_decode
from traces.layout import TraceError
from traces.trace import Trace
from trilane.common.names import unknown
from trilane.common.quoting import quoted

FOLDER = "/"  # stands for the suffix of a folder
EXAMPLE = ("token,layer,experts,weights", "0,0,3 1,0.7 0.3", "0,1,0 7,0.6 0.4")  # of the format rows
_BEGINNING = 1 << 16  # bytes of a file that formats are told apart by


class Format(NamedTuple):
    """A kind of log. ``sign``, a pattern in the beginning of its files or in the list of its folder's, distinguishes it
    from others with the same suffix.
    """

    importer: str  # module and function
    suffixes: tuple[str, ...]
    sign: str


FORMATS = {
    "route-trace": Format("route_trace_v1.import_route_trace", (".csv",), r"\A# route_trace"),
    "llama-cpp": Format("llama_cpp.import_llama_cpp", (".csv",), r"\A-?\d+(,\d+)+\s"),
    "moe-beyond": Format("datasets.import_moe_beyond", (".csv", FOLDER), r"\ALayer ID,|^prompt_\d+_data\.csv$"),
    "vllm": Format("servers.import_vllm", (".json", ".jsonl", ".npz"), r'"choices"|(prompt|generated)_\d+\.npy'),
    "sglang": Format("servers.import_sglang", (".json", ".jsonl"), '"meta_info"'),
    "sglang-recorder": Format("servers.import_sglang_recorder", (".pt", ".npz"), r"topk_ids\.npy"),
    "megatron": Format("servers.import_megatron", (".jsonl",), '"num_tokens"'),
    "moe-cache-eval": Format("datasets.import_moe_cache_eval", (".json", FOLDER), r'"shards"|^manifest\.json$'),
    "parquet-layers": Format("datasets.import_parquet_layers", (FOLDER,), r"^layer_\d+\.parquet$"),
    "rows": Format(
        "rows.import_rows", (".csv", ".jsonl"), r'\A(?=[^\n]*\blayer\b)(?=[^\n]*\btoken\b)[^\n]*\bexperts\b'
    ),
}


def importable(path: str | Path) -> bool:
    """True for a file with the suffix of a format, and for a folder with its files."""
    path = Path(path)
    return bool(_formats_of(path) if path.is_dir() else _with_suffix(path.suffix))


def import_trace(
    path: str | Path, log_format: str | None = None, *, model: str | None = None, prompt_tokens: int | None = None
) -> Trace:
    """Read a log; its format is known by its suffix and its beginning unless it is named.

    ``model``: the model that was recorded, a name or a path, for formats that leave out its sizes.
    ``prompt_tokens``: of a log of prompts alone, how many tokens of each stay one; the others are marked as decode.
    Raises TraceError for an unknown format or a faulty file, ShapeError for an unknown model.
    """
    path = Path(path)
    if not (path.is_file() or path.is_dir()):
        raise TraceError(f"{path}: expected a log to import, found no file or folder there")
    if path.is_file() and not path.stat().st_size:
        raise TraceError(f"{path}: expected a log to import, the file is empty; record it again")
    if log_format is not None and log_format not in FORMATS:
        raise TraceError(unknown("format", log_format, FORMATS))
    module, _, function = FORMATS[log_format or _format_of(path)].importer.partition(".")
    trace: Trace = getattr(import_module(f"{__name__}.{module}"), function)(path, model)
    return trace if prompt_tokens is None else played_as_decode(trace, prompt_tokens)


def _format_of(path: Path) -> str:
    """The one format that a log looks like."""
    formats = _formats_of(path)
    if len(formats) != 1:
        raise TraceError(
            f"{path}: expected a log of one of the formats {', '.join(FORMATS)}, this looks like "
            f"{' or '.join(formats) or 'none of them'}: it begins {quoted(_beginning(path)[:60])}; "
            f"name one with --format; simplest form to convert to: {' / '.join(EXAMPLE)}"
        )
    return formats[0]


def _formats_of(path: Path) -> list[str]:
    """The formats that a log looks like; a suffix of one format alone is enough."""
    formats = _with_suffix(FOLDER if path.is_dir() else path.suffix)
    if len(formats) == 1:
        return formats
    beginning = _beginning(path)
    return [name for name in formats if re.search(FORMATS[name].sign, beginning, re.MULTILINE)]


def _with_suffix(suffix: str) -> list[str]:
    return [name for name, it in FORMATS.items() if suffix.lower() in it.suffixes]


def _beginning(path: Path) -> str:
    if path.is_dir():
        return "\n".join(sorted(file.name for file in path.iterdir()))[:_BEGINNING]
    with path.open("rb") as file:
        return file.read(_BEGINNING).decode("utf-8", "replace")
