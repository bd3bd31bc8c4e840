"""A trace's routing on kernels of a model's shapes, with random weights."""
