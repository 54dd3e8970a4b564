"""Headless Chromium by the WebDriver protocol, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)

CONTRASTS = """
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const over = (top, below) => {
  const a = top.length > 3 ? top[3] : 1;
  return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a));
};
const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (node) => {
  const layers = [];
  for (let at = node; at; at = at.parentElement) layers.unshift(parse(getComputedStyle(at).backgroundColor));
  return layers.reduce((below, top) => over(top, below), [255, 255, 255]);
};
document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const poor = [];
let seen = 0;
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  const inPlot = node.closest("svg");
  if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("script, noscript, option")) continue;
  const style = getComputedStyle(node);
  const below = ground(inPlot ? inPlot.closest("figure") : node);
  const ink = over(parse(inPlot ? style.fill : style.color), below);
  const [a, b] = [light(ink), light(below)].sort((x, y) => x - y);
  const ratio = (b + 0.05) / (a + 0.05);
  seen += 1;
  if (ratio < 4.5) poor.push([walker.currentNode.data.trim().slice(0, 40), ratio.toFixed(2), style.color]);
}
return [seen, poor.slice(0, 8)];
"""
"""Returns how many texts are seen, and those with a contrast below 4.5 to 1."""
UNNAMED = """
const labels = (node) => [...(node.labels || [])].map((label) => label.textContent).join("");
const name = (node) => node.getAttribute("aria-label") || labels(node) || node.textContent;
return [...document.querySelectorAll("select, input, button, a, [role=img], [role=region], [tabindex='0']")]
  .filter((node) => !(name(node) || "").trim()).map((node) => node.outerHTML.slice(0, 120));
"""
"""Returns the controls and figures without a name."""


class Browser:
    """One window; what it asks of the network and says on its console is logged."""

    def __init__(self, base: str, profile: str):
        self._base = base
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self._session = f"/session/{self._call('/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"

    def _call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def devtools(self, command: str, **params: Any) -> Any:
        return self._call(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})

    def show(
        self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False, still: bool = False
    ) -> None:
        """Load a file at a width, in a colour scheme, with or without a wish for little motion."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.devtools("Emulation.setEmulatedMedia", features=features)
        self.log("browser")
        self.log("performance")
        self._call(f"{self._session}/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body; what it returns, promises resolved, comes back."""
        return self._call(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, key: str) -> None:
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._call(f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._call(f"{self._session}/se/log", {"type": kind})
        return entries

    def requests(self) -> list[str]:
        """Addresses asked for since the page was loaded."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen as PNG."""
        found = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._call(self._session, method="DELETE")


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a driver and a window with a fresh profile; end both."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            [str(DRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            port = next(
                line.rstrip(". \n").rpartition(" ")[2] for line in driver.stdout or () if "successfully on port" in line
            )
            window = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
            driver.wait(timeout=20)
            if driver.stdout is not None:
                driver.stdout.close()
