"""A page in headless Chromium, driven by the DevTools protocol over a pipe: what it requests, says and shows.

with Browser() as browser:
    page = browser.open(path)
    page.evaluate("document.title"); page.requests; page.complaints; page.screenshot(path, dark=True)
"""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
           "--no-first-run", "--disable-background-networking", "--disable-component-update")  # fmt: skip

# The browser reads commands from descriptor 3 and writes to 4.
START = "import os, sys; [os.dup2(int(sys.argv[i]), i + 2) for i in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


class Browser:
    """The program, with a profile of its own."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (their_input, self.output), (self.input, their_output) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (their_input, their_output)]  # neither is 3 or 4
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, ends), *command], pass_fds=ends, stderr=subprocess.DEVNULL
        )
        for each in (their_input, their_output, *ends):
            os.close(each)
        self.numbers, self.unread, self.events = itertools.count(1), b"", list[dict[str, Any]]()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come meanwhile are noted."""
        number = next(self.numbers)
        command = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self.output, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def wait_for(self, event: str) -> None:
        """Until `event` has come."""
        while not any(each.get("method") == event for each in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            got = os.read(self.input, 1 << 20)
            assert got, "the browser has ended"
            self.unread += got
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1240, height: int = 900) -> "Page":
        """A file in a window of that size."""
        return Page(self, path, width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.output)
        os.close(self.input)
        self.profile.cleanup()


class Page:
    """A page that has loaded."""

    def __init__(self, browser: Browser, path: Path, width: int, height: int) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        browser.events.clear()
        self.url = path.resolve().as_uri()
        self._call("Page.navigate", url=self.url)
        browser.wait_for("Page.loadEventFired")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    @property
    def requests(self) -> list[str]:
        """Addresses that it has asked for, itself first."""
        self.evaluate("1")
        sent = [each for each in self.browser.events if each.get("method") == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in sent]

    @property
    def complaints(self) -> list[Any]:
        """Errors, warnings and whatever else it has written to the console."""
        self.evaluate("1")
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [each["params"] for each in self.browser.events if each.get("method") in kinds]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """A key of the keyboard."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))

    def move(self, x: float, y: float, *, down: bool = False, kind: str = "mouseMoved") -> None:
        """The mouse."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if down else "none", clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """The mouse, with its button down."""
        self.move(*start, down=True, kind="mousePressed")
        self.move((start[0] + end[0]) / 2, end[1], down=True)
        self.move(*end, down=True)
        self.move(*end, down=True, kind="mouseReleased")

    def screenshot(self, path: Path, dark: bool = False, whole: bool = True) -> None:
        """A picture of the window, or of the whole page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        picture = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(picture["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
