"""The simulator: a scenario in, what every lane did out."""

DRAWS = 5  # how often a comparison plays a scenario, unless told otherwise
