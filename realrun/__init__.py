"""How long it really takes: an executor on real lanes, profiles of machines, validation, and training of estimators."""
