"""Great Expectations' Data Docs as the same bytes for the same findings, so that DVC can keep them.

The pages carry the time of the run, the time of their making, random anchors, and a logo that each visitor
fetches from the maker's server with that time. None of it says anything about the data.
"""

import re
from datetime import UTC, datetime
from pathlib import Path

NO_TIME = datetime.fromtimestamp(0, UTC)
"""The time of a run, for Great Expectations, which wants one."""
_SHOWN_TIME = re.compile(r"19(?:69-12-31|70-01-01)[ T][\d:]{8} ?[\w+-]+")  # NO_TIME, in any time zone
_NO_TIME_SHOWN = "no time kept"
_MADE_AT = re.compile(r"\b\d{8}T\d{6}\.\d{6}Z")
_ANCHOR = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAKERS_LOGO = re.compile(r"https://great-expectations-web-assets\.[^\"]*/([\w-]+\.png)\?d=[^\"]*")


def settle(site: Path) -> None:
    """Rewrite the pages under `site` in place."""
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(site).parts) - 1)
        text = _MAKERS_LOGO.sub(rf"{up}static/images/\1", text)
        text = _MADE_AT.sub(NO_TIME.strftime("%Y%m%dT%H%M%S.%fZ"), text)  # in the names of files, too
        text = _SHOWN_TIME.sub(_NO_TIME_SHOWN, text)
        page.write_text(_numbered(text), encoding="utf-8")


def _numbered(text: str) -> str:
    """Random anchors replaced by their numbers in the page."""
    numbers = {anchor: str(number) for number, anchor in enumerate(dict.fromkeys(_ANCHOR.findall(text)))}
    return _ANCHOR.sub(lambda found: numbers[found[0]], text)
