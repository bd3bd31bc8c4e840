"""The engine Strata: its windows in closed form, its cache, and the logs of its requests."""

MODEL = "qwen3.8-flash-next"  # the only one whose windows are known
