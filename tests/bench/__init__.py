"""Benchmarks: how fast the simulator is, and what its policies' decisions cost. Run by ``make bench``."""
