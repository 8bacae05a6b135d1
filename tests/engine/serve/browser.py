"""A headless Chromium that a test drives through its debugging pipe: no driver, no package."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found():
    """The browser's program; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


browser_needed = pytest.mark.skipif(found() is None, reason="no Chromium on this machine")


class Tab:
    """One page. errors: exceptions of its scripts and what its security policy refused. requests:
    the addresses that it has asked for.
    """

    def __init__(self, read, write):
        self._read, self._write, self._held = read, write, b""
        self._numbers, self.errors, self.requests = itertools.count(1), [], []
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """One command of the DevTools protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while True:
            text, mark, rest = self._held.partition(b"\0")
            if not mark:
                assert select.select([self._read], [], [], end - time.monotonic())[0], method
                self._held += os.read(self._read, 1 << 20)
                continue
            self._held = rest
            event = json.loads(text)
            if event.get("method") == "Runtime.exceptionThrown":
                self.errors.append(event["params"]["exceptionDetails"])
            elif event.get("method") == "Log.entryAdded":
                if event["params"]["entry"]["level"] == "error":
                    self.errors.append(event["params"]["entry"])
            elif event.get("method") == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            if event.get("id") == number:
                assert "error" not in event, event
                return event["result"]

    def js(self, expression):
        """The value of an expression in the page; a promise's when it is there."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression, seconds=60):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < end, (expression, self.js("document.body.innerText"))
            time.sleep(0.05)

    def open(self, url):
        """A page of its own, with nothing stored."""
        self.call("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.errors.clear()
        self.call("Page.navigate", url=url + "/")
        self.until("document.readyState === 'complete' && typeof connect === 'function'")

    def over(self, expression):
        """Move the mouse over an element."""
        box = f"(() => {{ const b = ({expression}).getBoundingClientRect(); return "
        x, y = self.js(box + "[b.left + b.width / 2, b.top + b.height / 2]; })()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name, modifiers=0):
        """Press and release a key. modifiers: 1 for Alt, 8 for Shift."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "End": 35}
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=f"Key{name.upper()}" if len(name) == 1 else name,
                windowsVirtualKeyCode=codes.get(name) or ord(name.upper()),
                modifiers=modifiers,
                **more,
            )

    def look(self, width, height, dark=False):
        """Set the window's size and colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def ended(self, seconds=20):
        """Wait until the browser has closed its pipe."""
        end = time.monotonic() + seconds
        while select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
            if not os.read(self._read, 1 << 20):
                return
        raise AssertionError("the browser does not end")

    def shot(self, path):
        """Write what is seen as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def tab(folder, *flags):
    """A Tab of a fresh browser, whose profile lies in `folder`. flags: of the browser, more."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def fds():
        os.dup2(theirs_in, 103)
        os.dup2(theirs_out, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    process = subprocess.Popen(
        [
            found(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            *flags,
        ],
        preexec_fn=fds,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_in, ours_out)
    finally:
        process.kill()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
