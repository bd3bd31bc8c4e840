"""Finished prompts of a capture, kept next to its output until all are done, so that a killed one can go on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from traces.capture.settings import CaptureError
from trilane.common.files import atomic_path

Rows = dict[str, NDArray[Any]]


class PromptParts:
    """Rows by the number of their prompt, in ``OUTPUT.parts``. ``about``: all that they depend on, JSON-ready.

    Raises CaptureError where the folder holds parts of another capture.
    """

    def __init__(self, output: Path, about: Mapping[str, Any]) -> None:
        self.folder = output.with_name(f"{output.name}.parts")
        self._digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.folder.mkdir(exist_ok=True)

    def load(self, number: int) -> Rows | None:
        """The rows of a prompt that is done. Raises CaptureError for those of another capture, or damaged ones."""
        path = self._path(number)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="np") as file:
                same = (file.metadata() or {}).get("capture") == self._digest
                rows = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise CaptureError(f"{path}: expected a part of a capture, got: {error}; remove {self.folder}") from None
        if not same:
            raise CaptureError(
                f"{path}: expected a part of this capture, got one of another model, prompts or settings; "
                f"remove {self.folder}, or repeat the command that made it"
            )
        return rows

    def save(self, number: int, rows: Rows) -> None:
        with atomic_path(self._path(number)) as aside:
            save_file(rows, aside, {"capture": self._digest})

    def remove(self) -> None:
        """All is written elsewhere."""
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"
