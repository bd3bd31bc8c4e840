"""Public names of a module, imported on first use from the modules that define them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(
    module: str, needs: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a module that imports its public names on first use.

    The names are those that its source imports under ``if TYPE_CHECKING:``, one ``from HOME import NAME as NAME`` per
    line, so that type checkers and the program read the same table. ``needs``: packages that are not always installed,
    by the name that needs them. Without its packages, a name is not in ``__all__``, and its use raises ImportError.
    """
    namespace = vars(sys.modules[module])
    homes = {name: home for home, name in _IMPORT.findall(Path(namespace["__file__"]).read_text(encoding="utf-8"))}
    lacking = {name: [it for it in packages if find_spec(it) is None] for name, packages in (needs or {}).items()}
    missing = {name: " and ".join(packages) for name, packages in lacking.items() if packages}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(homes)}")
        if name in missing:
            raise ImportError(f"{module}.{name} needs {missing[name]}, not installed here")
        home = import_module(homes[name])
        namespace[name] = getattr(home, name) if name in vars(home) else import_module(f"{home.__name__}.{name}")
        return namespace[name]

    return get, lambda: sorted(homes), [name for name in homes if name not in missing]
