"""A model that runs while its policy is simulated: what a policy does to the text, in the same run as its times."""
