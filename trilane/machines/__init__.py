"""Machines by name, as documents of numbers with their sources: presets, files, and machines made of named parts."""
