"""A reviewer's way through MLflow's pages, in a real browser, served as `edgeloop ui` serves them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from review_room import MODEL, Room

from tasks.review.reconcile import reconcile, unreconciled

SCREENSHOT = Path(__file__).resolve().parents[3] / "docs" / "images" / "mlflow-version.png"
_PATIENCE_MS = 60_000


@pytest.fixture
def served(room: Room) -> Iterator[str]:
    """The address of the pages of the room's store."""
    command = [sys.executable, "-m", "flows", "ui", "--port", "0"]
    ui = subprocess.Popen(
        command, cwd=room.repository, env=room.environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        yield ui.stdout.readline().split()[-1].partition("#")[0]
    finally:
        ui.terminate()
        ui.wait(60)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(_PATIENCE_MS)
    expect.set_options(timeout=_PATIENCE_MS)
    yield opened
    opened.close()


def _set_tag_by_hand(page: Page, key: str, value: str) -> None:
    """As a reviewer does: the pencil of the tag's row, or the form below the table for a new one."""
    row = page.get_by_role("row").filter(has=page.get_by_text(key, exact=True))
    if row.count():
        row.get_by_role("button").first.click()
        page.get_by_role("row").filter(has=page.get_by_text(key, exact=True)).get_by_role("textbox").fill(
            value
        )
        page.get_by_role("button", name="Save").click()
    else:
        page.get_by_placeholder("Name", exact=True).fill(key)
        page.get_by_placeholder("Value", exact=True).fill(value)
        page.get_by_role("button", name="Add", exact=True).last.click()
    expect(page.get_by_role("row").filter(has_text=key).filter(has_text=value)).to_be_visible()


def test_a_version_is_found_read_and_approved_in_the_pages(room, served, page):
    """Filter, gate table, link to the evidence, tags set by hand; the next command takes it over."""
    page.goto(f"{served}#/models")
    page.get_by_role("button", name="Try it now").click()
    search = page.get_by_placeholder("Search registered models")
    for state, shown in (("approved", 0), ("pending", 1)):
        search.fill(f"tags.review_state = '{state}'")
        search.press("Enter")
        expect(page.get_by_role("link", name=MODEL, exact=True)).to_have_count(shown)

    page.goto(f"{served}#/models/{MODEL}/versions/3")
    expect(page.get_by_text("Gate: pass")).to_be_visible()
    row = page.get_by_role("row").filter(has_text="mbv3s-p30-i8-r32")
    expect(row.get_by_role("cell", name="0.86309 ≤ 8", exact=True)).to_be_visible()
    page.get_by_role("button", name="Close").click()
    if os.environ.get("EDGELOOP_WRITE_SCREENSHOTS") == "1":
        SCREENSHOT.parent.mkdir(exist_ok=True)
        page.screenshot(path=SCREENSHOT)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="release report").click()
    report = opened.value
    expect(report.frame_locator("iframe").get_by_text("mbv3s-p30-i8-r32").first).to_be_visible()
    report.close()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="all files").click()
    expect(opened.value.get_by_text("predictions.parquet").first).to_be_visible()
    opened.value.close()

    _set_tag_by_hand(page, "reviewed_by", "Ada")
    _set_tag_by_hand(page, "review_reason", "the table is fine")
    _set_tag_by_hand(page, "review_state", "approved")
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    approved = next(e for e in room.entries if e.action == "approved")
    assert (approved.version, approved.by, approved.why) == (3, "Ada", "the table is fine")
    assert room.aliases == {"champion": 3}
    page.reload()
    expect(page.get_by_role("row").filter(has_text="reviewed_at")).to_contain_text(approved.time)
