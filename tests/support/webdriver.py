"""A real, headless Chromium, driven over the W3C WebDriver protocol with the standard library alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
NEEDS_BROWSER = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs Chromium and its driver (on Debian: apt-get install chromium chromium-driver)",
)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1280,900",
]  # fmt: skip
KEYS = {"Escape": "\ue00c"}


class Browser:
    """One window. Every method is one command of the protocol, or of Chromium's own (`cdp`)."""

    def __init__(self, session: str):
        self.session = session

    def send(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.session}/{path}".rstrip("/"), data=data, method=method)
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with no_proxy.open(request, timeout=120) as reply:
            return json.load(reply)["value"]

    def open(self, url: str) -> None:
        """Open a page, with empty logs."""
        self.send(
            "POST", "url", url="about:blank"
        )  # else those of the browser's own first page would be in them
        for kind in ("browser", "performance"):
            self.log(kind)
        self.send("POST", "url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that the body of a function returns; a promise is waited for."""
        return self.send("POST", "execute/sync", script=script, args=arguments)

    def press(self, *keys: str) -> None:
        """Press and release keys one after another; names as in `KEYS`, else single characters."""
        codes = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": code} for code in codes for kind in ("keyDown", "keyUp")]
        self.send("POST", "actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def at(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into sight: pixels from the left and the top."""
        script = """const each = document.querySelector(arguments[0]);
          each.scrollIntoView({ block: 'center', behavior: 'instant' });
          const { left, top, width, height } = each.getBoundingClientRect();
          return [left + width / 2, top + height / 2];"""
        x, y = self.run(script, selector)
        return x, y

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the mouse to an element, and press its button there."""
        x, y = self.at(selector)
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.send("POST", "goog/cdp/execute", cmd=command, params=parameters)

    def log(self, kind: str) -> list[Any]:
        """What was logged since the last call: `browser` (console) or `performance` (network and more)."""
        return self.send("POST", "se/log", type=kind)

    def requested(self) -> list[str]:
        """Addresses that the page has asked for since the last call, but for data within it."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        urls = [each["request"]["url"] for each in sent]
        return [url for url in urls if not url.startswith("data:")]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with the fresh folder ``profile``; it and its driver end with the context."""
    with subprocess.Popen(
        [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as driver:
        try:
            assert driver.stdout is not None
            said = next(line for line in driver.stdout if b"successfully on port" in line)
            port = re.findall(rb"on port (\d+)", said)[0].decode()
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            logs = {"browser": "ALL", "performance": "ALL"}
            wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": logs}}
            session = Browser(f"http://127.0.0.1:{port}").send("POST", "session", capabilities=wanted)
            browser = Browser(f"http://127.0.0.1:{port}/session/{session['sessionId']}")
            try:
                yield browser
            finally:
                browser.send("DELETE", "")
        finally:
            driver.terminate()
