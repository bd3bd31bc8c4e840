"""Changes in the grammar of YAML and JSON: a document as plain values, with one node that does not belong there; and
changes to bytes that know nothing of what the bytes mean."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any


@dataclass(frozen=True, eq=False)
class Raw:
    """Text that is written as it stands; two of them are different keys, whatever they hold."""

    text: str


_BOMB = f"[&a [{'x,' * 9}]{''.join(f', &{b} [' + f'*{a},' * 9 + ']' for a, b in pairwise('abcdefgh'))}]"
NUMBERS: Sequence[Any] = (
    0, 1, -1, 2, 7, -3, 2**15, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**18, 10**30, 10**309, 0.0,
    -0.0, 0.5, -0.5, 1.5, 1e-320, 1e-9, 1e9, 1e18, 1e308, Raw("9" * 5000), Raw(".nan"), Raw("NaN"), Raw(".inf"),
    Raw("1e999"), Raw("-Infinity"), Raw("1_000"), Raw("0x1f"), Raw("0o17"), Raw("190:20:30"), Raw("25e9"), Raw("+1"),
    Raw("1."),
)
TEXTS: Sequence[str] = (
    "", " ", "a" * 300, "x" * 100_000, "\x1b[31mred\x1b[0m", "\x9b2J", "\x00", "\x07", "\r", "a\nb", "\t", "\u202eabc",
    "\ufeff", "\ud800", "\udc80", "\N{GRINNING FACE}", "\u0663", "null", "true", "1e3", "-1", "nan", "inf", "$x_{$",
    "$$", r"$\frac$", "[bold]x[/]", "[/x]", "{0}", "%s", "../x", "/dev/zero", "/dev/stdin", "/dev/null", "pipe", ".",
    "..", "out", "~", "/", "a:b", "mini-moe:0", "mini-moe:99999999999999999999", "x.safetensors", "x.csv", "2026-99-99",
    "synthetic:", "synthetic:x", "all",
)
_TEXTS_OF_YAML = (
    "2026-99-99", "2026-01-01", "2026-01-01T25:61:61Z", "!!python/object/apply:os.system [x]",
    "!!python/name:os.system", "!!bool x", "!!int x", "!!float x", "!!map [1]", "!!seq {a: 1}", "!!null x",
    "!!binary aGk=", "!!binary '*'", "!!str [x]", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!timestamp x",
    "!!merge x", "!foo bar", "!<tag:x> y", "&a x", _BOMB, "{[1, 2]: 3}", "{{a: b}: c}", "{? [a] : b}",
    "{null: 1, true: 2, 1.5: 3}", "{<<: {a: 1}}", "{<<: 1}", "{<<: [1, 2]}", "=", "<<", "&a [*a]", "&a {a: *a}",
    "*nowhere", "[" * 500 + "]" * 500, "[" * 50_000, "{a: " * 300 + "1" + "}" * 300, "[" * 20_000 + "]" * 20_000, "'",
    '"', "|", "@", "`", "%", "- x", "\u2028", "[1,,2]", "{,}", "--- x", "...", "? x", f"[{'1,' * 20_000}1]",
)
SNIPPETS = tuple(map(Raw, _TEXTS_OF_YAML))
Path = tuple[Any, Any]  # a list or a mapping, and the place in it


def written(node: Any) -> str:
    """A tree in the form that YAML and JSON share, texts of ``Raw`` as they stand."""
    if isinstance(node, Raw):
        return node.text
    if isinstance(node, dict):
        return f"{{{', '.join(f'{written(key)}: {written(value)}' for key, value in node.items())}}}"
    if isinstance(node, list | tuple):
        return f"[{', '.join(map(written, node))}]"
    return json.dumps(node, default=str)


def changed(random: Random, tree: Any) -> Any:
    """A copy of a tree with one, two or three changes; they may be in what an earlier change put there."""
    top = [copy.deepcopy(tree)]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_CHANGES)(random, top, *random.choice(list(_places(top))))
    return top[0]


def strange(random: Random) -> Any:
    """A value that few keys expect."""
    return random.choice(
        (*random.choice((NUMBERS, TEXTS, SNIPPETS, (None, True, False, [], {}, [[]], [None], {"a": 1}))),)
    )


def _places(node: Any) -> Iterator[Path]:
    for key in node if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


# --- changes: (random, the whole, a container, a place in it) ---------------------------------------------------------


def _replace(random: Random, top: Any, holder: Any, key: Any) -> None:
    holder[key] = strange(random)


def _scale(random: Random, top: Any, holder: Any, key: Any) -> None:
    if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = random.choice(
            (lambda x: -x, lambda x: x * 10**20, lambda x: x + 1, lambda x: x - 1, _float, str)
        )(holder[key])
    else:
        _edit(random, top, holder, key)


def _float(number: float) -> float:
    return float(number) if abs(number) < 10**300 else -1.0


def _near(random: Random, top: Any, holder: Any, key: Any) -> None:
    """Another value of the same kind, which may well be allowed."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = random.choice((value + 1, value - 1, 2 * value, value // 2, _float(value)))
    elif isinstance(value, float):
        holder[key] = random.choice((value * random.uniform(0.5, 2), round(value), value / 10))
    else:
        _swap(random, top, holder, key)


def _edit(random: Random, top: Any, holder: Any, key: Any) -> None:
    """Other letters in a text."""
    text = str(holder[key])
    at = random.randrange(len(text) + 1)
    holder[key] = text[:at] + random.choice(("", *TEXTS)) + text[at + random.randrange(3) :]


def _drop(random: Random, top: Any, holder: Any, key: Any) -> None:
    if holder is not top:
        del holder[key]


def _add(random: Random, top: Any, holder: Any, key: Any) -> None:
    """A foreign key or item."""
    if isinstance(holder, dict):
        holder[random.choice((Raw(random.choice(SNIPPETS).text), *TEXTS))] = strange(random)
    else:
        holder.append(strange(random))


def _repeat(random: Random, top: Any, holder: Any, key: Any) -> None:
    """A key or an item that is there twice."""
    if isinstance(holder, dict):
        holder[Raw(written(key))] = copy.deepcopy(holder[key])
    elif holder is not top:
        holder.insert(key, copy.deepcopy(holder[key]))


def _swap(random: Random, top: Any, holder: Any, key: Any) -> None:
    """Siblings change places, or another node's value comes here."""
    other, place = random.choice(list(_places(top)))
    value = copy.deepcopy(other[place])
    if other is holder and key in ([*holder] if isinstance(holder, dict) else range(len(holder))):
        other[place] = holder[key]
    holder[key] = value


def _nest(random: Random, top: Any, holder: Any, key: Any) -> None:
    for _ in range(random.choice((1, 1, 2, 90))):
        holder[key] = random.choice(([holder[key]], {"a": holder[key]}))


_CHANGES: Sequence[Callable[[Random, Any, Any, Any], None]] = (
    _replace, _replace, _replace, _near, _near, _near, _near, _scale, _edit, _drop, _add, _repeat, _swap, _nest,
)


# --- bytes ------------------------------------------------------------------------------------------------------------


_STRANGE = (
    b"\x00", b"\xff", b"\x1b[2J", b"\xed\xa0\x80", b"\xc2\x9b", b"\r", b"\n", b"\t", b"\xef\xbb\xbf", b"-", b"9" * 400,
    b"1e999", b"&a *a", b"[" * 3000,
)


def changed_bytes(random: Random, data: bytes) -> bytes:
    """A copy with one to four changes."""
    for _ in range(random.choice((1, 1, 2, 4))):
        data = random.choice(_BYTE_CHANGES)(random, data)
    return data


def _flip(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _set(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]


def _insert(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + random.choice((*_STRANGE, random.randbytes(random.randrange(1, 9)))) + data[at:]


def _delete(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    return data[:at] + data[at + _length(random, data) :]


def _truncate(random: Random, data: bytes) -> bytes:
    return data[: _place(random, data)]


def _splice(random: Random, data: bytes) -> bytes:
    """A piece of the data at another place."""
    start, at = _place(random, data), _place(random, data)
    piece = data[start : start + _length(random, data)]
    return data[:at] + piece + data[at + random.choice((0, len(piece))) :]


def _repeat_bytes(random: Random, data: bytes) -> bytes:
    at = _place(random, data)
    end = at + _length(random, data)
    return data[:end] + data[at:end] * random.choice((1, 2, 30)) + data[end:]


def _place(random: Random, data: bytes) -> int:
    """Anywhere, but one time in three near one of the ends, where formats keep their headers and footers."""
    near = min(64, len(data))
    return random.choice(
        (
            random.randrange(len(data) + 1),
            random.randrange(len(data) + 1),
            random.choice((random.randint(0, near), len(data) - random.randint(0, near))),
        )
    )


def _length(random: Random, data: bytes) -> int:
    return random.choice((1, 1, 2, 8, max(1, len(data) // 10)))


_BYTE_CHANGES: Sequence[Callable[[Random, bytes], bytes]] = (
    _flip, _set, _insert, _delete, _truncate, _splice, _repeat_bytes,
)
