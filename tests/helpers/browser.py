"""Headless Chromium on a page, as a person sees it: what it shows, asks for, and complains of."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CHROMIUM = "/usr/bin/chromium"
_SECONDS = 300  # For anything that a page does; Playwright's 30 are too few for MLflow's on a busy machine.


@dataclass
class Browser:
    """One tab. requests: addresses that pages asked for. complaints: errors on the console, and failed requests."""

    page: object
    folder: Path
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, url: str, *texts: str) -> None:
        """Go to an address, and wait until all texts can be seen."""
        self.page.goto(url)  # type: ignore[attr-defined]
        self.sees(*texts)

    def sees(self, *texts: str) -> None:
        """Wait until each text can be seen somewhere on the page; fails after a while."""
        for text in texts:
            found = self.page.get_by_text(text).filter(visible=True).first  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):
                found.wait_for()
                continue
            self.picture("missing")
            pytest.fail(f"cannot see {text!r} on {self.page.url}: {self.folder / 'missing.png'}")

    def text(self) -> str:
        """All that can be seen, with single spaces."""
        return " ".join(self.page.inner_text("body").split())  # type: ignore[attr-defined]

    def reads(self, *texts: str) -> None:
        """Wait until the text of the whole page has each of these, also where a text is spread over several
        elements.
        """
        end = time.monotonic() + _SECONDS
        while missing := [text for text in texts if text not in self.text()]:
            if time.monotonic() > end:
                self.picture("missing")
                pytest.fail(f"the text of {self.page.url} lacks {missing}: {self.folder / 'missing.png'}")
            time.sleep(0.1)

    def click(self, text: str) -> None:
        self.page.get_by_text(text, exact=True).filter(visible=True).first.click()  # type: ignore[attr-defined]

    def picture(self, name: str) -> Path:
        """Save a picture of the window; returns its path."""
        path = self.folder / f"{name}.png"
        self.page.screenshot(path=str(path))  # type: ignore[attr-defined]
        return path


@contextlib.contextmanager
def open_browser(folder: Path, width: int = 1500, height: int = 1000) -> Iterator[Browser]:
    """A browser without a past. folder: of the pictures. Skips without Chromium; in CI, that is a failure."""
    if shutil.which(CHROMIUM) is None:
        reason = "Chromium is not installed (Debian: apt-get install chromium)"
        (pytest.fail if os.environ.get("REQUIRE_HOSTS") else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright  # Late: takes half a second.

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=1000 * _SECONDS
        )
        page = chromium.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(1000 * _SECONDS)
        browser = Browser(page, folder)
        page.on("request", lambda request: browser.requests.append(request.url))
        page.on("console", lambda said: browser.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: browser.complaints.append(str(error)))
        page.on(
            "response",
            lambda reply: browser.complaints.append(f"{reply.status} {reply.url}") if reply.status >= 400 else None,
        )
        try:
            yield browser
        finally:
            chromium.close()
