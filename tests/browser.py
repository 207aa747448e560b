"""A headless Chromium that tests drive over its debugging pipe: no package is needed for it."""

import base64
import contextlib
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_SECONDS = 60.0  # for a command, and for a page to load


class Page:
    """An open page, and the events of it since it was opened."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number, self._buffer, self._session = 0, b"", ""
        self._deadline = 0.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        self._deadline = time.monotonic() + _SECONDS
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The next message of the browser; an event is also kept."""
        while b"\0" not in self._buffer:
            left = max(0.0, self._deadline - time.monotonic())
            if not select.select([self._receive], [], [], left)[0]:
                raise TimeoutError(f"the browser did not answer within {_SECONDS:.0f} s")
            received = os.read(self._receive, 1 << 20)
            if not received:
                raise RuntimeError("the browser has ended")
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message

    def open(self, address: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load an address in a window of this size, and wait for its scripts and images."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        for place in ("about:blank", address):  # a new fragment alone would not load again
            self.events.clear()
            self.call("Page.navigate", url=place)
            while not any(method == "Page.loadEventFired" for method, _ in self.events):
                self._next()

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str, expected: Any) -> Any:
        """The value of an expression as soon as it is the expected one, or after some time."""
        deadline = time.monotonic() + _SECONDS / 2
        while (found := self.value(expression)) != expected and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        root = "document.documentElement"
        return self.value(f"{root}.scrollWidth - {root}.clientWidth")

    def screenshot(self, path: Path) -> None:
        """A picture of what is on the screen, for whoever wants to look."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    @property
    def problems(self) -> list[str]:
        """Errors and warnings on the console, exceptions, and requests that failed."""
        found = []
        for method, event in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(event["exceptionDetails"]["text"])
            elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
                found.append(" ".join(str(x.get("value")) for x in event["args"]))
            elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
                found.append(event["entry"]["text"])
            elif method == "Network.loadingFailed" and not event.get("canceled"):
                found.append(event["errorText"])
        return found

    @property
    def requests(self) -> list[str]:
        """The address of everything that the page asked for."""
        sent = "Network.requestWillBeSent"
        return [event["request"]["url"] for method, event in self.events if method == sent]


def program() -> str | None:
    """The variable `CHROMIUM`, or the first browser that is installed."""
    names = (os.environ.get("CHROMIUM", ""), *_NAMES)
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser of its own; skips the test where none is installed."""
    command = program()
    if command is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed, CHROMIUM names none")
    (read, send), (receive, write) = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4.
    shell = f'exec "$0" "$@" 3<&{read} 4>&{write}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", shell, command, *_FLAGS, f"--user-data-dir={profile}"],
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
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(send)
            os.close(receive)


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server for the files of a folder."""
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


if __name__ == "__main__":
    print(program() or "no browser")
    sys.exit(program() is None)
