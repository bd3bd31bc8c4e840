"""Microbenchmarks of a machine, and the profile that they make."""
