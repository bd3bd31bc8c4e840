"""HybriMoE."""
