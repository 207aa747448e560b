"""A headless Chromium, driven over a pipe by the DevTools protocol: no package is needed for it."""

import base64
import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_SECONDS = 60


def executable() -> str | None:
    """The browser of this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page of a running browser, and what happened in it."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers = commands, answers
        self._number = 0
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append((answer.get("method", ""), answer.get("params", {})))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            text += byte
        return json.loads(text)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and the colours that the reader prefers."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def load(self, address: str) -> None:
        """Open a page, and wait until it and its scripts are loaded."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            answer = self._read()
            self.events.append((answer.get("method", ""), answer.get("params", {})))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is on the screen, or of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
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

    def requests(self) -> list[str]:
        """The address of everything that the page asked for."""
        sent = "Network.requestWillBeSent"
        return [event["request"]["url"] for method, event in self.events if method == sent]


@contextlib.contextmanager
def opened(profile: Path) -> Iterator[Tab]:
    """A browser with one page, that ends with the block."""
    command = executable()
    assert command is not None
    from_us, to_browser = os.pipe()
    to_us, from_browser = os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4.
    shell = f'exec "$0" "$@" 3<&{from_us} 4>&{from_browser}'
    arguments = ["bash", "-c", shell, command, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        arguments, pass_fds=(from_us, from_browser), stderr=subprocess.DEVNULL
    )
    os.close(from_us)
    os.close(from_browser)
    watchdog = threading.Timer(_SECONDS * 5, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        with os.fdopen(to_browser, "wb") as commands, os.fdopen(to_us, "rb") as answers:
            yield Tab(commands, answers)
    finally:
        watchdog.cancel()
        process.terminate()
        process.wait(_SECONDS)


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
