"""Models by name: published ones from ``models.yaml``, mini models from their bundled traces, and others by their file:
a config.json, a folder that holds one, or a GGUF file. With their shapes, the numbers of tokens that they were trained
for, and published figures on their routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from traces.file import bundled_trace, find_trace, read_trace
from traces.models.hf_config import ConfigKeys, read_config, shape_of_config
from traces.models.names import ModelName, parted
from traces.models.quantisation import format_named, quantisations_of, quantised
from traces.models.shape import ModelShape, ShapeError
from traces.models.spellings import DenseError, Taken, spelled
from trilane.common.hints import ASCENDING, NOT_EMPTY, Count, Name
from trilane.common.json_text import parse_json
from trilane.common.names import unknown
from trilane.common.quoting import quoted
from trilane.common.schema import SchemaError
from trilane.common.yaml_files import read_bundled, read_yaml

_FILE = Path(__file__).with_name("models.yaml")
_ALIASES = Path(__file__).with_name("aliases.yaml")
MINI_MODELS = ("mini-deepseek", "mini-moe")
_CONFIG, _GGUF = "config.json", ".gguf"
_NOT_SHAPE = ("gguf_arch", "published_params", "router")  # keys of models.yaml about the model rather than its shape
_LENGTHS = Path(__file__).with_name("trained_lengths.yaml")
_PUBLISHED = Path(__file__).with_name("published.yaml")
_Text = Annotated[str, NOT_EMPTY]


def model_names() -> list[str]:
    """All names that ``load_model`` accepts; a mini model only if its trace is bundled."""
    return sorted([*_entries(), *aliases(), *(name for name in MINI_MODELS if bundled_trace(name))])


def load_model(name: str) -> ModelShape:
    """The shape of a model by its name, such as ``qwen3-30b-a3b``, or by the path of its config.json, of a folder that
    holds one, or of its GGUF file. Raises ShapeError for a name that ``model_named`` does not take.

    ``phi-3.5-moe:8`` is that model cut after 8 MoE layers, ``phi-3.5-moe@q4_k_m`` in that weight format
    (``traces.models.quantisation``), ``phi-3.5-moe@q4_k_m:8`` both. Capitals do not matter.
    """
    parts = model_named(name).name
    path = None if parts.model in _known() else model_file(parts.model)
    return _load(parts, path, path.stat().st_mtime_ns if path else 0)


def model_named(name: str) -> Taken:
    """A model's name as it is taken: as it is for a model of the catalogue and for a file, else as
    ``traces.models.spellings`` reads it. Raises ShapeError for a name that means none, and for unknown weights.
    """
    parts = parted(name)
    known = parts.model.lower() in _known()
    if "://" in name or (known and _is_tag(parts.layers)):
        return _spelled(name)
    try:
        if not known and model_file(parts.model) is None:
            return _spelled(name)
    except ShapeError as fault:
        raise ShapeError(f"{fault}{_meant(parts.model)}") from None
    weights = format_named(parts.weights) if parts.weights else parts.weights
    return Taken(name, parts._replace(model=parts.model.lower() if known else parts.model, weights=weights))


def _is_tag(layers: str | None) -> bool:
    """True for what follows a colon and is neither a number of layers nor weights at the wrong place."""
    return bool(layers) and "@" not in str(layers) and not str(layers).isdecimal()


def _spelled(name: str) -> Taken:
    """A name as people write it. Raises ShapeError also for a format that its model is not published in."""
    taken = spelled(name, model_names())
    formats = quantisations_of(load_model(taken.name.model))
    if taken.name.weights in ("bf16", "fp16") and taken.name.weights not in formats:
        raise ShapeError(
            f"model {quoted(name)}: files of that name have their experts in {' or '.join(formats)}, as the model is "
            f"published: name it {taken.name.model!r}"
        )
    return taken


def _meant(name: str) -> str:
    """The model that a GGUF file which is not there would be, in words, if its name says it."""
    try:
        if not name.lower().endswith(_GGUF):
            return ""
        return f"; by its name it is {str(_spelled(Path(name).name).name)!r}: write that, or the path of the file"
    except DenseError as fault:
        return f"; {fault}"
    except ShapeError:
        return ""


@cache
def _known() -> frozenset[str]:
    return frozenset((*_entries(), *aliases(), *MINI_MODELS))


@lru_cache(maxsize=256)
def _load(parts: ModelName, path: Path | None, changed_ns: int) -> ModelShape:
    """``path`` is read anew when it has changed."""
    name, weights, layers = parts
    if layers is not None:
        return _cut(_load(ModelName(name, weights), path, changed_ns), layers)
    if weights is not None:
        return quantised(_load(ModelName(name), path, changed_ns), weights)
    if path is not None:
        return _read_model_file(path)
    if name in aliases():
        return replace(load_model(aliases()[name].model), name=name)
    if name in _entries():
        return _shape(name, _entries()[name])
    if trace := name in MINI_MODELS and bundled_trace(name):
        return replace(read_trace(find_trace(trace)).shape, name=name)
    raise ShapeError(unknown("model", name, model_names(), "trilane models"))


def model_file(name: str) -> Path | None:
    """The file that ``name`` stands for, if it is a path. Raises ShapeError if there is no such file."""
    if not name:
        return None  # "" would be the current folder
    path = Path(name)
    if path.is_dir() and (path / _CONFIG).is_file():
        return path / _CONFIG
    if path.suffix.lower() not in (".json", _GGUF) and not path.is_dir():
        return None
    if not path.is_file():
        raise ShapeError(f"{name}: expected a config.json, a folder that holds one, or a GGUF file; there is none")
    return path


def _read_model_file(path: Path) -> ModelShape:
    """The shape of the model in a file; its name is the path. Raises ShapeError."""
    try:
        if path.suffix.lower() != _GGUF:
            return read_config(path)
        from traces.models.gguf_model import read_gguf_model  # it takes long to import

        return read_gguf_model(path)
    except OSError as fault:
        raise ShapeError(f"{path}: {fault.strerror}") from None


def _cut(shape: ModelShape, layers: str) -> ModelShape:
    if "@" in layers:
        cut, _, weights = layers.partition("@")
        right = f"{shape.name}@{weights}:{cut}"
        raise ShapeError(f"model {shape.name}:{layers}: weights come before layers, as in {right}")
    if layers not in map(str, range(1, shape.moe_layers + 1)):
        raise ShapeError(f"model {shape.name}:{layers}: expected 1 to {shape.moe_layers} layers after the colon")
    return shape.first_layers(int(layers))


def gguf_architecture(name: str) -> str:
    """The name that GGUF files give the architecture of a model of the catalogue, in whatever format and however cut.

    Raises ShapeError for a model that is not in it.
    """
    known = original(model_named(name).name.model)
    if known not in _entries():
        raise ShapeError(unknown("model", known, list(_entries())))
    return str(_entries()[known]["gguf_arch"])


def architecture_of(shape: ModelShape) -> str | None:
    """The name that GGUF files give the architecture of a shape; None for one that no model of the catalogue has."""
    entry = catalogue_entry(parted(shape.name).model.lower()) or alike_in_counts(shape)
    return None if entry is None else str(entry["gguf_arch"])


def catalogue_entry(name: str) -> Mapping[str, Any] | None:
    """The entry in ``models.yaml`` of a model, or of the one that it is an alias of; None: there is none."""
    return _entries().get(original(name))


def alike_in_counts(shape: ModelShape) -> Mapping[str, Any] | None:
    """The entry of the first model that has the counts of a shape; None: there is none."""
    return next((entry for name, entry in _entries().items() if _counts(load_model(name)) == _counts(shape)), None)


def _counts(shape: ModelShape) -> tuple[int, ...]:
    return shape.moe_layers, shape.experts, shape.top_k, shape.hidden, shape.expert_width


def original(name: str) -> str:
    """The model whose shape ``name`` has: that of an alias, otherwise itself."""
    return aliases()[name].model if name in aliases() else name


def recognise(gguf_arch: str, moe_layers: int, experts: int) -> ModelShape | None:
    """The catalogue's model with this architecture name (as GGUF files write it) and these counts, if there is one."""
    alike = (load_model(name) for name, entry in _entries().items() if entry["gguf_arch"] == gguf_arch)
    return next((shape for shape in alike if (shape.moe_layers, shape.experts) == (moe_layers, experts)), None)


class Alias(NamedTuple):
    """A model that has the shape of another."""

    model: str
    source: str


@cache
def aliases() -> Mapping[str, Alias]:
    """Models that have the shape of another, by name."""
    known: Mapping[str, Alias] = read_bundled(Mapping[str, Alias], _ALIASES, ShapeError)
    return known


@cache
def _entries() -> dict[str, Mapping[str, Any]]:
    entries: dict[str, Mapping[str, Any]] = read_yaml(_FILE)
    return entries


def _shape(name: str, entry: Mapping[str, Any]) -> ModelShape:
    values = {key: value for key, value in entry.items() if key not in (*_NOT_SHAPE, "config", "sources")}
    if "config" in entry:
        configured = shape_of_config(entry["config"], name, f"{_FILE.name}: {name}: config")
        values = {**configured.to_dict(), **values}
    given = dict(entry["sources"])
    rest = given.pop("*")
    return ModelShape.from_dict({**values, "name": name, "sources": {key: given.get(key, rest) for key in values}})


class TrainedLength(NamedTuple):
    """Tokens of prompt and answer together."""

    tokens: Count
    source: Name


def trained_tokens(name: str) -> int | None:
    """Tokens of prompt and answer together that a model of ``load_model`` was trained for; None: not known.

    Raises ShapeError.
    """
    model = model_named(name).name.model
    for known in (model, original(model)):
        if known in trained_lengths():
            return trained_lengths()[known].tokens
    path = model_file(model)
    if path is None:
        return None
    if path.suffix.lower() == ".gguf":
        from traces.models.gguf_reader import GgufKeys, read_gguf_header  # it takes long to import

        return GgufKeys(read_gguf_header(path).metadata, str(path)).count("context_length", default=0) or None
    keys = ConfigKeys.of(parse_json(path.read_bytes(), str(path), ShapeError), str(path))
    return keys.count("max_position_embeddings", default=0) or None


@cache
def trained_lengths() -> Mapping[str, TrainedLength]:
    known: Mapping[str, TrainedLength] = read_bundled(Mapping[str, TrainedLength], _LENGTHS, ShapeError)
    return known


@dataclass(frozen=True)
class Published:
    """One figure: a number, or the two ends of a range."""

    quantity: _Text
    value: float | Annotated[tuple[float, float], ASCENDING]
    model: _Text
    source: _Text
    note: _Text

    @property
    def ends(self) -> tuple[float, ...]:
        """The number, or both ends of the range."""
        return self.value if isinstance(self.value, tuple) else (self.value,)


@cache
def published_figures() -> tuple[Published, ...]:
    """All of ``published.yaml``, in its order. Raises SchemaError for a faulty file."""
    figures: tuple[Published, ...] = read_bundled(tuple[Published, ...], _PUBLISHED, SchemaError)
    return figures
