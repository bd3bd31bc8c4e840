"""DAOP."""
