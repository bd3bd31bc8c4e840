"""Logs of programs with a cache of experts: what their policies are predicted to do, beside what was measured."""
