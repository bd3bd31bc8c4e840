"""Pictures and text of results."""
