"""YAML, read fast and strictly: plain values only, in time and memory that its length limits; and written for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trilane.common.errors import ErrorClass, TrilaneError
from trilane.common.files import check_no_pipe
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict

MOST_BYTES = 2**19  # of a text; bundled files have 170 kB at most
MOST_DEPTH = 32  # of lists and mappings in each other
_MOST_LETTERS = 100  # of a number
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast
_TAG = "tag:yaml.org,2002:"
_CONVERTED = frozenset(f"{_TAG}{name}" for name in ("int", "float", "bool", "null"))  # all else, dates too, is text


class YamlError(TrilaneError):
    """A text that is not YAML, that can be read in more than one way, or that is more than plain values."""


def read_yaml(path: str | Path, error: ErrorClass = YamlError) -> Any:
    """The document in a file. Raises ``error``, which names the file."""
    check_no_pipe(path, error)
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as fault:
        raise error(f"{path}: {fault.strerror}") from None
    return parse_yaml(text, str(path), error)


def read_bundled(hint: Any, path: Path, error: ErrorClass = YamlError) -> Any:
    """A bundled file as a value of the type ``hint`` (``trilane.common.schema``). Raises ``error`` with its name."""
    return from_dict(hint, read_yaml(path, error), path.name, error)


def parse_yaml(text: str | bytes, where: str, error: ErrorClass = YamlError) -> Any:
    """The document in a text: numbers, texts, booleans, nulls, and lists and mappings of them. Bytes are UTF-8.

    Dates are texts. Raises ``error``, which begins with ``where``, for anchors, aliases and tags, keys that are written
    twice or are no single values, whole numbers beyond 64 bits, and more than ``MOST_BYTES`` or ``MOST_DEPTH``.
    """
    if len(text) > MOST_BYTES:
        raise error(f"{where}: expected at most {MOST_BYTES:,} bytes of YAML, got more")
    try:
        return _document(text.decode("utf-8") if isinstance(text, bytes) else text)
    except yaml.MarkedYAMLError as fault:
        line = "" if fault.problem_mark is None else f" in line {fault.problem_mark.line + 1}"
        raise error(f"{where}: not plain YAML{line}: {fault.problem}") from None
    except yaml.YAMLError as fault:  # a character that no YAML has
        raise error(f"{where}: not plain YAML: {' '.join(str(fault).split())}") from None
    except UnicodeError:
        raise error(f"{where}: expected YAML in UTF-8, this is not text") from None


def _document(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.document()
    finally:
        loader.dispose()


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Builds values from the events of PyYAML's parser, so that what is refused is never built."""

    def document(self) -> Any:
        """The value of the one document; None if there is none."""
        self.get_event()  # the stream starts
        if isinstance(self.get_event(), yaml.StreamEndEvent):
            return None
        value = self._value(self.get_event(), MOST_DEPTH)
        self.get_event()  # the document ends
        if not isinstance(after := self.get_event(), yaml.StreamEndEvent):
            raise _fault(after, "a second document begins; write each into a file of its own")
        return value

    def _value(self, event: Any, levels: int) -> Any:
        if event.anchor is not None:  # of an alias too
            raise _fault(event, f"the anchor or alias {quoted(event.anchor)}; write the value out")
        if event.tag is not None:
            raise _fault(event, f"the tag {quoted(event.tag.replace(_TAG, '!!'))}; leave it out")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if not levels:
            raise _fault(event, f"lists and mappings more than {MOST_DEPTH} deep")
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._value(item, levels - 1) for item in self._until(yaml.SequenceEndEvent)]
        return self._mapping(levels - 1)

    def _mapping(self, levels: int) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for event in self._until(yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                raise _fault(event, "a list or mapping as a key; expected a single value")
            key = self._value(event, levels)
            if key in mapping:
                raise _fault(event, f"duplicate key {quoted(key)}")
            mapping[key] = self._value(self.get_event(), levels)
        return mapping

    def _until(self, end: type[yaml.Event]) -> Iterator[Any]:
        while not isinstance(event := self.get_event(), end):
            yield event

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        if not event.implicit[0]:  # it is in quotes
            return event.value
        tag = self.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag not in _CONVERTED:
            return event.value
        if len(event.value) > _MOST_LETTERS:
            raise _fault(event, f"a number of {len(event.value):,} characters, expected {_MOST_LETTERS} at most")
        try:
            value = self.yaml_constructors[tag](self, yaml.ScalarNode(tag, event.value))
        except ValueError:  # such as 0x_
            raise _fault(event, f"{quoted(event.value)} is no number; put text into quotes") from None
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _fault(event, f"the whole number {quoted(event.value)} is beyond 64 bits")
        return value


def _fault(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


# --- writing ----------------------------------------------------------------------------------------------------------


class Lines(dict[str, Any]):
    """A mapping that is written with one line per key, also where it is an innermost one."""


class _Dumper(yaml.SafeDumper):
    """Writes lists of numbers on one line each, and so innermost mappings other than ``Lines``."""

    def ignore_aliases(self, data: object) -> bool:
        """True, so that a value that occurs twice is written twice: ``read_yaml`` takes no aliases."""
        return True


_Dumper.add_representer(
    Lines, lambda dumper, lines: dumper.represent_mapping("tag:yaml.org,2002:map", lines, flow_style=False)
)


def yaml_text(document: Mapping[str, Any]) -> str:
    """A document as YAML that ``read_yaml`` reads back, its keys in their order."""
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120))
