"""Checks of purity: a policy changes neither its views nor its answers, and shares no state with other instances."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass, replace
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np

from policies.protocols import Composition

PARTS = ("placement", "router", "assigner", "prefetcher", "cache", "host_cache", "host_prefetcher")
CONTAINERS = (list, dict, set, deque, bytearray)
PLAIN = frozenset({int, float, bool, str, type(None)})


# --- arguments and answers --------------------------------------------------------------------------------------------


def snapshot(value: Any) -> Any:
    """A value that no later change of ``value`` reaches; policy parts count as themselves."""
    if type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value))):
        return value
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return [(key, snapshot(item)) for key, item in value.items()]
    if isinstance(value, Set):
        return frozenset(value)
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    if is_dataclass(value):
        return [snapshot(getattr(value, field.name)) for field in fields(value)]
    return value


class Watched:
    """A part of a policy that checks, at every call, that its arguments do not change."""

    def __init__(self, part: Any) -> None:
        self._part, self._answers = part, list[tuple[str, Any, Any]]()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return self._watch(name, value) if callable(value) else value

    def _watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        name_of_call = f"{type(self._part).__name__}.{name}"

        def watched(*given: Any) -> Any:
            before = [snapshot(value) for value in given]
            answer = call(*given)
            for place, value in enumerate(given):
                assert snapshot(value) == before[place], f"purity: {name_of_call} changes its argument {place + 1}"
            self._answers.append((name_of_call, answer, snapshot(answer)))
            return answer

        return watched

    def check_answers(self) -> None:
        """Answers have not changed since they were given."""
        for name_of_call, answer, then in self._answers:
            assert snapshot(answer) == then, f"purity: an answer of {name_of_call} was changed after it was given"


def watched(policy: Composition) -> Composition:
    """The policy with all parts watched."""
    parts = {name: getattr(policy, name) for name in PARTS}
    watching: dict[str, Any] = {name: Watched(part) for name, part in parts.items() if part is not None}
    return replace(policy, **watching)


def check_answers(policy: Composition) -> None:
    """No answer that a part of a watched policy has given has changed since."""
    for name in PARTS:
        if isinstance(part := getattr(policy, name), Watched):
            part.check_answers()


# --- state ------------------------------------------------------------------------------------------------------------


def shared_state(one: Composition, two: Composition, given: object) -> list[str]:
    """Places of state that can be reached from the parts of both policies, though not from what both were ``given``."""
    common = {id(value) for value, _ in reachable(given, "")}
    mine = [{id(v): (v, path) for n in PARTS for v, path in reachable(getattr(p, n), n)} for p in (one, two)]
    return sorted(
        path for key, (value, path) in mine[0].items()
        if key in mine[1] and key not in common and _keeps_state(value)
    )


def _keeps_state(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    if isinstance(value, CONTAINERS):
        return True
    frozen = is_dataclass(value) and value.__dataclass_params__.frozen  # type: ignore[union-attr]
    return _ours(type(value)) and bool(_state(value)) and not frozen and not isinstance(value, tuple)


def reachable(root: object, path: str) -> Iterator[tuple[object, str]]:
    """All objects that can be reached, each once, with the way there; classes and functions are looked into."""
    seen: set[int] = set()
    waiting = [(root, path)]
    while waiting:
        value, way = waiting.pop()
        if id(value) not in seen and not isinstance(value, str | bytes | int | float | None):
            seen.add(id(value))
            yield value, way
            waiting.extend((inner, f"{way}{step}") for step, inner in _inside(value))


def _inside(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | Set | deque):
        yield from (("[]", item) for item in value)
    elif isinstance(value, MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, FunctionType):
        yield from ((".__defaults__", d) for d in (value.__defaults__, value.__kwdefaults__))
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", cell) for name, cell in cells)
    elif isinstance(value, CellType):
        yield "", value.cell_contents
    elif isinstance(value, type):
        if _ours(value):
            members = [(name, item) for name, item in vars(value).items() if not name.startswith("__")]
            yield from ((f".{name}", item) for name, item in [*members, ("", value.__mro__[1:])])
    else:
        yield from ((f".{name}", item) for name, item in _state(value).items())
        yield ".__class__", type(value)


def _state(value: object) -> dict[str, object]:
    """Attributes of an instance, in ``__dict__`` or slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _ours(kind: type) -> bool:
    """True for a class of the project or of a user, not of a library."""
    return kind.__module__.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}
