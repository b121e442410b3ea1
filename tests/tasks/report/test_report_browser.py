"""The release report as people see it: in a real Chromium, on a phone and on a desk, in light and in dark."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from report_workspace import HOSTILE, Spec, make_workspace

from tasks.report import write_report

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
WIDTHS = (320, 390, 768, 1440)
PHONE = {"width": 390, "height": 844}

CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const f = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const words = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!words || !element.getClientRects().length || element.closest('figure.wide svg')) continue;
    const style = getComputedStyle(element);
    const text = light(rgba(element instanceof SVGElement ? style.fill : style.color));
    const ground = light(behind(element));
    const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    found.push([ratio, element.tagName + ' ' + element.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""

OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('figure svg')) {
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
      const [a, b] = [texts[i][1], texts[j][1]];
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 1.5 && y > Math.min(a.height, b.height) / 2) found.push([texts[i][0], texts[j][0]]);
    }
  }
  return found;
}"""

CLIPPED = """() => [...document.querySelectorAll('figure:not(.wide) svg text')].filter(t => {
  const box = t.getBoundingClientRect();
  return box.left < 0 || box.right > document.documentElement.clientWidth;
}).map(t => t.textContent)"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports by name: of a good build with a champion, of a refused one, and of an attacker's."""
    specs = {
        "champion": Spec(champion=True, waived=True),
        "refused": Spec(refused=True),
        "hostile": Spec(labels=HOSTILE, n=400, champion=True),
    }
    return {
        name: write_report(make_workspace(tmp_path_factory.mktemp(name), spec))
        for name, spec in specs.items()
    }


@pytest.fixture
def open_page(browser):
    """Opens a report in a page of its own; what went wrong in it is in `page.trouble`."""
    opened = []

    def start(path, *, width=390, height=844, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        opened.append(page)
        page.trouble = []
        page.on("console", lambda message: page.trouble.append(message.text))
        page.on("pageerror", lambda error: page.trouble.append(str(error)))
        page.on("dialog", lambda dialog: page.trouble.append(dialog.message))
        page.on("request", lambda request: page.trouble.append(request.url))
        page.goto(path.as_uri())
        page.trouble.remove(path.as_uri())
        page.trouble[:] = [entry for entry in page.trouble if not entry.startswith("data:")]
        return page

    yield start
    for page in opened:
        page.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["champion", "refused", "hostile"])
def test_it_fits_every_screen_and_asks_for_nothing(reports, open_page, name, width):
    """No console message, no request, no sideways scrolling of the page, no text outside of it."""
    page = open_page(reports[name], width=width)
    assert page.trouble == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(CLIPPED) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["champion", "hostile"])
def test_labels_do_not_cover_each_other(reports, open_page, name, width):
    """In no figure, at no width, does one text lie over another."""
    assert open_page(reports[name], width=width).evaluate(OVERLAPS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["champion", "refused"])
def test_all_text_can_be_read(reports, open_page, name, scheme):
    """Every text of the page and of its figures has the contrast WCAG asks of small text."""
    measured = open_page(reports[name], width=1440, scheme=scheme).evaluate(CONTRAST)
    assert len(measured) > 400
    assert [entry for entry in measured if entry[0] < 4.5] == []


def test_dark_is_dark_and_light_is_light(reports, open_page, tmp_path):
    """The pixels themselves: most of a dark page is dark, figures included."""
    shares = {}
    for scheme in ("light", "dark"):
        page = open_page(reports["champion"], width=1440, height=900, scheme=scheme)
        page.locator("#front").scroll_into_view_if_needed()
        page.screenshot(path=tmp_path / "page.png")
        histogram = Image.open(tmp_path / "page.png").convert("L").histogram()
        shares[scheme] = sum(histogram[:64]) / sum(histogram)
    assert shares["dark"] > 0.85
    assert shares["light"] < 0.15


@pytest.mark.parametrize(
    ("name", "verdict"), [("champion", "Passed the gate"), ("refused", "Refused by the gate")]
)
def test_a_phone_shows_what_is_to_decide_at_once(reports, open_page, name, verdict):
    """Verdict, what there is to decide and every reason stand in the first screen of a phone."""
    page = open_page(reports[name])
    assert page.locator("#verdict h2").inner_text().strip() == verdict
    for part in ("#verdict h2", "#verdict .lead", "#verdict .reasons", "#verdict .counts"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] <= PHONE["height"], part


def test_pictures_decode(reports, open_page):
    """Every picture of a changed image is one, and has a text for those who do not see it."""
    page = open_page(reports["champion"])
    page.locator("#images").scroll_into_view_if_needed()
    sizes = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth, i.alt.length > 10])")
    assert sizes == [[True, 32, True]] * 20
    figures = page.locator("figure svg[role=img]")
    assert figures.count() == 8
    assert all(len(figures.nth(i).get_attribute("aria-label")) > 20 for i in range(8))


def test_it_works_in_a_sandbox_without_scripts(reports, browser):
    """As MLflow's artifact viewer embeds it: a sandboxed frame that may do nothing at all."""
    page = browser.new_page(viewport={"width": 900, "height": 800})
    trouble = []
    page.on("console", lambda message: trouble.append(message.text))
    page.set_content('<iframe sandbox width="880" height="780"></iframe>')
    html = reports["champion"].read_text(encoding="utf-8")
    page.evaluate("html => { document.querySelector('iframe').srcdoc = html }", html)
    frame = page.frame_locator("iframe")
    frame.locator("#glossary").wait_for()
    assert frame.locator("#verdict h2").inner_text().strip() == "Passed the gate"
    assert "Accuracy over size" in frame.locator("#front").inner_text()
    assert trouble == []
    page.close()


def test_a_table_scrolls_in_its_own_box(reports, open_page):
    """On a phone the wide table of variants scrolls by itself, its names stay in sight."""
    page = open_page(reports["champion"])
    table = page.get_by_role("region", name="Variants", exact=True)
    table.evaluate("box => { box.scrollLeft = 400 }")
    assert table.evaluate("box => box.scrollLeft") > 100
    name = table.locator("tbody th").first.bounding_box()
    assert name["x"] == pytest.approx(table.bounding_box()["x"] + 1, abs=1)
    assert page.evaluate("window.scrollX") == 0


def test_print_is_light_and_whole(reports, open_page):
    """On paper the page is light whatever the screen was, and folded tables are unfolded."""
    page = open_page(reports["champion"], width=800, scheme="dark")
    assert not page.locator("#classes details table").is_visible()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#classes details table").is_visible()
    boxes = page.evaluate("[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)")
    assert max(boxes) <= 1


@pytest.mark.skipif(os.environ.get("EDGELOOP_WRITE_SCREENSHOTS") != "1", reason="writes to docs/images")
def test_the_documents_show_it(browser, tmp_path):
    """docs/images/report-*.png: this repository's own digits workspace, as it was built last."""
    workspace = Path(os.environ.get("EDGELOOP_WORKSPACE", IMAGES.parents[1]))
    path = Path(shutil.copy(write_report(workspace), tmp_path / "release.html"))
    for name, width, height, scheme, scale in (
        ("report-phone-dark", 390, 844, "dark", 2),
        ("report-desk", 1280, 900, "light", 1),
    ):
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
        )
        page.goto(path.as_uri())
        IMAGES.mkdir(exist_ok=True)
        page.screenshot(path=IMAGES / f"{name}.png")
        page.close()
        assert (IMAGES / f"{name}.png").stat().st_size < 300_000
