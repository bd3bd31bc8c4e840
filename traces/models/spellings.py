"""Names of models and of weight formats as people write them: ids of Hugging Face, names of GGUF files, tags of ollama,
beginnings of names, other hyphens.

Nothing that may change the model is left out: words such as "instruct" are, since a model that was trained further has
the same shape, and are said; "thinking", "coder" and dates are only parts of names that the catalogue has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple

from traces.models.names import ModelName, parted
from traces.models.quantisation import format_named
from traces.models.shape import ShapeError
from trilane.common.names import alternatives
from trilane.common.quoting import quoted
from trilane.common.yaml_files import read_bundled

_OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
_DENSE = Path(__file__).with_name("dense_families.yaml")
_MOST_HINTS = 3
_LONGEST = 200  # characters of a name that are looked at
_SITE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|ollama\.com|registry\.ollama\.ai)/(?:library/)?")
_OF_FILE = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
_PACKING = re.compile(r"[-_. ](gguf|mlx|i1|imat|imatrix|latest)$")
_FORMAT = re.compile(
    r"[-_. ]((?:ud[-_])?i?q\d(?:_(?:k|s|m|l|xl|xs|xxs|nl|0|1))*|tq\d_\d|mxfp4(?:[-_]moe)?|nvfp4|fp8(?:-dynamic)?|bf16"
    r"|f(?:p)?16|awq|gptq|int[48]|w[48]a(?:4|8|16)|\d-?bits?|dwq|exl[23])$"
)
_SAME_SHAPE = ("instruct", "chat", "it", "base", "pt", "hf", "mtp")
_MAKER = re.compile(
    "(qwen|openai|mistralai|deepseek-ai|zai-org|thudm|google|meta-llama|meta|microsoft|moonshotai|minimaxai|nvidia|baidu"
    "|tencent|liquidai|allenai|inclusionai)-"
)
_ACTIVE = re.compile(r"a\d+(\.\d+)?b")  # weights that a token needs, in billions
_SIZE = re.compile(r"(\d+x|a)?\d+(\.\d+)?b")


class DenseError(ShapeError):
    """The name of a model without experts."""


class Taken(NamedTuple):
    """A name as it was given, and as it was taken."""

    given: str
    name: ModelName
    dropped: str = ""  # words of it that do not change the shape

    @property
    def remark(self) -> str | None:
        """The name as it was taken, in words, where that differs by more than capitals."""
        if self.given.lower() == str(self.name):
            return None
        same = f", which has the same shape without {self.dropped!r}" if self.dropped else ""
        return f"{quoted(self.given)} taken as {self.name}{same}"


class _Written(NamedTuple):
    """A name in its parts, in small letters."""

    words: str  # of the model, with hyphens
    weights: str | None  # as written
    layers: str | None
    mlx: bool


def spelled(text: str, names: Sequence[str]) -> Taken:
    """A name that is none of ``names``, as one of them. Raises ShapeError for a dense model, for one that is not there,
    and for a name that several have in common.
    """
    written = _written(text)
    for words, dropped in _readings(written.words):
        if found := _named(words, names):
            if written.mlx:
                raise ShapeError(
                    f"model {quoted(text)}: files for MLX are read by no engine that is modelled; name the model "
                    f"itself, {found!r}, for its GGUF files"
                )
            weights = None if written.weights is None else format_named(written.weights)
            return Taken(text, ModelName(found, weights, written.layers), dropped)
    raise ShapeError(_refusal(text, written.words, names))


def _written(text: str) -> _Written:
    """A text in its parts: owner, site and packing are left out; a tag after a colon belongs to the model's words."""
    path = re.sub(r"/(resolve|blob|tree)/[^/]*", "", _SITE.sub("", text[:_LONGEST].strip().lower()))
    model, weights, tag = parted(path.rsplit("/", 1)[-1])
    layers = tag if tag is not None and (not tag or tag.isdecimal()) else None
    if layers is None and tag and weights is None and "@" in tag:
        tag, weights = tag.split("@", 1)
    words = _OF_FILE.sub("", model) + (f"-{tag}" if tag and layers is None else "")
    formats: list[str] = []
    mlx = path.startswith("mlx-community/")
    while match := _PACKING.search(words) or _FORMAT.search(words):
        mlx |= match[1] == "mlx"
        formats += [match[1]] if match.re is _FORMAT else []
        words = words[: match.start()]
    if weights is not None and formats:
        raise ShapeError(f"model {quoted(text)} names its weights twice, as {formats[-1]!r} and {weights!r}")
    return _Written(re.sub("[_ ]", "-", words), weights or (formats[-1] if formats else None), layers, mlx)


def _readings(words: str) -> Iterator[tuple[str, str]]:
    """A model's words, also without those at their end that do not change the shape, then the same without a maker at
    their beginning (Qwen_Qwen3-30B-A3B); with the words that were left out of the end.
    """
    for start in dict.fromkeys((words, _MAKER.sub("", words, count=1))):
        left, dropped = start, ""
        yield left, dropped
        while "-" in left and left.rsplit("-", 1)[1] in _SAME_SHAPE:
            left, last = left.rsplit("-", 1)
            dropped = f"{last}-{dropped}".rstrip("-")
            yield left, dropped


def _named(words: str, names: Sequence[str]) -> str | None:
    """The one of ``names`` that is meant, if there is one. Raises ShapeError for a dense model, and for several."""
    key = _key(words)
    if exact := _exact(tuple(names)).get(key):
        return exact
    if family := dense_family(words):
        raise DenseError(
            f"{words} is a dense model ({family}): every weight is read for every token; Trilane answers for "
            "Mixture-of-Experts models only. `trilane models` lists them"
        )
    longer = [name for name in names if key in _beginnings(name)]
    longer = [name for name in longer if not any(name.startswith(f"{other}-") for other in longer)]
    if len(longer) > 1:
        several = alternatives(longer[:_MOST_HINTS])
        raise ShapeError(f"model {quoted(words)} may be {several}: name one. `trilane models` lists them all")
    return next((name for name in longer if _sizes(words) or not _sizes(name)), None)


@cache
def _exact(names: tuple[str, ...]) -> Mapping[str, str]:
    """Names by their letters, digits and dots; those of other_names.yaml too."""
    others = {_key(other): name for name, known in other_names().items() for other in known}
    return {**others, **{_key(name): name for name in names}}


@cache
def _beginnings(name: str) -> frozenset[str]:
    """Keys of a name's first words, with and without that for the active weights."""
    whole = name.split("-")
    ways = whole, [part for part in whole if not _ACTIVE.fullmatch(part)]
    return frozenset(_key("".join(parts[:end])) for parts in ways for end in range(1, len(parts) + 1))


def _sizes(words: str) -> set[str]:
    """The words that say a number of weights."""
    return {word for word in words.split("-") if _SIZE.fullmatch(word)}


def _refusal(text: str, words: str, names: Sequence[str]) -> str:
    """There is no such model; with the known model that the name extends, or at most three that are like it."""
    parts, by_key = words.split("-"), {_key(name): name for name in names}
    shorter = ("-".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    if extended := next((known for beginning in shorter if (known := by_key.get(_key(beginning)))), None):
        return (
            f"there is no model {quoted(text)}; {extended!r} is known, but the other words of the name may mean "
            "another shape: name that if they do not, or give its config.json or GGUF file. `trilane models` lists all"
        )
    close = [by_key[key] for key in get_close_matches(_key(words), by_key, n=_MOST_HINTS)]
    size = {word for word in _sizes(words) if not _ACTIVE.fullmatch(word)}
    close = [name for name in close if size <= _sizes(name)]  # no other size is meant
    hint = f"did you mean {alternatives(close)}? " if close else ""
    return (
        f"there is no model {quoted(text)}; {hint}`trilane models` lists them all; any other: give the path of its "
        "config.json or GGUF file"
    )


def dense_family(words: str) -> str | None:
    """The family of a dense model's name, in small letters with hyphens; None: not known to be dense."""
    return next((one.family for one in dense_families() if re.match(rf"(?:{one.pattern})(?![a-z0-9.])", words)), None)


class DenseFamily(NamedTuple):
    """Models without experts, by the beginning of their names."""

    family: str
    pattern: str
    source: str


@cache
def dense_families() -> tuple[DenseFamily, ...]:
    """The commonest dense families."""
    known: tuple[DenseFamily, ...] = read_bundled(tuple[DenseFamily, ...], _DENSE, ShapeError)
    return known


@cache
def other_names() -> Mapping[str, tuple[str, ...]]:
    """Other names of the catalogue's models."""
    known: Mapping[str, tuple[str, ...]] = read_bundled(Mapping[str, tuple[str, ...]], _OTHER_NAMES, ShapeError)
    return known


def _key(name: str) -> str:
    return re.sub(r"[^\w.]|_", "", name.lower())
