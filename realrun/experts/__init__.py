"""Weights of routed experts: their layout, the stores on host and GPU, and the kernels that compute with them."""
