"""Text pages of the command line."""
