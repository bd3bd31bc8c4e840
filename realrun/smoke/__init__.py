"""The smoke test of a machine: a minute of checks, each with a figure."""
