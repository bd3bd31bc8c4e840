"""How long it really takes: the executor on real machines, not built yet. Here: the training of the estimator."""
