"""MoE-Infinity."""
