"""AdapMoE."""
