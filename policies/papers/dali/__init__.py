"""DALI, and the controls of its ablation."""
