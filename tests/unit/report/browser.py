"""Debian's Chromium without a window, spoken to through a pipe: what a page does in a real browser."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .font import write_fontconfig

CHROMIUM = shutil.which("chromium")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


class Browser:
    """One page, with its size, its colour scheme and what it logs and asks for."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours, theirs = os.pipe(), os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        command = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        arguments = [CHROMIUM, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, *arguments],
            pass_fds=(ours[0], theirs[1]),
            stderr=subprocess.DEVNULL,
            env={**os.environ, "FONTCONFIG_FILE": str(write_fontconfig(profile / "fonts"))},
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Load a file at a width in CSS pixels."""
        self.resize(width, 900)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def resize(self, width: int, height: int) -> None:
        """Give the page's window this size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, expression: str, *, awaits: bool = False) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it is."""
        evaluated = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=awaits)
        return evaluated["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key)

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        captured = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(captured["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Return errors of scripts, and what the page's own policy has refused."""
        texts = [e["params"]["entry"]["text"] for e in self.events if e["method"] == "Log.entryAdded"]
        return texts + [json.dumps(e) for e in self.events if e["method"] == "Runtime.exceptionThrown"]

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Give a command and return its result; events that come first are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message
