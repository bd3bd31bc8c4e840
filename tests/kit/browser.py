"""Whether the tests of the page can run: the extra ``page``, Playwright, and a Chromium of this machine."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

CHROMIUM = "TRILANE_CHROMIUM"  # of the environment: the browser's file, in place of chromium on the path


def chromium() -> str | None:
    return os.environ.get(CHROMIUM) or shutil.which("chromium") or shutil.which("chromium-browser")


def has_page() -> bool:
    return chromium() is not None and all(find_spec(name) for name in ("starlette", "uvicorn", "playwright"))
