"""Reading of YAML files: fast, plain values only, and strict, since a key that is written twice is refused."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from trilane.common.errors import ErrorClass, TrilaneError

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast


class YamlError(TrilaneError):
    """A file that is not YAML, or that can be read in more than one way."""


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Refuses a mapping that has a key twice; PyYAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in PyYAML, except for duplicate keys."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # PyYAML refuses it
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: str | Path, error: ErrorClass = YamlError) -> Any:
    """The document in a file. Raises ``error``, which names the file."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # a SafeLoader: builds plain values only
    except OSError as fault:
        raise error(f"{path}: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: expected YAML in UTF-8, this is not text") from None
    except (yaml.YAMLError, ValueError) as fault:  # ValueError: a date that there is not
        raise error(f"{path}: not valid YAML: {' '.join(str(fault).split())}") from None
