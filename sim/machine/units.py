"""Units that sizes and rates are written in."""

GB = 1e9  # rates, sizes of weights and files
MIB = 2**20
GIB = 2**30  # memory, as it is sold; its names say GB too


def in_gb(size: float) -> str:
    """Bytes in GB, with one digit."""
    return f"{size / GB:.1f}"
