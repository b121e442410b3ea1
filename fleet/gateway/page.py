"""The fleet page: one HTML document that loads and runs nothing, for phone and desk, light and dark."""

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleet.device.errors import UserError
from fleet.device.release import BUCKETS, Policy
from fleet.gateway.chart import HOUR_MS, Line, chart, clock
from fleet.gateway.columns import ANOMALIES
from fleet.gateway.queries import Fleet, Percentiles

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page."""
_DAYS = 7
_MOST_ROWS = 30
_REFRESH_S = 60
_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_ANOMALY_NAMES = {
    "latency": "slow inference",
    "memory": "much memory",
    "confidence": "low confidence",
    "failures": "failures in a row",
}
_LOSS_NAMES = {
    "overwritten_records": "records overwritten in the ring",
    "dropped_windows": "windows the device dropped",
    "not_finite": "values NaN or infinite",
}


def render(fleet: Fleet, *, policy: bytes | None, now_ms: int) -> str:
    """The page.

    Args:
        fleet: Whom to ask.
        policy: Content of the policy target; None when the repository has none.
        now_ms: Milliseconds since 1970.
    """
    since_ms = (now_ms // HOUR_MS - _DAYS * 24 + 1) * HOUR_MS
    until_ms = now_ms + 2 * 24 * HOUR_MS  # clocks of devices may be a little ahead
    totals = fleet.counts(since_ms=since_ms, until_ms=until_ms)
    latency = fleet.percentiles(
        "latency_ms", by=("tier", "hour_ms"), quantiles=(0.5, 0.95), since_ms=since_ms, until_ms=until_ms
    )
    sections = (
        _tiles(fleet.devices(now_ms=now_ms), totals[0] if totals else None),
        _latency(latency, since_ms, now_ms),
        _section("What devices run", _running(fleet.running()), "as each said last"),
        _section("Rollout", _rollout(policy), "from the policy in the repository"),
        _section("Anomalies", _anomalies(totals), f"last {_DAYS} days, of all inferences"),
        _section("Loss", _loss(totals), f"last {_DAYS} days, as devices counted it"),
        _section("Kept apart", _quarantine(fleet.quarantined()), "windows in quarantine by reason"),
        _section("Silent devices", _missing(fleet.missing(now_ms=now_ms, most=10)), "not heard of for a day"),
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>edgeloop fleet</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{_REFRESH_S}"><style>{_STYLE}</style></head><body>'
        f"<header><h1>Fleet</h1><p>{clock(now_ms)} · percentiles within 2.2 % of a measured value</p>"
        "</header>"
        f"<main>{''.join(sections)}</main></body></html>"
    )


def _tiles(devices: dict[str, int], totals: dict[str, Any] | None) -> str:
    counts = totals or {"windows": 0, "inferences": 0, "failures": 0}
    tiles = (
        ("devices", _number(devices["enrolled"]), f"{_number(devices['revoked'])} revoked"),
        ("heard of", _number(devices["heard"]), f"{_number(devices['missing'])} silent for a day"),
        ("windows", _number(counts["windows"]), f"last {_DAYS} days"),
        (
            "inferences",
            _number(counts["inferences"]),
            f"{_share(counts['failures'], counts['inferences'])} failed",
        ),
    )
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd><dd class=note>{note}</dd></div>" for name, value, note in tiles
    )
    return f"<dl class=tiles>{cells}</dl>"


def _latency(groups: list[Percentiles], since_ms: int, now_ms: int) -> str:
    tiers: dict[str, list[Percentiles]] = {}
    for group in groups:
        tiers.setdefault(str(group.keys["tier"]), []).append(group)
    if not tiers:
        return _section("Latency", "<p class=empty>No windows in the last days.</p>", "P50 and P95 by hour")
    first = max(since_ms, min(int(group.keys["hour_ms"]) for group in groups) - HOUR_MS)
    last = max(now_ms // HOUR_MS * HOUR_MS, *(int(group.keys["hour_ms"]) for group in groups))
    figures = []
    for tier, hours in sorted(tiers.items(), key=lambda item: -sum(group.count for group in item[1]))[:6]:
        lines = [
            Line(
                name=name,
                css_class=name.lower(),
                points=[(int(group.keys["hour_ms"]), group.values[k]) for group in hours],
            )
            for k, name in enumerate(("P50", "P95"))
        ]
        drawn = chart(
            lines, unit="ms", first_ms=first, last_ms=last, title=f"Latency of tier {html.escape(tier)}"
        )
        count = _number(sum(group.count for group in hours))
        caption = (
            f"<figcaption><b>{html.escape(tier)}</b> <span class=p50>P50</span> <span class=p95>P95</span>"
            f" <span class=note>n = {count}</span></figcaption>"
        )
        figures.append(f"<figure>{caption}{drawn}</figure>")
    return _section("Latency", f"<div class=figures>{''.join(figures)}</div>", "ms by hour (UTC) and tier")


def _running(rows: list[dict[str, Any]]) -> str:
    heads = ("release", "model", "tier", "variant", "devices")
    cells = [
        (str(r["release"]), r["model_version"], r["tier"], r["variant"], _number(r["devices"])) for r in rows
    ]
    return _table(heads, cells, "No device has sent a window yet.")


def _rollout(policy: bytes | None) -> str:
    if policy is None:
        return "<p class=empty>The repository holds no policy.</p>"
    try:
        known = Policy.parse(policy)
    except UserError:
        return "<p class=empty>The policy in the repository cannot be read.</p>"
    rollout = known.rollout
    rows = [
        ("release", str(rollout.counter)),
        ("share", f"{100 * rollout.buckets / BUCKETS:g} % of devices"),
        ("state", "stopped" if rollout.stopped else "complete" if rollout.complete else "under way"),
        ("policy version", str(known.version)),
    ]
    bar = f'<progress max="{BUCKETS}" value="{rollout.buckets}"></progress>'
    return bar + _table((), rows, "")


def _anomalies(totals: list[dict[str, Any]]) -> str:
    rows = [
        (
            _ANOMALY_NAMES[name],
            _number(t[f"anomalies_{name}"]),
            _share(t[f"anomalies_{name}"], t["inferences"]),
        )
        for t in totals
        for name in ANOMALIES
    ]
    return _table(("", "count", "share"), rows, "No windows, no anomalies.")


def _loss(totals: list[dict[str, Any]]) -> str:
    rows = [(text, _number(t[name])) for t in totals for name, text in _LOSS_NAMES.items()]
    return _table(("", "count"), rows, "No windows, no loss.")


def _quarantine(rows: list[tuple[str, int]]) -> str:
    return _table(("reason", "windows"), [(reason, _number(n)) for reason, n in rows], "None.")


def _missing(rows: list[tuple[str, int]]) -> str:
    cells = [(f"{device[:12]}…", clock(last_ms)) for device, last_ms in rows]
    return _table(("device", "last heard of"), cells, "None.")


def _section(title: str, content: str, note: str) -> str:
    wide = " class=wide" if title in ("Latency", "What devices run") else ""
    return f"<section{wide}><h2>{title}</h2><p class=note>{note}</p>{content}</section>"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]], empty: str) -> str:
    rows = list(rows)
    if not rows:
        return f"<p class=empty>{empty}</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows[:_MOST_ROWS]
    )
    more = f"<p class=note>and {len(rows) - _MOST_ROWS} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<div class=scroll><table>{f'<tr>{head}</tr>' if heads else ''}{body}</table></div>{more}"


def _number(count: int) -> str:
    return f"{count:,}".replace(",", " ")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "-"
