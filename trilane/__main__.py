"""The command line's door: ``trilane`` and ``python -m trilane``."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from trilane.cli import main as run  # here: processes that share its work import this module, and need no verbs

    run()


if __name__ == "__main__":
    main()
