"""Generation with models of the Hugging Face library whose routed experts are placed by a policy."""
