"""Loading of causal language models of the Hugging Face library for capture, and their description."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from traces.capture.layers import MoeLayer, config_value, find_moe_layers
from traces.capture.prompts import PromptFile
from traces.capture.settings import CaptureError
from trilane.common.errors import ErrorClass

# For every call of the library that reads a checkpoint: no file is run or unpickled. By default it asks on a terminal
# whether to run the checkpoint's own code, and reads pickled weights where there are no others.
NO_CODE: Any = {"trust_remote_code": False}
NO_PICKLE: Any = {**NO_CODE, "use_safetensors": True}


@dataclass(frozen=True)
class Loaded:
    """A model ready to run. ``weight_bits``: of its checkpoint, whatever type it runs in."""

    name: str
    revision: str
    model: Any
    tokenizer: Any
    layers: list[MoeLayer]
    weight_bits: int

    def tokenize(self, prompts: PromptFile, limit: int) -> list[list[int]]:
        """The first ``limit`` tokens of every prompt. Raises CaptureError on a prompt without tokens."""
        ids = [list(self.tokenizer(p.text)["input_ids"][:limit]) for p in prompts.prompts]
        if empty := [n for n, tokens in enumerate(ids) if not tokens]:
            raise CaptureError(f"{prompts.path}: prompt {empty[0]} has no tokens; remove it")
        return ids

    def describe(self) -> dict[str, Any]:
        """Model, revision and libraries, for the provenance of a trace."""
        return {
            "model": self.name,
            "revision": self.revision,
            "model_class": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device).partition(":")[0],
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": np.__version__,
            },
        }


def load(model: str | Path, dtype: str = "auto", name: str = "", **options: Any) -> Loaded:
    """Load ``model``, a folder or a hub id, to run in ``dtype``; ``options`` go to ``from_pretrained`` (``revision``,
    ``device_map``...). Raises CaptureError if the library cannot load it, or if it has no mixture that capture knows.
    """
    where = str(model)
    revision = {"revision": options["revision"]} if options.get("revision") else {}
    with library_errors(where, CaptureError):
        config = AutoConfig.from_pretrained(where, **NO_CODE, **revision)
        loaded = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **NO_PICKLE, **options).train(False)
        tokenizer = AutoTokenizer.from_pretrained(where, **NO_CODE, **revision)
    stored = config_value(config.get_text_config(), "dtype", default=None) or loaded.dtype
    bits = torch.empty(0, dtype=stored).element_size() * 8
    layers = find_moe_layers(loaded)
    called = name or (Path(where).name if Path(where).is_dir() else where)
    return Loaded(called, revision_of(config, Path(where)), loaded, tokenizer, layers, bits)


@contextmanager
def library_errors(where: str | Path, error: ErrorClass) -> Iterator[None]:
    """Raise ``error`` in one sentence for whatever the library raises in the block, which calls nothing else: on a
    config that no model has, it fails in any way."""
    try:
        yield
    except Exception as fault:
        reason = str(fault).partition("\n")[0] or type(fault).__name__  # a list of all known models may follow
        raise error(f"{where}: expected a causal language model and tokenizer; could not load: {reason}") from fault


def revision_of(config: Any, folder: Path) -> str:
    """The hub's commit, or, for a folder, a digest of its weights."""
    if not folder.is_dir():
        return str(getattr(config, "_commit_hash", None) or "unknown")
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"
