"""Units of sizes and rates."""

GB = 1e9  # rates, sizes of weights and files
MIB = 2**20
GIB = 2**30  # sizes of memory modules and of GPU memory on data sheets


def in_gb(size: float) -> str:
    """Bytes in GB, with one digit."""
    return f"{size / GB:.1f}"
