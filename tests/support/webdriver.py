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
KEYS = {"Escape": "\ue00c", "Tab": "\ue004", "ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014",
        "ArrowDown": "\ue015", "End": "\ue010", "Home": "\ue011"}  # fmt: skip


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

    def open(self, url: str, *, width: int = 1280, colours: str = "light", media: str = "") -> None:
        """Open a page anew, on a screen of that width for a user of light or dark colours; logs begin empty."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.cdp("Emulation.setDeviceMetricsOverride", **screen)
        wish = {"name": "prefers-color-scheme", "value": colours}
        self.cdp("Emulation.setEmulatedMedia", media=media, features=[wish])
        self.send("POST", "url", url="about:blank")  # else another anchor would not open the page anew
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

    def tap(self, selector: str) -> None:
        """Touch an element with a finger."""
        x, y = self.at(selector)
        self.cdp("Emulation.setTouchEmulationEnabled", enabled=True)
        self.cdp("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.cdp("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.cdp("Emulation.setTouchEmulationEnabled", enabled=False)

    def processor_ms(self) -> float:
        """Processor time of the page so far, whatever else the machine does."""
        self.cdp("Performance.enable", timeDomain="threadTicks")
        metrics = self.cdp("Performance.getMetrics")["metrics"]
        return 1000 * next(each["value"] for each in metrics if each["name"] == "TaskDuration")

    def texts(self, selector: str) -> list[str]:
        """Text of every element that fits a CSS selector."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        return self.run(script, selector)

    def set_field(self, name: str, value: object) -> None:
        """Give the field of that id a value, as a user does."""
        script = """const field = document.getElementById(arguments[0]); field.value = arguments[1];
          for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true }));"""
        self.run(script, name, value)

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
