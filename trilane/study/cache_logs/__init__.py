"""Logs of programs with a cache of experts: predicted and measured hits, loads and times."""
