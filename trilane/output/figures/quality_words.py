"""Divergences in words: numbers, and what a policy costs."""

from __future__ import annotations

from trilane.study.quality.curve import measured_nats


def nats(value: float) -> str:
    """A divergence with two digits that count; 0 for what is rounding alone."""
    return "0" if value < 1e-7 else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def cost_text(policy: str) -> str:
    """The cost of a policy that changes the output, as far as it is known."""
    found = measured_nats(policy)
    if found is None:
        return "not measured: trilane quality does that"
    low, high = map(nats, found)
    size = low if low == high else f"{low} to {high}"
    return f"KL {size} nats a token on mini models (trilane quality)"
