"""Published policies, one file or folder a paper."""
