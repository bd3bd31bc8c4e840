"""Prompts for capture: JSON lines ``{"text": ..., "domain": ...}``, or plain text with one prompt a line."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.capture.settings import CaptureError
from traces.capture.text_sketch import TextSketch, sketch
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

MOST_SHARED = 0.02  # of the passages looked up: set phrases may coincide


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
        """For the provenance of a trace."""
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
        """How much of the prompts was read in calibration, for the provenance of a trace."""
        if read is None:
            return "not checked: the vectors do not name the text that they are from"
        found, asked = read.shared(p.text for p in self.prompts)
        return f"{found} of {asked} passages that were looked up"


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
    found, asked = read.shared(p.text for p in evaluated.prompts) if read else (0, 0)
    if found > MOST_SHARED * asked:
        raise CaptureError(
            f"{where}: was calibrated on text of the prompts in {evaluated.path} ({found} of {asked} passages that "
            "were looked up); calibrate on other text"
        )


def _from_json(where: str, line: str) -> Prompt:
    values = parse_json(line, where, CaptureError, below=2**64)  # other keys, such as numbers of texts, are not read
    text = values.get("text") if isinstance(values, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise CaptureError(f'{where}: expected {{"text": ..., "domain": ...}} with a text, got {quoted(line)}')
    return Prompt(text, str(values.get("domain", "")))
