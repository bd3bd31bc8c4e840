"""Speed of the page: ``python -m benchmarks.page_speed [--seconds 300]``. Needs what ``make test-page`` installs.

First paint after the command; time of a change in *What if*; the first bar of a comparison; size of a report; and ten
clients at once, with the growth of memory. Keep the machine quiet: whatever else runs is measured too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from statistics import median, quantiles
from urllib.parse import urlencode, urlsplit

import psutil

from tests.kit.browser import chromium

MACHINE = {"gpu": "rtx-3060", "cpu": "ryzen-5-5600", "ram": "ddr4-3200", "ram_gb": "32"}
MODELS = ("qwen3-30b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b", "glm-4.7-flash")
CLIENTS = 10


def first_paint_s() -> tuple[float, str, subprocess.Popen[str]]:
    """Seconds from the command to the first contentful paint, with a browser that runs; the address, the server."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page()
        began = time.time()
        server = subprocess.Popen([sys.executable, "-m", "trilane", "explore", "--no-browser"],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        page.goto(address)
        painted = page.evaluate(
            "() => performance.timeOrigin + performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        browser.close()
    return painted / 1e3 - began, address.partition("#")[0], server


def asked(base: str, view: str, lines: int | None = None, **query: str) -> float:
    """Seconds until so many records of an answer have come, or all."""
    at, began = urlsplit(base), time.perf_counter()
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=300)
    connection.request("GET", f"{at.path}answers/{view}?{urlencode(query)}")
    answer, count = connection.getresponse(), 0
    while line := answer.readline():
        assert json.loads(line)["kind"] not in ("failed",), line
        count += 1
        if count == lines:
            break
    connection.close()
    return time.perf_counter() - began


def turned(rng: random.Random) -> dict[str, str]:
    """A question of *What if* with values that were not asked before."""
    return {**MACHINE, "model": rng.choice(MODELS), "gpu_memory_gb": f"{rng.uniform(8, 48):.4f}",
            "dram_gbps": f"{rng.uniform(20, 120):.4f}"}


def change(base: str, rng: random.Random) -> float:
    """Seconds of one change of a slider."""
    return asked(base, "what-if", **turned(rng))


def p95(seconds: list[float]) -> float:
    return quantiles(seconds, n=20)[-1]


def memory_mb(server: subprocess.Popen[str]) -> float:
    """Resident memory of the server and its processes."""
    process = psutil.Process(server.pid)
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)]) / 1e6


def clients(base: str, server: subprocess.Popen[str], seconds: float) -> dict[str, float]:
    """Ten clients: a heavy question each, then changes with pauses, whose simulations they leave after the first; one
    compares policies, and closes its tab again and again."""
    times: list[float] = []
    until = time.time() + seconds

    def client(number: int) -> None:
        rng = random.Random(number)
        asked(base, "machine", **{**MACHINE, "ram_gb": str(16 + number)})
        while time.time() < until:
            if number == 0:
                asked(base, "policies", lines=2, share=str(rng.randint(20, 60)), policies="fiddler,dali,on-demand")
            else:
                query = turned(rng)
                times.append(asked(base, "what-if", **query))
                asked(base, "simulated", lines=2, **query)  # and its tab goes on to the next change
            time.sleep(rng.uniform(0.5, 1.5))

    before = [memory_mb(server)]
    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 5)
    before.append(memory_mb(server))
    for thread in threads:
        thread.join()
    return {"changes": len(times), "median_ms": 1e3 * median(times), "p95_ms": 1e3 * p95(times),
            "memory_mb_after_a_fifth": before[1], "memory_mb_at_the_end": memory_mb(server)}


def main() -> None:
    """Start the page, and print its times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    seconds = parser.parse_args().seconds
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    paint, base, server = first_paint_s()
    print(f"first paint {paint:.2f} s after the command")
    try:
        asked(base, "names")
        rng = random.Random(0)
        [change(base, rng) for _ in range(8)]
        changes = [change(base, rng) for _ in range(80)]
        print(f"a change: median {1e3 * median(changes):.0f} ms, p95 {1e3 * p95(changes):.0f} ms")
        asked(base, "policies", policies="fiddler", setting="small")
        print(f"first bar of 14 policies {asked(base, 'policies', lines=2):.2f} s, all {asked(base, 'policies'):.1f} s")
        print(f"ten clients: {clients(base, server, seconds)}")
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
