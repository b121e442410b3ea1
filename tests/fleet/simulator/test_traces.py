"""Device classes from recordings: what was measured comes out again."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fleet.device.errors import UserError
from fleet.simulator.device_classes import (
    HIGH_BELOW_MS,
    LOW_FROM_MS,
    SHARE_OF_TIER,
    Quantiles,
    Range,
    Throttle,
    device_classes,
    pick,
    tier_of,
)
from fleet.simulator.phone import Battery, SimulatedPhone, Temperatures
from fleet.simulator.traces import read_telemetry

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "telemetry.tar"
COUNT = 200_000


@pytest.fixture(scope="module")
def telemetry():
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is not there: recordings are not part of the repository")
    return read_telemetry(SHARED)


@pytest.fixture(scope="module")
def classes(telemetry):
    return device_classes(telemetry)


def named(classes, source):
    return [c for c in classes if c.source == source]


def test_what_the_recordings_hold(telemetry):
    """Every row but batches, systems that are no phones, and tables that contradict themselves."""
    counts = (len(telemetry.mlperf), len(telemetry.ncnn), len(telemetry.qai), len(telemetry.phone))
    assert counts == (84, 8554, 8139, 1480)


def test_the_classes(classes):
    """Phones, boards and kits of every tier; names are unique; servers are none; shares make a whole."""
    assert len({c.name for c in classes}) == len(classes)
    assert {source: len(named(classes, source)) for source in ("mlperf", "qai")} == {"mlperf": 16, "qai": 15}
    assert len(named(classes, "ncnn")) >= 50
    assert not [c for c in classes if "Azure" in c.soc or "EPYC" in c.soc or "Kunpeng" in c.soc]
    for tier, share in SHARE_OF_TIER.items():
        assert sum(c.share for c in classes if c.tier == tier) == pytest.approx(share)


def test_percentiles_of_phones_are_those_of_mlperf(telemetry, classes):
    """P50 to P99 of 200,000 draws within 1 %, P99.9 within 10 %, the mean within 5 %, none too far out."""
    rows = {(r.phone, r.soc, r.latencies_ms): r for r in telemetry.mlperf}
    for one in named(classes, "mlperf"):
        row = rows[one.name.partition(" #")[0], one.soc, one.latency.ms]
        drawn = one.latency_ms(np.random.default_rng(7), size=COUNT)
        got = np.quantile(drawn, [0.5, 0.9, 0.95, 0.99, 0.999])
        np.testing.assert_allclose(got[:4], row.latencies_ms[1:5], rtol=0.01, err_msg=one.name)
        assert got[4] == pytest.approx(row.latencies_ms[5], rel=0.1), one.name
        assert row.latencies_ms[0] <= drawn.min()
        assert drawn.max() <= row.latencies_ms[-1]
        assert drawn.mean() == pytest.approx(row.mean_ms, rel=0.05), one.name


def test_boards_have_the_minimum_mean_and_maximum_of_ncnn(telemetry, classes):
    """Of the fastest CPU setting; the mean within 1 %."""
    rows = [r for r in telemetry.ncnn if r.model == "mobilenet_v3" and not r.gpu]
    for one in named(classes, "ncnn"):
        best = min((r for r in rows if r.device == one.soc), key=lambda r: r.mean_ms)
        drawn = one.latency_ms(np.random.default_rng(7), size=COUNT)
        assert best.min_ms <= drawn.min()
        assert drawn.max() <= best.max_ms
        assert drawn.mean() == pytest.approx(best.mean_ms, rel=0.01), one.name


def test_kits_have_the_median_of_qai(telemetry, classes):
    """Within 1 %."""
    for one in named(classes, "qai"):
        known = {
            r.latency_ms for r in telemetry.qai if (r.device, r.model) == (one.soc, "mobilenet_v3_small")
        }
        drawn = one.latency_ms(np.random.default_rng(7), size=COUNT)
        assert min(abs(np.median(drawn) / ms - 1) for ms in known) < 0.01, one.name


def test_the_same_seed_the_same_fleet(telemetry, classes):
    """Classes, devices, latencies and sensors; another seed is another fleet."""
    again = device_classes(telemetry)
    assert again == classes

    def fleet(seed):
        rng = np.random.default_rng(seed)
        chosen = pick(classes, rng, 50)
        phone = SimulatedPhone(Temperatures(telemetry.phone), rng, clock=lambda: 0.0)
        return [(c.name, float(c.latency_ms(rng, 40.0)[0])) for c in chosen], phone.read()

    assert fleet(1) == fleet(1)
    assert fleet(1) != fleet(2)


def test_a_fleet_has_the_shares(classes):
    """Of 20,000 devices, within two percentage points of a tier's share."""
    chosen = pick(classes, np.random.default_rng(3), 20_000)
    for tier, share in SHARE_OF_TIER.items():
        assert sum(c.tier == tier for c in chosen) / 20_000 == pytest.approx(share, abs=0.02)


def test_a_phone_gets_as_hot_as_the_recorded_one(telemetry):
    """Over the trace, shifted; by then the latency is four times as long."""
    now = [0.0]
    phone = SimulatedPhone(Temperatures(telemetry.phone), np.random.default_rng(5), clock=lambda: now[0])
    seen = []
    for second in range(0, 1600, 2):
        now[0] = float(second)
        seen.append(phone.read().temperature_c)
    assert max(seen) - min(seen) == pytest.approx(19.0)


@pytest.mark.parametrize(
    ("celsius", "times"), [(None, 1.0), (28.0, 1.0), (38.0, 1.0), (41.5, 2.5), (45.0, 4.0), (60.0, 4.0)]
)
def test_heat(celsius, times):
    """30 ms at 28 degrees are 120 ms at 45."""
    assert Throttle().slowdown(celsius) == pytest.approx(times)


@pytest.mark.parametrize(
    ("low", "mean", "high"),
    [(5.0, 5.0, 5.0), (5.0, 5.0, 9.0), (5.0, 9.0, 9.0), (1.0, 2.0, 11.0), (4.0, 7.0, 10.0)],
)
def test_a_range_has_its_mean(low, mean, high):
    """Also where it is an extreme, or all is one number."""
    drawn = Range(min_ms=low, mean_ms=mean, max_ms=high).sample(np.random.default_rng(1), COUNT)
    assert low <= drawn.min()
    assert drawn.max() <= high
    assert drawn.mean() == pytest.approx(mean, rel=0.01)


def test_quantiles_come_out_again():
    """At the knots; between them on a straight line of the logarithm."""
    one = Quantiles(at=(0.0, 0.5, 1.0), ms=(1.0, 4.0, 64.0))
    drawn = one.sample(np.random.default_rng(1), COUNT)
    np.testing.assert_allclose(np.quantile(drawn, [0.25, 0.5, 0.75]), [2.0, 4.0, 16.0], rtol=0.02)
    assert one.median_ms == pytest.approx(4.0)


def test_tiers():
    """By the median."""
    assert [tier_of(ms) for ms in (0.1, HIGH_BELOW_MS, LOW_FROM_MS - 0.1, LOW_FROM_MS)] == [
        "high",
        "mid",
        "mid",
        "low",
    ]


def test_a_battery_goes_down_and_up():
    """By straight lines, and over again."""
    battery = Battery(drain_per_h=9.5, charge_per_h=47.5, start_h=0.0)
    got = [battery.at(hours) for hours in (0.0, 5.0, 9.999, 11.0, 12.0, 17.0)]
    assert [(round(percent), charging) for percent, charging in got] == [
        (100, False),
        (52, False),
        (5, False),
        (52, True),
        (100, False),
        (52, False),
    ]


def table(header, *rows):
    return "\n".join((header, *rows, ""))


MLPERF = table(
    "phone,soc,task,scenario,min_ns,mean_ns,p50_ns,p90_ns,p95_ns,p99_ns,p999_ns,max_ns",
    "P,S,mobilenetV4/x,SingleStream,1000000,2000000,2000000,3000000,4000000,5000000,6000000,7000000",
)
GOOD = {
    "mlperf_mobile_latency.csv": MLPERF,
    "ncnn_benchmark.csv": table(
        "device,num_threads,powersave,gpu_device,cooling_down,loop_count,model,min_ms,max_ms,avg_ms",
        "B,1,0,-1,0,8,mobilenet_v3,20,30,22",
        "C,1,0,-1,0,8,mobilenet_v3,90,99,95",
    ),
    "qai_hub_models_perf.csv": table(
        "model,precision,device,runtime,inference_ms,job_status",
        "mobilenet_v3_small,float,K,tflite,0.9,Passed",
        "mobilenet_v3_small,float,L,tflite,,Failed",
    ),
    "phone_trace_galaxy_c7pro_1s.csv": table(
        "Timestamp,CPU_Load,Freq0_MHz,Freq7_MHz,RAM_Used_MB,Temp_C,Battery_Perc,Voltage_mV",
        "10:00:00,9,1,2,3,31,100,4000",
    ),
}


def packed(path, files, links=()):
    with tarfile.open(path, "w") as tar:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            info = tarfile.TarInfo(name if "/" in name else f"telemetry/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in links:
            info = tarfile.TarInfo(f"telemetry/{name}")
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


def test_a_small_tar(tmp_path):
    """Read without the recordings at hand: what passed, one class each."""
    classes = device_classes(read_telemetry(packed(tmp_path / "t.tar", GOOD)))
    assert [(c.name, c.tier) for c in classes] == [("B", "mid"), ("C", "low"), ("K", "high"), ("P", "high")]


def test_nothing_is_extracted(tmp_path):
    """Members that point out of the folder, and links, are not followed; no file appears."""
    evil = GOOD | {"../../escaped": "x", "/tmp/absolute-escape": "x"}
    read_telemetry(packed(tmp_path / "t.tar", evil))
    assert [path.name for path in tmp_path.iterdir()] == ["t.tar"]
    assert not Path("/tmp/absolute-escape").exists()
    without = {name: text for name, text in GOOD.items() if not name.startswith("phone")}
    link = [("phone_trace_galaxy_c7pro_1s.csv", "/etc/passwd")]
    with pytest.raises(UserError, match="phone_trace"):
        read_telemetry(packed(tmp_path / "l.tar", without, link))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {name: text for name, text in GOOD.items() if not name.startswith("ncnn")},
        GOOD | {"ncnn_benchmark.csv": "a,b\n1,2\n"},
        GOOD | {"mlperf_mobile_latency.csv": MLPERF.replace("3000000", "many")},
        GOOD | {"mlperf_mobile_latency.csv": MLPERF.replace("3000000", "9000000")},
        GOOD | {"mlperf_mobile_latency.csv": MLPERF.replace("1000000", "-1000000")},
        GOOD | {"qai_hub_models_perf.csv": GOOD["qai_hub_models_perf.csv"].replace("0.9", "nan")},
        GOOD | {"qai_hub_models_perf.csv": b"\xff\xfe" * 100},
        GOOD | {"phone_trace_galaxy_c7pro_1s.csv": "Timestamp\n1\n"},
    ],
)
def test_a_tar_of_something_else(tmp_path, files):
    """One error with the tar's path."""
    with pytest.raises(UserError, match=r"t\.tar"):
        read_telemetry(packed(tmp_path / "t.tar", files))


@pytest.mark.parametrize("content", [None, b"", b"x" * 5000])
def test_no_tar(tmp_path, content):
    """Missing, empty, or no tar at all."""
    path = tmp_path / "t.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"t\.tar"):
        read_telemetry(path)


def test_a_truncated_tar(tmp_path):
    """A download that broke off."""
    path = packed(tmp_path / "t.tar", GOOD)
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(UserError, match=r"t\.tar"):
        read_telemetry(path)


def test_recordings_of_one_tier_alone(tmp_path):
    """No fleet can be made of them."""
    files = GOOD | {"ncnn_benchmark.csv": GOOD["ncnn_benchmark.csv"].splitlines()[0] + "\n"}
    with pytest.raises(UserError, match="mid, low"):
        device_classes(read_telemetry(packed(tmp_path / "t.tar", files)))
