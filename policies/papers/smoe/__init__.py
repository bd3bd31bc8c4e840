"""SMoE."""
