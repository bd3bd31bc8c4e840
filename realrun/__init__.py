"""How long it really takes: the executor on real machines. Not built yet."""
