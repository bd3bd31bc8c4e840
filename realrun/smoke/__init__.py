"""Whether a machine can be used at all: a minute of checks, each with a figure."""
