"""Routed experts' weights: how they lie, where they are kept, what computes them."""
