"""Scripts that train models or make bundled data; not installed."""
