"""Answers about the fleet: the same as from the pooled windows, whatever was merged in between."""

import dataclasses
import random

import gateway_kit as kit
import numpy as np
import pytest

from fleet.device.errors import UserError
from fleet.device.histogram import Histogram, merged
from fleet.gateway import database, merge, parts
from fleet.gateway.compact import compact
from fleet.gateway.queries import Fleet

HOUR_MS = 3_600_000
QUANTILES = (0.0, 0.01, 0.5, 0.95, 0.99, 1.0)


def _window(sequence, *, hour_ms, release, tier, scale):
    rng = np.random.default_rng(sequence)
    one = kit.window(sequence, rng, end_ms=hour_ms + sequence)
    return dataclasses.replace(
        one,
        versions=dataclasses.replace(one.versions, release=release),
        environment=dataclasses.replace(one.environment, tier=tier),
        performance=dataclasses.replace(
            one.performance, latency_ms=Histogram.of(rng.lognormal(2, 0.5, 100) * scale)
        ),
        resource=dataclasses.replace(
            one.resource,
            power_w=Histogram.of(np.round(rng.normal(0, 2, 20), 1)),  # negative ones and zeros
        ),
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """90 windows of two hours, releases and tiers, sent in 30 batches, each compacted and then merged."""
    folder = tmp_path_factory.mktemp("queries") / "state"
    hour_ms = kit.now_ms() // HOUR_MS * HOUR_MS - HOUR_MS
    windows = [
        _window(
            n,
            hour_ms=hour_ms - (n % 2) * HOUR_MS,
            release=1 + n % 3 // 2,
            tier="mid" if n % 5 else "low",
            scale=1 + n % 3,
        )
        for n in range(90)
    ]
    random.Random(1).shuffle(windows)
    with kit.gateway(folder, compact_every_s=0) as running:
        device, other = running.client(), running.client()
        for at in range(0, 90, 3):
            assert device.upload(kit.batch_of(windows[at : at + 3])).json()["accepted"] == 3
            compact(folder)
        other.upload(kit.batch_of([windows[0]]))
    return Fleet(folder), windows, hour_ms, folder


def _close(got, wanted):
    assert got == pytest.approx(wanted, rel=1e-12), (got, wanted)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("metric", ["latency_ms", "power_w", "confidence"])
def test_percentiles_are_those_of_the_pooled_windows(fleet, metric, raw):
    """By release and tier, from roll-ups and raw: what Histogram.quantile says of all windows together."""
    asked, windows, _, _ = fleet
    part = {"latency_ms": "performance", "power_w": "resource", "confidence": "quality"}[metric]
    groups = asked.percentiles(metric, by=("release", "tier"), quantiles=QUANTILES, raw=raw)
    assert len(groups) == 4
    for group in groups:
        pooled = merged(
            getattr(getattr(w, part), metric)
            for w in windows
            if (w.versions.release, w.environment.tier) == (group.keys["release"], group.keys["tier"])
        )
        assert group.count == pooled.count
        # The smallest and largest values are exact in a histogram, in a bucket within 2.2 %.
        _close(group.values[1:-1], [pooled.quantile(q) for q in QUANTILES[1:-1]])
        assert group.values[0] == pytest.approx(pooled.min, rel=0.0221)
        assert group.values[-1] == pytest.approx(pooled.max, rel=0.0221)


def test_hours_are_those_of_the_windows(fleet):
    """Windows count for the hour in which they ended on the device, not for that of their arrival."""
    asked, _, hour_ms, _ = fleet
    rows = asked.counts(by=("hour_ms",))
    assert [(row["hour_ms"], row["windows"]) for row in rows] == [(hour_ms - HOUR_MS, 45), (hour_ms, 45)]
    assert asked.counts(since_ms=hour_ms)[0]["windows"] == 45
    assert asked.counts(until_ms=hour_ms - HOUR_MS) == []
    assert asked.percentiles("latency_ms", since_ms=hour_ms)[0].count == 4500


def test_counts_add_up(fleet):
    """Inferences, anomalies and loss are the sums over the windows."""
    asked, windows, _, _ = fleet
    (row,) = asked.counts()
    assert row["inferences"] == 9000
    assert row["anomalies_latency"] == sum(w.anomalies["latency"] for w in windows) == 180
    assert row["overwritten_records"] == 90
    assert row["failures"] == 0


def test_many_files_became_few(fleet):
    """Thirty compactions left fewer files than batches, and the old ones go once nobody can read them."""
    _, _, _, folder = fleet
    connection = database.opened(folder)
    for kind in ("windows", "hours", "buckets"):
        live = parts.live(connection, kind)
        assert len(live) < 30
        assert all((folder / part.path).is_file() for part in live)
    retired = connection.execute("SELECT count(*) FROM parts WHERE retired_ms IS NOT NULL").fetchone()[0]
    assert retired >= 24
    parts.sweep(connection, folder, now_ms=kit.now_ms() + 1_000_000)
    listed = {folder / path for (path,) in connection.execute("SELECT path FROM parts")}
    connection.close()
    assert {file for file in (folder / parts.FOLDER).rglob("*") if file.is_file()} == listed
    assert merge._within([], 1) == []


def test_what_devices_run_is_known_at_once(fleet):
    """The newest window of a device says what it runs; a device that is silent is missing."""
    asked, windows, _, _ = fleet
    newest = max(windows, key=lambda w: w.sequence)
    rows = asked.running()
    assert sum(row["devices"] for row in rows) == 2
    assert {"release": newest.versions.release, "tier": newest.environment.tier}.items() <= next(
        row
        for row in rows
        if row["release"] == newest.versions.release and row["tier"] == newest.environment.tier
    ).items()
    now_ms = kit.now_ms()
    assert asked.devices(now_ms=now_ms) == {"enrolled": 2, "revoked": 0, "heard": 2, "missing": 0}
    assert asked.devices(now_ms=now_ms + 2 * 86_400_000)["missing"] == 2
    assert len(asked.missing(now_ms=now_ms + 2 * 86_400_000)) == 2


def test_names_that_are_none_are_refused(fleet):
    """Names become part of the SQL: only known ones do."""
    asked = fleet[0]
    for call in (
        lambda: asked.percentiles("latency_ms; DROP TABLE x"),
        lambda: asked.percentiles("latency_ms", by=("1) --",)),
        lambda: asked.counts(by=("tier, (SELECT 1)",)),
        lambda: asked.percentiles("latency_ms", quantiles=(50,)),
    ):
        with pytest.raises(UserError):
            call()


def test_a_fleet_without_windows_has_no_answers(tmp_path):
    """Nothing is made up where there is nothing."""
    database.opened(tmp_path).close()
    empty = Fleet(tmp_path)
    assert empty.percentiles("latency_ms", by=("tier",)) == []
    assert empty.percentiles("latency_ms", raw=True) == []
    assert empty.counts() == []
    assert empty.running() == []
    assert empty.devices(now_ms=1) == {"enrolled": 0, "revoked": 0, "heard": 0, "missing": 0}


def test_duckdb_reaches_the_state_only(tmp_path):
    """The analytics cannot read or write elsewhere, nor be told to."""
    import duckdb

    from fleet.gateway.duck import confined

    (tmp_path / "state").mkdir()
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with confined(tmp_path / "state") as connection:
        for sql in (
            f"SELECT * FROM read_csv('{tmp_path}/secret.csv')",
            f"SELECT * FROM read_csv('{tmp_path}/state/../secret.csv')",
            f"COPY (SELECT 1) TO '{tmp_path}/out.csv'",
            "SET enable_external_access = true",
            "INSTALL httpfs",
        ):
            with pytest.raises(duckdb.Error):
                connection.execute(sql)
    assert not (tmp_path / "out.csv").exists()
