"""Malformed input for every reader of the command line: what comes of it is an answer or one sentence."""
