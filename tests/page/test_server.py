"""The server: who may ask it, what it tells a browser, and the end of work that is no longer wanted."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from tests.kit.commands import ROOT

pytestmark = pytest.mark.page

HEAVY = "answers/machine?gpu=rtx-3060&ram=ddr4-3200&ram_gb=48"


def asked(address: str, path: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an address under the token."""
    at = urlsplit(address)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=120)
    connection.request(method, path, headers={"Host": host or at.netloc})
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_without_the_token_there_is_nothing(address: str) -> None:
    for path in ("/", "/x/", "/%C3%A9/", "/x/answers/names", "/x/page.js"):
        assert asked(address, path)[0] == 404


def test_another_name_of_the_machine_is_refused(address: str) -> None:
    """A site whose name leads here could ask otherwise."""
    assert asked(address, urlsplit(address).path, host="evil.example")[0] == 421


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "server.py", "machine", "answers/nothing", "answers/page.js", "%2e%2e/page.html"]
)
def test_no_other_file_is_served(address: str, path: str) -> None:
    assert asked(address, urlsplit(address).path + path)[0] == 404


def test_no_other_page_may_read_or_frame_it(address: str) -> None:
    _, headers, _ = asked(address, urlsplit(address).path)
    assert "access-control-allow-origin" not in headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"


def test_nothing_is_written_by_a_request(address: str) -> None:
    assert asked(address, urlsplit(address).path, method="POST")[0] == 405


def test_a_text_to_share_is_bounded(address: str) -> None:
    at = urlsplit(address)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=120)
    connection.request("POST", f"{at.path}share", body=b"x" * 1_000_001, headers={"Host": at.netloc})
    assert connection.getresponse().status == 413


def test_another_question_is_answered_after_tabs_were_closed(address: str) -> None:
    at = urlsplit(address)
    for _ in range(6):
        with socket.create_connection((at.hostname or "", at.port or 0)) as tab:
            tab.sendall(f"GET {at.path}{HEAVY}&cores={_ + 1} HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
            tab.recv(100)
    status, _, body = asked(address, f"{at.path}answers/what-if?gpu=rtx-3060&ram=ddr4-3200&model=gpt-oss-20b")
    assert status == 200
    assert json.loads(body)["kind"] == "what if"


def test_it_listens_on_this_machine_alone_unless_told_and_says_what_else_it_opens() -> None:
    words = [sys.executable, "-m", "trilane", "explore", "--no-browser", "--host", "0.0.0.0"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        assert server.stdout.readline().startswith("http://0.0.0.0:")
        assert "other computers can ask, too" in server.stderr.readline()
        server.terminate()


def test_ctrl_c_ends_it_at_once(address: str) -> None:
    import signal

    words = [sys.executable, "-m", "trilane", "explore", "--no-browser"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        base = server.stdout.readline().partition("#")[0]
        while True:
            try:
                assert asked(base, urlsplit(base).path)[0] == 200
                break
            except ConnectionError:
                time.sleep(0.1)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) in (0, 130)
