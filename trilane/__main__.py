"""Entry point of the command line: ``trilane`` and ``python -m trilane``."""

from __future__ import annotations

import gc
import sys

from trilane.common.gc_paused import collect_seldom


def main() -> None:
    """Run the command line. Ctrl-C ends it with the exit status 130, while it is imported too."""
    collect_seldom(ends_soon=True)
    try:
        from trilane.cli import main as run  # here: processes that share its work import this module, and no verbs

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # what is left ends with the process; the interpreter would search it for garbage first


if __name__ == "__main__":
    main()
