"""Renews the table of routing in ``docs/traces.md``: ``python -m tools.routing_table``.

For every model of the catalogue, the one whose statistics its made-up routing has, hit rates of LRU caches by layer in
answers from an empty cache, and, where there are some, published hit rates and those at the same size, of as many texts
and tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

from traces.models.catalogue import aliases, load_model, model_names
from traces.models.routers import router_of
from traces.synthesis.families import nearest_stored
from traces.synthesis.named import nearest_routing
from traces.synthesis.published import PublishedRouting, choices, lru_at, made, published_routing

PAGE = Path(__file__).parents[1] / "docs" / "traces.md"
SHARES = (0.125, 0.25, 0.5, 0.75)
TEXTS, TOKENS = 2, 256
HEAD = (
    "|model|router|statistics|12.5 %|25 %|50 %|75 %|published (simulated)|",
    "|---|---|---|---:|---:|---:|---:|---|",
)
MARKED = re.compile(r"(?<=<!-- routing -->\n).*?(?=<!-- /routing -->)", re.DOTALL)


def table(names: list[str]) -> str:
    """The rows of these models, with the head."""
    return "\n".join([*HEAD, *map(row, names), ""])


def listed() -> list[str]:
    """The models of the catalogue but for other names of the same shape."""
    return [name for name in model_names() if name not in aliases()]


def row(name: str) -> str:
    """The row of a model."""
    shape, routing = load_model(name), nearest_routing(load_model(name))
    rates = lru_at(choices(routing, TEXTS, TOKENS), shape.experts, SHARES)
    known = [one for one in published_routing() if one.model == name and one.quantity == "lru" and not one.kind]
    published = "; ".join(_published(one, made(routing, one)) for one in known)
    cells = [name, _router(name), _statistics(name), *(f"{100 * rate:.0f}" for rate in rates), published]
    return f"|{'|'.join(cells)}|"


def _router(name: str) -> str:
    router = router_of(load_model(name))
    return f"{router.balance}/{router.scoring}" if router else "not known"


def _statistics(name: str) -> str:
    stored = nearest_stored(load_model(name))
    return {"own statistics": "own", "family": stored.fit.model, "nearest": f"({stored.fit.model})"}[stored.basis]


def _published(one: PublishedRouting, rates: tuple[float, ...]) -> str:
    pairs = zip(one.sizes, one.values.values(), rates, strict=True)
    return ", ".join(f"{100 * size:.0f} %: {100 * there:.0f} ({100 * here:.0f})" for size, there, here in pairs)


def main() -> None:
    """Simulate, and put the table where the page has it."""
    text = PAGE.read_text(encoding="utf-8")
    renewed = table(listed())
    PAGE.write_text(MARKED.sub(lambda _: renewed, text), encoding="utf-8")


if __name__ == "__main__":
    main()
