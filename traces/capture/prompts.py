"""Prompts for capture: JSON lines ``{"text": ..., "domain": ...}``, or plain text with one prompt a line.

Sketches of text in a few kilobytes detect that a model is evaluated on text that it was calibrated on. A text is cut
into all its passages of ``PASSAGE`` characters, white space left out, and a sketch keeps the ``KEPT`` smallest of their
hashes (a bottom-k sketch: Broder, "On the resemblance and containment of documents", 1997). The choice depends on the
text alone, not on the order in which it was read or on where its windows began.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.capture.settings import CaptureError
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

PASSAGE = 50  # characters
KEPT = 4096
_BYTES = 5  # of a hash: two of 10^12 are rarely equal
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BATCH = 1 << 18  # hashes that are collected before the smallest are chosen

Hashes = NDArray[np.uint64]
MOST_SHARED = 0.02  # of the passages looked up: set phrases may coincide


@dataclass(frozen=True, eq=False)
class TextSketch:
    """The smallest hashes of what was read, ascending; all of them if they are fewer than ``KEPT``."""

    hashes: Hashes

    def shared(self, texts: Iterable[str]) -> tuple[int, int]:
        """(found, looked up): passages of ``texts`` in the sketch, and those that would be in it if read."""
        looked_up = smallest(texts, None)
        if len(self.hashes) == KEPT:
            looked_up = looked_up[looked_up <= self.hashes[-1]]
        return int(np.isin(looked_up, self.hashes).sum()), len(looked_up)

    def write(self) -> str:
        """The hashes as text for a file's metadata."""
        return base64.b64encode(self.hashes.astype(">u8").view(np.uint8).reshape(-1, 8)[:, -_BYTES:].tobytes()).decode()


def read_sketch(written: str) -> TextSketch:
    """The sketch that ``TextSketch.write`` wrote. Raises ValueError on anything else."""
    values = np.frombuffer(base64.b64decode(written, validate=True), np.uint8)
    full = np.zeros((len(values) // _BYTES, 8), np.uint8)
    full[:, -_BYTES:] = values.reshape(-1, _BYTES)
    return TextSketch(full.reshape(-1).view(">u8").astype(np.uint64))


def sketch(texts: Iterable[str]) -> TextSketch:
    """The sketch of texts that were read."""
    return TextSketch(smallest(texts, KEPT))


def smallest(texts: Iterable[str], count: int | None) -> Hashes:
    """The ``count`` smallest hashes (None: all) of the texts' passages, ascending, each once."""
    kept, waiting = np.zeros(0, np.uint64), 0
    pending: list[Hashes] = []
    for text in texts:
        pending.append(hashes(text))
        waiting += len(pending[-1])
        if waiting >= _BATCH:
            kept, pending, waiting = np.unique(np.concatenate([kept, *pending]))[:count], [], 0
    return np.unique(np.concatenate([kept, *pending]))[:count]


def hashes(text: str) -> Hashes:
    """One hash for every passage of a text; one for the whole of a shorter text."""
    characters = np.frombuffer("".join(text.split()).encode("utf-32-le"), "<u4").astype(np.uint64)
    width = min(PASSAGE, len(characters))
    if not width:
        return characters
    total = np.zeros(len(characters) - width + 1, np.uint64)
    for at in range(width):
        total = total * _FACTOR + characters[at : at + len(total)]
    return _scattered(total) >> np.uint64(64 - 8 * _BYTES)


def _scattered(values: Hashes) -> Hashes:
    """Mixed so that every bit depends on all others (the finaliser of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Prompt:
    """A text and the domain that it belongs to ("" where unknown)."""

    text: str
    domain: str = ""


@dataclass(frozen=True)
class PromptFile:
    """The prompts of one file; ``digest`` identifies its content."""

    path: Path
    prompts: tuple[Prompt, ...]
    digest: str

    @property
    def description(self) -> str:
        """Number, file and digest of the prompts, for the provenance of a trace."""
        return f"{len(self.prompts)} prompts of {self.path.name} (sha256 {self.digest})"

    @property
    def facts(self) -> dict[str, Any]:
        """The file and the domains of its prompts, for the provenance of a trace."""
        return {"prompts": self.description, "domains": [prompt.domain for prompt in self.prompts]}

    @property
    def sketch(self) -> TextSketch:
        """A sketch of all prompts, kept with vectors that are calibrated on them."""
        return sketch(p.text for p in self.prompts)

    def overlap(self, read: TextSketch | None) -> str:
        """Part of the prompts that was read in calibration, for the provenance of a trace."""
        if read is None:
            return "not checked: the vectors do not name the text that they are from"
        matches, looked_up = read.shared(p.text for p in self.prompts)
        return f"{matches} of {looked_up} passages that were looked up"


def read_prompts(path: str | Path) -> PromptFile:
    """Read a prompt file. Raises CaptureError naming the line that is not a prompt."""
    path = Path(path)
    if not path.is_file():
        raise CaptureError(f"{path}: expected a file of prompts, found none there")
    data = path.read_bytes()
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CaptureError(
            f"{path} line {line}: expected prompts as UTF-8 text, got the byte {data[error.start]:#04x}; "
            "name a text file, or save it as UTF-8"
        ) from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise CaptureError(f"{path}: expected at least one prompt, the file is empty")
    parse = _from_json if path.suffix in (".jsonl", ".json") else lambda _where, line: Prompt(line)
    prompts = tuple(parse(f"{path} line {n}", line) for n, line in numbered)
    return PromptFile(path, prompts, hashlib.sha256(data).hexdigest()[:16])


def check_disjoint(evaluated: PromptFile, calibration: PromptFile) -> None:
    """Raise CaptureError if a prompt is in both files: what is forecast must not have been calibrated on."""
    common = {p.text for p in evaluated.prompts} & {p.text for p in calibration.prompts}
    if common:
        raise CaptureError(
            f"{calibration.path}: {len(common)} calibration prompts are also in {evaluated.path}, the first "
            f"{quoted(min(common))}; calibrate on other text"
        )


def check_unseen(evaluated: PromptFile, read: TextSketch | None, where: Path) -> None:
    """Raise CaptureError if more than ``MOST_SHARED`` of the prompts was ``read`` when ``where`` was calibrated.

    Where that is not known there is no check, and the trace says so (``PromptFile.overlap``).
    """
    matches, looked_up = read.shared(p.text for p in evaluated.prompts) if read else (0, 0)
    if matches > MOST_SHARED * looked_up:
        raise CaptureError(
            f"{where}: was calibrated on text of the prompts in {evaluated.path} ({matches} of {looked_up} passages "
            "that were looked up); calibrate on other text"
        )


def _from_json(where: str, line: str) -> Prompt:
    values = parse_json(line, where, CaptureError, below=2**64)  # other keys, such as numbers of texts, are not read
    text = values.get("text") if isinstance(values, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise CaptureError(f'{where}: expected {{"text": ..., "domain": ...}} with a text, got {quoted(line)}')
    return Prompt(text, str(values.get("domain", "")))
