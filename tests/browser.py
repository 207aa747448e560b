"""A headless Chromium that tests drive over its debugging pipe, without other packages."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0
# The browser reads commands from descriptor 3 and writes answers to 4.
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def path() -> str | None:
    """The program: the variable `CHROMIUM`, or the first that is installed."""
    found = (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *_NAMES) if name)
    return next((program for program in found if program), None)


class Page:
    """An open page; `problems` are its console errors, exceptions and blocked loads."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number, self._buffer, self._session = 0, b"", ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._receive, 1 << 20)
            if not received:
                raise RuntimeError("the browser ended")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(said["exceptionDetails"].get("text", "exception"))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.problems.append(f"console: {said['args']}")
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def open(self, address: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load an address in a window of this size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url="about:blank")  # a new fragment alone would not load again
        self.call("Page.navigate", url=address)
        ready = "document.readyState === 'complete' && location.href !== 'about:blank'"
        end = time.monotonic() + _SECONDS
        while not self.value(ready):
            if time.monotonic() > end:
                raise TimeoutError(f"{address} did not load in {_SECONDS:.0f} seconds")
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        root = "document.documentElement"
        return self.value(f"{root}.scrollWidth - {root}.clientWidth")

    def screenshot(self) -> str:
        """A picture of the window: PNG in base64."""
        return self.call("Page.captureScreenshot")["data"]


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser of its own; skips the test where none is installed."""
    program = path()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed, CHROMIUM names none")
    (read, send), (receive, write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        command = [program, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(read), str(write), *command],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        try:
            yield Page(send, receive)
        finally:
            process.terminate()
            process.wait(10)
            os.close(send)
            os.close(receive)
