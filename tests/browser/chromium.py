"""Headless Chromium over its pipe of the DevTools protocol, with the standard library alone."""

import base64
import json
import os
import pathlib
import shutil
import subprocess

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]


class Page:
    """One page. `errors` collects exceptions and console errors of its program, `requests` what it loads."""

    def __init__(self, folder, width=1440, height=900, dark=False):
        to_read, to_write = os.pipe(), os.pipe()  # the browser reads commands from 3 and writes answers to 4
        shell = f'exec "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
        command = ["bash", "-c", shell, "bash", BROWSER, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        fds = (to_read[0], to_write[1])
        self.process = subprocess.Popen(command, pass_fds=fds, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in fds:
            os.close(fd)
        self.commands, self.answers = os.fdopen(to_read[1], "wb"), os.fdopen(to_write[0], "rb")
        self.number, self.rest, self.session, self.errors, self.requests = 0, b"", None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(width, height, dark)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.commands.close()
        self.answers.close()

    def message(self):
        while b"\0" not in self.rest:
            part = os.read(self.answers.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(f"{BROWSER} ended with exit code {self.process.wait()}")
            self.rest += part
        first, _, self.rest = self.rest.partition(b"\0")
        return json.loads(first)

    def call(self, method, **params):
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        command |= {"sessionId": self.session} if self.session else {}
        self.commands.write(json.dumps(command).encode() + b"\0")
        self.commands.flush()
        while (answer := self.message()).get("id") != self.number:
            self.note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width, height, dark):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        """Load an address from scratch, as from a link elsewhere; a change of the part after # alone would not."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, script):
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script[:80]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition):
        """Until a JavaScript expression is true, for at most five seconds."""
        loop = f"{{ if ({condition}) done(true); else if (--left) setTimeout(look, 20); else done(false) }}"
        script = f"new Promise(done => {{ let left = 250; const look = () => {loop}; look() }})"
        assert self.run(script), f"never: {condition}"

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            text = (
                {"text": {"Enter": "\r"}.get(key, key)}
                if kind == "keyDown" and (len(key) == 1 or key == "Enter")
                else {}
            )
            number = {"windowsVirtualKeyCode": 8} if key == "Backspace" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text, **number)

    def screenshot(self, path):
        picture = self.call("Page.captureScreenshot", format="png")["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(picture))
