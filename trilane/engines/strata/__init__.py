"""The engine Strata: its windows in closed form, its cache, and the logs of its requests."""
