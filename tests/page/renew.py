"""Pictures of the page for the README and docs: ``python -m tests.page.renew``. Needs what ``make test-page`` installs.
"""

from __future__ import annotations

import subprocess
import sys

from tests.kit.browser import chromium
from tests.kit.commands import ROOT
from tests.page.conftest import done
from tests.page.test_browser import VIEWS

PICTURES = {  # views, and heights in dots
    "explore.png": ("machine", 760), "explore-model.png": ("model", 1180), "explore-what-if.png": ("what-if", 900),
    "explore-timeline.png": ("token", 1120),
}

TOKEN = "timeline?setting=deepseek-v2-lite&share=60&policies=on-demand,mixtral-offloading"


def main() -> None:
    from playwright.sync_api import sync_playwright

    words = [sys.executable, "-m", "trilane", "explore", "--no-browser"]
    with (
        subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().partition("#")[0]
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for name, (view, height) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1120, "height": height})
            page.goto(f"{address}#/{VIEWS.get(view, TOKEN)}")
            done(page).wait_for_timeout(500)
            page.evaluate("() => document.activeElement.blur()")
            page.screenshot(path=ROOT / "docs" / name)
            page.close()
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
