"""Code that every floor may import; it imports nothing else of Trilane."""
