"""Units of sizes and rates."""

GB = 1e9  # rates, sizes of weights and files
MIB = 2**20
GIB = 2**30  # sizes of memory modules and of GPU memory on data sheets


def in_gb(size: float) -> str:
    """Bytes in GB, with one digit."""
    return f"{size / GB:.1f}"


def missing_gb(size: float) -> str:
    """Bytes that are missing, in GB with one digit: 0.1 at least."""
    return in_gb(max(size, 0.1 * GB))


def in_gb_and_gib(size: float) -> str:
    """Bytes of a memory in GB, and in the GiB by which it is sold."""
    return f"{in_gb(size)} ({round(size / GIB, 1):g} GiB)"


def gb(size_bytes: float) -> str:
    """A size in GB with its unit, for messages."""
    return f"{size_bytes / GB:.2f} GB"
