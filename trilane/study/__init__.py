"""Questions over many runs."""

DRAWS = 5  # how often a comparison plays a scenario, by default
CLAIRVOYANT_POLICY = "oracle"  # what every other policy is compared with
