"""A headless Chromium, driven by the DevTools protocol over two pipes, without a further library."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 30.0


def find() -> str | None:
    """The browser's program; None if there is none on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own, without network but for this machine."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="shoal-browser-", ignore_cleanup_errors=True)
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()

        def place() -> None:
            # Above all others first: one of the two may be 3 or 4 itself.
            reads, writes = os.dup2(its_in, 200), os.dup2(its_out, 201)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",  # it shows this test's own page, and root may have no sandbox
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                f"--user-data-dir={self._profile.name}",
            ],
            close_fds=False,
            preexec_fn=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_in)
        os.close(its_out)
        self._received = b""
        self._number = 0
        self.logged: list[str] = []  # by the page: messages on its console, and violations of its policy
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise, what it brings."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression once it is true; true for an element of the page."""
        end = time.monotonic() + WAIT_S
        safe = f"(() => {{ try {{ const v = {script}; return v instanceof Node || v }} catch {{ return null }} }})()"
        while not (value := self.run(safe)):
            assert time.monotonic() < end, f"{script}: never; the page has {self.run('document.body.innerText')!r}"
            time.sleep(0.02)
        return value

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            got = self._receive()
            if got.get("id") == number:
                assert "error" not in got, f"{method}: {got['error']}"
                result: dict[str, Any] = got["result"]
                return result
            self._note(got)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        message, self._received = self._received.split(b"\0", 1)
        got: dict[str, Any] = json.loads(message)
        return got

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Log.entryAdded":
            self.logged.append(event["params"]["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.logged.append(json.dumps(event["params"]["exceptionDetails"]))
