"""Models: shapes, the catalogue, weight formats, and what others publish about their routing."""
