"""A headless Chromium, driven over WebDriver's HTTP by the standard library."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

DRIVER = shutil.which("chromedriver")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_ARGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,900")


class Browser:
    """One session. url: of the driver, the session included."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return _ask(method, self.url + path, body)

    def open(self, url: str) -> None:
        self.ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """The value that a piece of JavaScript returns."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": []})

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        mouse = {"type": "pointer", "id": "mouse", "actions": [move]}
        self.ask("POST", "/actions", {"actions": [mouse]})

    def console(self) -> list[str]:
        """Errors that the page has logged."""
        return [entry["message"] for entry in self.ask("POST", "/se/log", {"type": "browser"})]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert DRIVER is not None and CHROMIUM is not None, "the caller looked"
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        port = next(
            m[1] for line in driver.stdout if (m := re.search(r"successfully on port (\d+)", line))
        )
        root = f"http://127.0.0.1:{port}/session"
        chrome = {"binary": CHROMIUM, "args": _ARGS}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        found = _ask("POST", root, {"capabilities": {"alwaysMatch": wanted}})
        session = Browser(f"{root}/{found['sessionId']}")
        try:
            yield session
        finally:
            session.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(timeout=20)
        driver.stdout.close()


def _ask(method: str, url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]
