"""Measurements: an executor on the lanes of real machines, their profiles, and generation with real models."""
