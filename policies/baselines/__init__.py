"""Baselines, the clairvoyant run, and the best compositions found by search."""
