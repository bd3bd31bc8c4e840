"""``python -m trilane``."""

from __future__ import annotations

from trilane.cli import main

if __name__ == "__main__":
    main()
