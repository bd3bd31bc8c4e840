"""The simulator: a scenario in, what every lane did out."""
