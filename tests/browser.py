"""A real Chromium for the pages people read."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium without a window, from the system's packages: Playwright's own download needs the network."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is installed; `apt-get install chromium`")
    with sync_playwright() as playwright:
        # Containers run as root, where Chromium's sandbox cannot start; the pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
