"""Microbenchmarks of a machine, and the profile made from them."""
