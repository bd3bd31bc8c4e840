"""Published figures of papers, each asked of the simulator in the paper's own setting."""
