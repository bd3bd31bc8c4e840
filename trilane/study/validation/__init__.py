"""Validation: how well simulated runs agree with measured runs of the same scenarios."""
