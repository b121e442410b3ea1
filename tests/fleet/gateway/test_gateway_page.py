"""The fleet page in a real browser: with no windows and with a million, on phone and desk, in the dark."""

import os
import random

import gateway_kit as kit
import pytest

from fleet.device.credentials import device_id
from fleet.device.release import POLICY_SCHEMA, AnomalyLimits, FramePolicy, Policy, Rollout
from fleet.gateway import database, parts
from fleet.gateway.page import render
from fleet.gateway.parts import Part
from fleet.gateway.queries import Fleet
from fleet.gateway.rollup import COUNTED, METRICS

HOUR_MS = 3_600_000
NOW_MS = 1_796_000_000_000
POLICY = Policy(
    schema=POLICY_SCHEMA,
    version=12,
    tier_of={},
    deny=(),
    upload=(),
    anomalies=AnomalyLimits(),
    frames=FramePolicy(),
    rollout=Rollout(counter=4, salt="s", buckets=2500),
).to_bytes()


def _fill(folder):
    """A fleet of 10,000 devices and a million windows of a week, as compaction would have left it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    connection = database.opened(folder)
    rng, hour_ms = random.Random(5), NOW_MS // HOUR_MS * HOUR_MS
    tiers = {"high": (38, 3_000), "mid": (46, 5_500), "low": (42, 1_500)}
    connection.execute("BEGIN")
    number = 0
    for tier, (_, devices) in tiers.items():
        for k in range(devices):
            number += 1
            connection.execute(
                "INSERT INTO devices VALUES(?, ?, x'00', 'Pixel 7', 1, NULL)",
                (number, device_id(number.to_bytes(32))),
            )
            release = 4 if k % 4 == 0 else 3
            heard_ms = NOW_MS - (3 * 86_400_000 if number % 500 == 0 else rng.randrange(3_000_000))
            connection.execute(
                "INSERT INTO state VALUES(?, 1, x'01', ?, 100, ?, ?, '1.2', ?, ?, 'CPU')",
                (number, heard_ms, release, str(release), tier, f"mbv3s-{tier}-r48"),
            )
    connection.executemany(
        "INSERT INTO quarantine VALUES(randomblob(32), ?, 1, ?, NULL)",
        [(n + 1, "boot is not 16 hex digits" if n % 5 else "sequence is -1") for n in range(40)],
    )
    hours, buckets = [], []
    for hour in range(168):
        for tier, (middle, _) in tiers.items():
            # Slower by day, and a release that got faster.
            by_day = 2 if 6 <= hour % 24 <= 15 else 0
            for release in (3, 4):
                keys = {
                    "hour_ms": hour_ms - hour * HOUR_MS,
                    "release": release,
                    "model": str(release),
                    "tier": tier,
                    "device_model": "Pixel 7",
                    "backend": "CPU",
                }
                counts = dict.fromkeys(COUNTED, 0) | {
                    "inferences": 99_200,
                    "failures": 40,
                    "anomalies_latency": 300,
                    "anomalies_confidence": 120,
                    "overwritten_records": 7,
                }
                zeros = {f"{m}_{k}": 0 for m in METRICS for k in ("count", "sum", "min", "max")}
                hours.append(keys | {"windows": 992} | counts | zeros)
                warm = 4 if tier == "low" and hour < 30 else 0
                buckets += [
                    keys
                    | {
                        "metric": "latency_ms",
                        "bucket": (1 << 19) + middle + warm + by_day + step,
                        "n": n * 992,
                    }
                    for step, n in zip(range(0, 32, 4), (20, 30, 22, 12, 8, 5, 2, 1), strict=True)
                ]
    for kind, rows in (("hours", hours), ("buckets", buckets)):
        path = parts.part_path(kind, "2026-11-29", "", 1, 2)
        parts.written(folder, path, lambda file, rows=rows: pq.write_table(pa.Table.from_pylist(rows), file))
        parts.add(connection, [Part(path=path, kind=kind, date="2026-11-29", tier="", rows=len(rows))])
    connection.execute("COMMIT")
    connection.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "state"
    _fill(folder)
    return render(Fleet(folder), policy=POLICY, now_ms=NOW_MS)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty") / "state"
    database.opened(folder).close()
    return render(Fleet(folder), policy=None, now_ms=NOW_MS)


def _opened(browser, html, *, width=1180, dark=False):
    page = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
    )
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: page.errors.append(request.url))
    page.set_content(html)
    return page


def test_a_million_windows(browser, filled):
    """What the page says is what lies in the roll-ups and the state."""
    page = _opened(browser, filled)
    assert page.locator(".tiles dd:not(.note)").all_inner_texts() == [
        "10 000",
        "10 000",
        "999 936",
        "99 993 600",
    ]
    assert page.locator(".tiles .note").all_inner_texts() == [
        "0 revoked",
        "20 silent for a day",
        "last 7 days",
        "0.0403 % failed",
    ]
    figures = page.locator("figure")
    assert [f.locator("b").inner_text() for f in figures.all()] == ["high", "low", "mid"]
    assert figures.nth(0).locator("path.line").count() == 2
    assert figures.nth(0).locator("circle").count() == 2 * 168
    rows = page.locator("section", has_text="What devices run").locator("tr")
    assert rows.nth(1).locator("td").all_inner_texts() == ["4", "4", "high", "mbv3s-high-r48", "750"]
    rollout = page.locator("section", has_text="Rollout").inner_text()
    assert "25 % of devices" in rollout
    assert "under way" in rollout
    anomalies = page.locator("section", has_text="Anomalies").locator("tr")
    assert anomalies.nth(1).locator("td").all_inner_texts() == ["slow inference", "302 400", "0.302 %"]
    apart = page.locator("section", has_text="Kept apart").locator("td")
    assert apart.all_inner_texts() == ["boot is not 16 hex digits", "32", "sequence is -1", "8"]
    assert page.errors == []
    if os.environ.get("EDGELOOP_WRITE_SCREENSHOTS") == "1":
        page.screenshot(path=kit.ROOT / "docs/images/fleet-page.png", full_page=True)
    page.close()


def test_no_windows(browser, empty):
    """A new gateway's page says that there is nothing, and shows no made-up zero percent."""
    page = _opened(browser, empty)
    text = page.locator("body").inner_text()
    for said in ("No windows in the last days", "No device has sent a window", "holds no policy", "- failed"):
        assert said in text
    assert page.locator("svg").count() == 0
    assert page.errors == []
    page.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("which", ["filled", "empty"])
def test_a_phone_shows_it_without_scrolling_sideways(browser, request, which, dark):
    """Nothing is wider than the screen, and text stands out from what is behind it."""
    page = _opened(browser, request.getfixturevalue(which), width=360, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light = [sum(map(int, value[4:-1].split(","))) / 3 for value in (background, ink)]
    assert (light[0] < 60 and light[1] > 200) if dark else (light[0] > 200 and light[1] < 60)
    page.close()


def test_a_running_gateway_shows_its_windows(browser, tmp_path):
    """From a device's upload over compaction to the browser, under the page's own security policy."""
    with kit.gateway(tmp_path / "state", compact_every_s=0.2) as running:
        device = running.client()
        assert device.upload(kit.batch_of([kit.window(k) for k in range(45)])).status == 200
        while device.send("GET", "/metrics").body.count(b"edgeloop_gateway_pending_batches 0.0") == 0:
            pass
        page = browser.new_page()
        response = page.goto(f"http://127.0.0.1:{running.port}/")
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert page.locator(".tiles dd:not(.note)").all_inner_texts() == ["1", "1", "45", "4 500"]
        assert page.locator("figure svg").count() == 1
        assert page.evaluate("getComputedStyle(document.querySelector('.tiles')).display") == "grid"
        page.close()


def test_what_a_device_says_is_text(browser, tmp_path):
    """Names that are markup are shown, not obeyed."""
    connection = database.opened(tmp_path)
    evil = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
    connection.execute("INSERT INTO devices VALUES(1, 'a', x'00', ?, 1, NULL)", (evil,))
    connection.execute(
        "INSERT INTO state VALUES(1, 1, x'01', 1, 1, 1, ?, ?, ?, ?, ?)", (evil, evil, evil, evil, evil)
    )
    connection.execute("INSERT INTO quarantine VALUES(x'00', 1, 1, ?, NULL)", (evil,))
    connection.close()
    page = _opened(browser, render(Fleet(tmp_path), policy=None, now_ms=NOW_MS))
    assert page.title() == "edgeloop fleet"
    assert page.locator("script, img").count() == 0
    assert page.locator("body").inner_text().count(evil) == 4
    page.close()


@pytest.mark.parametrize("policy", [b"", b"{", b"[]", b'{"rollout": {"buckets": "many"}}', b"\xff"])
def test_a_policy_that_cannot_be_read_breaks_nothing(tmp_path, policy):
    """The rest of the page is there."""
    database.opened(tmp_path).close()
    assert "cannot be read" in render(Fleet(tmp_path), policy=policy, now_ms=NOW_MS)
