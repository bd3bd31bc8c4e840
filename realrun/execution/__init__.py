"""The executor: a session played on the lanes of a machine, layer by layer, and the record of it."""
