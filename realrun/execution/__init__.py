"""The executor, which plays a session on the lanes of a machine, layer by layer, and records the spans."""
