"""Replays of a trace's routing on kernels of a model's shapes, with random weights."""
