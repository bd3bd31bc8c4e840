"""Speculating Experts."""
