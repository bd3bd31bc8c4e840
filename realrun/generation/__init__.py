"""Models of the Hugging Face library whose routed experts are where a policy puts them."""
