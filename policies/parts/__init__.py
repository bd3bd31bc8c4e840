"""Parts of policies that are used by several of them."""
