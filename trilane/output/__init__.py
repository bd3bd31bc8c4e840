"""What is shown of results: pictures and text."""
