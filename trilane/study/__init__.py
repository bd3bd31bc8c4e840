"""Questions over many runs."""

DRAWS = 5  # how often a comparison plays a scenario, unless told otherwise
