"""Engines in use, in closed form: no timeline is simulated."""
