"""YAML as written: a key that stands twice, or a file that is no text, is an error and not a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from traces.yaml_data import SafeLoader


class YamlError(ValueError):
    """A file that is not YAML, or not to be read in one way only; the message says what and where."""


class _Loader(SafeLoader):  # type: ignore[misc]
    """Refuses mappings with a key twice, where PyYAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML does, but for a key that stands twice."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def load_yaml(path: str | Path) -> Any:
    """The document in a file. Raises YamlError, or OSError if there is no such file."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # a SafeLoader: builds plain values only
    except UnicodeDecodeError:
        raise YamlError(f"{path}: expected YAML in UTF-8, this is not text") from None
    except yaml.YAMLError as error:
        raise YamlError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
