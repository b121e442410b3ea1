"""Every byte sent with consent or about it: nothing names a device or a user, no pixel leaves unasked."""

import gzip
import json
import time
from pathlib import Path

import pytest
from leaks import assert_no_leak, forbidden, json_keys, leaks
from made import ENVIRONMENT, NOW_MS, VERSIONS, context, image
from recording_gateway import RecordingGateway, Reply

from fleet.device.credentials import DeviceKey
from fleet.device.degrade.sensors_linux import LinuxSensors
from fleet.device.monitor import Monitor
from fleet.device.monitor.client import GatewayClient
from fleet.device.privacy.consent import Consent
from fleet.device.privacy.fallback import CloudFallback
from fleet.device.privacy.ids import HashedIds
from fleet.device.privacy.samples import Samples
from fleet.device.release import UploadRule

RAW = {"serial": "R58M123ABCD", "imei": "490154203237518", "account": "alice.doe@example.org"}
LABELS = ("cat", "dog", "fox", "owl")
HEADERS = {"host", "accept-encoding", "content-type", "content-length"} | {
    f"edgeloop-{name}" for name in ("device", "time", "nonce", "signature")
}
KEYS = {"schema", "consent", "taken_ms", "image_png", "predicted", "confidence", "reason"} | {
    *(
        "versions",
        *(f"versions.{name}" for name in ("release", "model", "engine", "config", "monitor", "app")),
    ),
    "environment",
    *(f"environment.{name}" for name in ("device_model", "os", "network", "charging", "backend", "driver")),
    *(f"environment.{name}" for name in ("tier", "variant")),
}


class Phone:
    """All that sends, on one folder whose path is itself a secret."""

    def __init__(self, folder, url):
        self.consent = Consent(folder)
        self.key = DeviceKey.load(folder / "key") if folder.exists() else DeviceKey(b"k" * 32)
        self.samples = Samples(self.consent, GatewayClient(url), self.key, confidence_minimum=0.5)
        self.cloud = CloudFallback(
            url, self.key, self.consent, labels=LABELS, confidence_minimum=0.5, deadline_s=30.0
        )
        self.cloud.enabled = True

    def use(self, picture):
        """Everything that may send, once."""
        for anomalies in ((), ("latency",)):
            self.samples.offer(picture, context(anomalies=anomalies))
        pending = self.cloud.ask(picture, context())
        pending.wait()
        self.samples.work("wifi")


@pytest.fixture
def gateway():
    with RecordingGateway() as running:
        running.reply = lambda _request: Reply(200)
        yield running


def texts(folder):
    return forbidden(**RAW, private_folder=str(folder), private_name=folder.name)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "alices-private-phone"


def test_without_consent_not_a_byte(folder, gateway):
    """Never asked, refused, revoked, or a file that cannot be trusted: no connection is made at all."""
    phone = Phone(folder, gateway.url)
    phone.use(image(1))
    folder.mkdir(mode=0o700)
    (folder / "consent.json").write_text('{"granted": true}')
    phone.use(image(2))
    phone.consent.grant("2026-1", NOW_MS)
    phone.samples.revoke()
    phone.use(image(3))
    phone.cloud.close()
    assert gateway.raw == []


def test_with_consent_the_picture_and_the_context_alone(folder, gateway):
    """A sample, a question to the cloud: the picture, the wire's fields, the known headers; no name."""
    phone = Phone(folder, gateway.url)
    phone.consent.grant("2026-1", NOW_MS)
    phone.use(image(1))
    phone.cloud.close()
    assert sorted(request.path for request in gateway.requests) == ["/v1/classify", "/v1/samples"]
    captured = gateway.everything()
    assert_no_leak(captured, texts(folder), images=[image(2)])
    assert leaks(captured, {}, images=[image(1)])  # the one that was consented to is there
    for request in gateway.requests:
        assert set(request.headers) <= HEADERS
        assert json_keys(request.body) == KEYS


def test_after_revocation_a_request_without_a_picture(folder, gateway):
    """The request to delete names the device by its hashed id alone."""
    phone = Phone(folder, gateway.url)
    phone.consent.grant("2026-1", NOW_MS)
    phone.use(image(1))
    phone.samples.revoke()
    before = len(gateway.everything())
    phone.use(image(2))
    phone.cloud.close()
    after = gateway.everything()[before:]
    (request,) = [request for request in gateway.requests if request.method == "DELETE"]
    assert (request.body, set(request.headers) <= HEADERS) == (b"", True)
    assert_no_leak(after, texts(folder), images=[image(1), image(2)])


def receipt(request):
    """Takes every window."""
    windows = json.loads(gzip.decompress(request.body))["windows"]
    return Reply(200, {"accepted": len(windows), "duplicates": 0, "quarantined": [], "server_ms": NOW_MS})


def test_windows_are_statistics_alone(folder, gateway):
    """The monitor with this machine's sensors, watching pictures: no name, no path, no pixel, no raw id."""
    gateway.reply = receipt
    at_once = tuple(
        UploadRule(network=network, charging=charging, every_s=1, share=1.0)
        for network in ("wifi", "mobile")
        for charging in (True, False)
    )
    pictures = [image(seed) for seed in range(3)]
    with Monitor(
        folder / "monitor",
        DeviceKey(b"k" * 32),
        gateway.url,
        versions=VERSIONS,
        environment=ENVIRONMENT,
        sensors=LinuxSensors(),
        upload=at_once,
    ) as monitor:
        for number in range(250):
            picture = pictures[number % 3]
            monitor.record(500.0, 0.1, 3, float(picture.mean()), float(picture.std()))
        assert monitor.flush()
        until = time.monotonic() + 60
        while not gateway.requests and time.monotonic() < until:
            time.sleep(0.05)
    assert {request.path for request in gateway.requests} == {"/v1/windows"}
    assert_no_leak(gateway.everything(), texts(folder), images=pictures)
    assert all(set(request.headers) <= HEADERS | {"content-encoding"} for request in gateway.requests)


def test_hashed_ids_pass_and_raw_ones_do_not():
    """What an app makes of its ids before it names them anywhere."""
    ids = HashedIds(b"s" * 32)
    hashed = json.dumps({name: ids.hashed(name, raw) for name, raw in RAW.items()}).encode()
    assert_no_leak(hashed, dict(RAW))
    assert len(leaks(json.dumps(RAW).encode(), dict(RAW))) >= len(RAW)


def test_nothing_of_this_side_writes_outside_its_folder(folder, gateway, monkeypatch):
    """What is kept on the device lies in one folder, for this user alone."""
    monkeypatch.chdir(folder.parent)
    phone = Phone(folder, gateway.url)
    phone.consent.grant("2026-1", NOW_MS)
    phone.samples.offer(image(1), context())
    phone.samples.work("none")
    phone.cloud.close()
    assert [path.name for path in Path.cwd().iterdir()] == [folder.name]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "samples").stat().st_mode & 0o777 == 0o700
