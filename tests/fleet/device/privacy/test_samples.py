"""Hard samples: collected, sent and erased with consent, never without."""

import base64
import errno
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import cv2
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from made import DAY_MS, NOW_MS, context, image
from recording_gateway import RecordingGateway, Reply

from fleet.device.credentials import DeviceKey, is_signed_by, signed_request
from fleet.device.errors import UserError
from fleet.device.monitor.client import GatewayClient
from fleet.device.privacy import spool as spool_module
from fleet.device.privacy.consent import CONSENT, SAMPLES, SENT, Consent
from fleet.device.privacy.samples import FIRST_REST_S, Samples
from fleet.device.privacy.spool import SampleLimits
from fleet.device.wire import MOST_SAMPLE_BYTES, SCHEMA

KEY = DeviceKey(b"k" * 32)
PATIENT_S = 30.0


class Device:
    """One device's samples, on clocks of its own."""

    def __init__(self, folder, url="http://127.0.0.1:9", *, granted=True, **limits):
        self.consent = Consent(folder)
        self.wall_ms, self.clock_s = NOW_MS, 0.0
        if granted:
            self.consent.grant("2026-1", NOW_MS)
        self.client = GatewayClient(url, silence_s=PATIENT_S, answer_s=PATIENT_S)
        self.limits = SampleLimits(**limits)
        self.start()

    def start(self):
        self.samples = Samples(
            self.consent,
            self.client,
            KEY,
            confidence_minimum=0.5,
            limits=self.limits,
            wall=lambda: self.wall_ms / 1000,
            clock=lambda: self.clock_s,
        )

    def see(self, *seeds, network="none", **more):
        for seed in seeds:
            self.samples.offer(image(seed), context(**more))
            self.samples.work(network)

    @property
    def spooled(self):
        folder = self.consent.folder / SAMPLES
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def gateway():
    with RecordingGateway() as running:
        yield running


@pytest.fixture
def device(tmp_path, gateway):
    return Device(tmp_path / "privacy", gateway.url)


def methods(gateway):
    return [request.method for request in gateway.requests]


def test_a_hard_sample_arrives_as_the_wire_says(device, gateway):
    """The picture, pixel for pixel, with its context; signed; then it is gone here."""
    device.see(1, network="wifi")
    (request,) = gateway.requests
    assert (request.method, request.path) == ("POST", "/v1/samples")
    record = json.loads(request.body)
    picture = cv2.imdecode(
        np.frombuffer(base64.b64decode(record.pop("image_png")), np.uint8), cv2.IMREAD_COLOR
    )
    np.testing.assert_array_equal(picture[..., ::-1], image(1))
    versions, environment = record.pop("versions"), record.pop("environment")
    assert record == {
        "schema": SCHEMA,
        "consent": True,
        "taken_ms": NOW_MS,
        "predicted": 3,
        "confidence": 0.1,
        "reason": "low confidence",
    }
    assert (versions["release"], environment["tier"]) == (7, "mid")
    described = signed_request("POST", request.path, request.headers, request.body)
    assert is_signed_by(KEY.public, described, request.headers["edgeloop-signature"])
    assert (device.spooled, device.samples.counts["sent"]) == ([], 1)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"confidence": 0.5}, None),
        ({"confidence": 0.49}, "low confidence"),
        ({"confidence": None}, None),
        ({"confidence": 0.9, "anomalies": ("latency", "memory")}, "anomaly: latency, memory"),
        ({"confidence": float("nan")}, "low confidence"),
    ],
)
def test_what_is_hard(device, gateway, more, reason):
    """Doubtful or anomalous; NaN is doubtful and goes as null."""
    device.see(1, network="wifi", **more)
    records = [json.loads(request.body) for request in gateway.requests]
    assert [record["reason"] for record in records] == ([reason] if reason else [])
    assert all(record["confidence"] in (0.49, 0.9, None) for record in records)


def test_without_consent_nothing_is_written_or_sent(tmp_path, gateway):
    """Not even a folder; and not when consent comes later."""
    device = Device(tmp_path / "privacy", gateway.url, granted=False)
    device.see(1, 2, 3, network="wifi")
    assert not device.consent.folder.exists()
    device.consent.grant("2026-1", NOW_MS)
    device.samples.work("wifi")
    assert gateway.raw == []


@pytest.mark.parametrize("network", ["mobile", "none", "unknown"])
def test_pictures_wait_for_a_network_that_costs_nothing(device, gateway, network):
    """They are kept; on WiFi they go, the oldest first."""
    device.see(1, 2, network=network)
    assert gateway.raw == []
    device.samples.work("wifi")
    sent = [json.loads(request.body)["image_png"] for request in gateway.requests]
    assert len(sent) == 2
    assert device.spooled == []


def test_the_daily_budget(tmp_path):
    """So many a day; a day later as many again; a restart gives none."""
    device = Device(tmp_path / "privacy", per_day=3)
    device.see(*range(5))
    device.start()
    device.see(*range(5, 8))
    assert len(device.spooled) == 3
    device.wall_ms += DAY_MS
    device.see(*range(10, 15))
    assert len(device.spooled) == 6


def test_a_clock_that_is_put_back_opens_no_budget(tmp_path):
    """Nor does one that was never set collect anything."""
    device = Device(tmp_path / "privacy", per_day=2)
    device.see(1, 2, 3)
    device.wall_ms -= 3 * DAY_MS
    device.see(4, 5)
    assert len(device.spooled) == 2
    device.wall_ms = 12_345
    device.see(6)
    assert len(device.spooled) == 2
    device.wall_ms = NOW_MS
    assert device.samples.counts == {"kept": 2, "daily budget": 4}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 9999, b'{"day": "x", "used": 0}', b'{"day": 1, "used": null}']
)
def test_a_budget_that_cannot_be_read_is_used_up(tmp_path, content):
    """Until the next day."""
    device = Device(tmp_path / "privacy")
    (device.consent.folder / "budget.json").write_bytes(content)
    device.see(1)
    assert device.spooled == []
    device.wall_ms += DAY_MS
    device.see(2)
    assert len(device.spooled) == 1


def test_the_disk_bound(tmp_path):
    """What waits never takes more; what is left over is counted."""
    device = Device(tmp_path / "privacy", most_bytes=12_000)
    device.see(*range(6))
    sizes = [path.stat().st_size for path in (device.consent.folder / SAMPLES).iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) <= 12_000
    assert device.samples.counts["disk bound"] == 4


def test_the_same_picture_is_kept_once(device):
    """A still scene does not fill the budget."""
    device.see(1, 1, 1)
    assert device.samples.counts == {"kept": 1, "known": 2}


def test_a_picture_too_large_for_the_gateway(tmp_path):
    """It would be refused for ever: it is not kept."""
    device = Device(tmp_path / "privacy", most_bytes=1 << 30)
    device.samples.offer(image(1, side=1500), context())
    assert MOST_SAMPLE_BYTES < 1500 * 1500 * 3 * 4 / 3
    device.samples.work("none")
    assert (device.spooled, device.samples.counts["too large"]) == ([], 1)


def test_what_is_no_picture(device):
    """Counted; the next one is kept."""
    device.samples.offer(np.zeros((0, 0, 3), np.uint8), context())
    device.see(1)
    assert device.samples.counts == {"no image": 1, "kept": 1}


def test_offering_never_waits(device):
    """With nobody working, a few are held and the rest are left, at once; the frame stays the caller's."""
    frame = image(1)
    assert [device.samples.offer(frame, context()) for _ in range(6)] == [True] * 4 + [False] * 2
    frame[:] = 0
    device.samples.work("none")
    (name,) = device.spooled
    body = json.loads((device.consent.folder / SAMPLES / name).read_bytes())
    picture = cv2.imdecode(np.frombuffer(base64.b64decode(body["image_png"]), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(picture[..., ::-1], image(1))


def test_a_full_disk_loses_the_sample_and_nothing_else(device, monkeypatch):
    """Counted; when there is room again the next is kept."""
    device.see(1)

    def refuse(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "write_durably", refuse)
        device.see(2)
    device.see(3)
    assert device.samples.counts == {"kept": 2, "disk": 1}
    assert len(device.spooled) == 2


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_sample_that_is_refused_is_given_up(device, gateway, status):
    """The same bytes would be refused again; others follow."""
    gateway.reply = lambda _request: Reply(status)
    device.see(1, 2, network="wifi")
    assert (device.spooled, device.samples.counts["refused"], len(gateway.requests)) == ([], 2, 2)


@pytest.mark.parametrize("status", [401, 403, 408, 429, 500, 503, 302])
def test_a_sample_that_could_not_be_taken_waits(device, gateway, status):
    """It is tried again after a rest, each longer than the one before; a redirect is not followed."""
    gateway.reply = lambda _request: Reply(status)
    device.see(1, network="wifi")
    device.samples.work("wifi")
    assert len(gateway.requests) == 1
    device.clock_s += FIRST_REST_S
    device.samples.work("wifi")
    assert len(gateway.requests) == 2
    device.clock_s += FIRST_REST_S
    device.samples.work("wifi")
    assert len(gateway.requests) == 2
    gateway.reply = lambda _request: Reply(201)
    device.clock_s += FIRST_REST_S
    device.samples.work("wifi")
    assert (len(gateway.requests), device.spooled) == (3, [])


def test_a_wrong_clock_delays_neither_samples_nor_erasure(device, gateway):
    """The gateway names its time, and the request is signed with it; the sample keeps the device's own."""
    server_ms = NOW_MS + 40 * DAY_MS

    def reply(request):
        if abs(int(request.headers["edgeloop-time"]) - server_ms) > 300_000:
            return Reply(401, {"error": {"code": "clock", "server_ms": server_ms}})
        return Reply(200)

    gateway.reply = reply
    device.see(1, network="wifi")
    device.samples.revoke()
    device.samples.work("wifi")
    assert methods(gateway) == ["POST", "POST", "DELETE"]
    assert json.loads(gateway.requests[1].body)["taken_ms"] == NOW_MS
    assert (device.samples.counts["sent"], device.samples.counts["erased"]) == (1, 1)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"error": None},
        {"error": {"code": "clock"}},
        {"error": {"code": "clock", "server_ms": "now"}},
        {"error": {"code": "clock", "server_ms": 10**20}},
        {"error": {"code": "signature", "server_ms": NOW_MS}},
    ],
)
def test_a_refusal_that_names_no_time(device, gateway, record):
    """It is tried again later, not at once."""
    gateway.reply = lambda _request: Reply(401, record)
    device.see(1, network="wifi")
    assert methods(gateway) == ["POST"]
    assert len(device.spooled) == 1


def test_what_else_lies_in_the_spool(device, gateway, tmp_path):
    """A pipe, a link, a folder and a file that grew are not sent, and do not hang; a good sample is."""
    device.see(1)
    folder = device.consent.folder / SAMPLES
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to(tmp_path / "secret")
    (folder / "folder.json").mkdir()
    (folder / "grown.json").write_bytes(b"x" * (MOST_SAMPLE_BYTES + 1))
    device.samples.work("wifi")
    assert methods(gateway) == ["POST"]
    assert b"image_png" in gateway.requests[0].body


def test_no_gateway_at_all(tmp_path):
    """It waits."""
    device = Device(tmp_path / "privacy", "http://127.0.0.1:9")
    device.see(1, network="wifi")
    assert len(device.spooled) == 1


@pytest.mark.parametrize(
    "url", ["http://example.org", "http://192.0.2.1", "http://[2001:db8::1]", "ftp://127.0.0.1"]
)
def test_pictures_do_not_travel_in_the_clear(url):
    """Only over TLS, or to this machine."""
    with pytest.raises(UserError, match="https"):
        GatewayClient(url)


def certificate(tmp_path, name="127.0.0.1"):
    """A server's TLS context with a certificate of its own making; and the certificate's path."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(name))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "server.pem"
    pem = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context, path


@pytest.mark.parametrize(
    ("name", "trusted", "arrives"), [("127.0.0.1", True, 1), ("127.0.0.2", True, 0), ("127.0.0.1", False, 0)]
)
def test_over_tls(tmp_path, monkeypatch, name, trusted, arrives):
    """With a certificate that is trusted and names the gateway; with any other, not a byte of HTTP."""
    server, path = certificate(tmp_path, name)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with RecordingGateway(server) as gateway:
        device = Device(tmp_path / "privacy", gateway.url)
        device.see(1, network="wifi")
        assert (len(gateway.requests), len(device.spooled)) == (arrives, 1 - arrives)
        assert bool(gateway.everything().strip()) is bool(arrives)


def test_revoking_deletes_here_at_once_and_there_until_it_is_done(device, gateway):
    """What waits is gone before `revoke` returns; the gateway is asked until it says 2xx, and not after."""
    device.see(1, network="wifi")
    device.see(2, network="none")
    device.samples.revoke()
    assert device.spooled == []
    gateway.reply = lambda _request: Reply(503)
    device.samples.work("mobile")
    gateway.reply = lambda _request: Reply(200, {"samples": 1, "server_ms": 1})
    device.samples.work("mobile")
    assert methods(gateway) == ["POST", "DELETE"]
    device.clock_s += FIRST_REST_S
    device.samples.work("none")
    device.samples.work("mobile")
    device.clock_s += 1e6
    device.samples.work("mobile")
    assert methods(gateway) == ["POST", "DELETE", "DELETE"]
    request = gateway.requests[-1]
    assert request.body == b""
    described = signed_request("DELETE", "/v1/samples", request.headers, b"")
    assert is_signed_by(KEY.public, described, request.headers["edgeloop-signature"])


def test_what_was_never_sent_is_not_asked_for(device, gateway):
    """Without a sample at the gateway there is nothing to delete."""
    device.see(1, network="none")
    device.samples.revoke()
    device.samples.work("wifi")
    assert gateway.raw == []


def test_an_erasure_that_is_due_survives_a_restart(device, gateway):
    """The gateway was away; the next process asks it."""
    device.see(1, network="wifi")
    device.samples.revoke()
    device.consent = Consent(device.consent.folder)
    device.start()
    device.samples.work("wifi")
    assert methods(gateway) == ["POST", "DELETE"]


def test_consent_given_again_erases_first(device, gateway):
    """Nothing new is sent before what was revoked is gone."""
    device.see(1, network="wifi")
    device.samples.revoke()
    device.consent.grant("2026-2", NOW_MS)
    gateway.reply = lambda request: Reply(503 if request.method == "DELETE" else 201)
    device.see(2, network="wifi")
    assert methods(gateway) == ["POST", "DELETE"]
    gateway.reply = lambda _request: Reply(201)
    device.clock_s += FIRST_REST_S
    device.see(3, network="wifi")
    assert methods(gateway) == ["POST", "DELETE", "DELETE", "POST", "POST"]


def test_revoked_while_it_is_on_its_way(tmp_path):
    """The rest of it stays here, it never arrives whole, and then the gateway is asked to delete."""
    with RecordingGateway(read_slowly_s=0.02) as gateway:
        device = Device(tmp_path / "privacy", gateway.url)
        picture = image(1, side=1000)  # 4 MB in base64: far more than sockets hold
        device.samples.offer(picture, context())
        worker = threading.Thread(target=device.samples.work, args=("wifi",))
        worker.start()
        until = time.monotonic() + PATIENT_S
        while not (gateway.raw and b"image_png" in gateway.raw[0]) and time.monotonic() < until:
            time.sleep(0.005)
        assert b"image_png" in gateway.raw[0]
        device.samples.revoke()
        worker.join(PATIENT_S)
        assert not worker.is_alive()
        assert gateway.requests == []
        assert len(gateway.raw[0]) < 2_000_000
        assert device.spooled == []
        device.clock_s += FIRST_REST_S
        device.samples.work("wifi")
        assert methods(gateway) == ["DELETE"]


def test_revoked_by_another_process_while_it_is_on_its_way(tmp_path):
    """The same: consent is asked for with every block."""
    with RecordingGateway(read_slowly_s=0.02) as gateway:
        device = Device(tmp_path / "privacy", gateway.url)
        device.samples.offer(image(1, side=1000), context())
        worker = threading.Thread(target=device.samples.work, args=("wifi",))
        worker.start()
        until = time.monotonic() + PATIENT_S
        while not (gateway.raw and b"image_png" in gateway.raw[0]) and time.monotonic() < until:
            time.sleep(0.005)
        assert b"image_png" in gateway.raw[0]
        Consent(device.consent.folder).revoke(NOW_MS)
        worker.join(PATIENT_S)
        assert not worker.is_alive()
        assert gateway.requests == []
        assert len(gateway.raw[0]) < 2_000_000


KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from test_samples import Device
from fleet.device.privacy import consent
real, count = Path.unlink, 0
def unlink(path, missing_ok=False):
    global count
    count += 1
    if count == 3: os.kill(os.getpid(), signal.SIGKILL)
    real(path, missing_ok=missing_ok)
device = Device(Path(sys.argv[1]))
device.see(1, 2, 3, 4, 5)
Path.unlink = unlink
device.samples.revoke()
"""


def test_killed_in_the_middle_of_a_revocation(tmp_path):
    """Consent is gone at once; the next start deletes the rest before anything else."""
    folder = tmp_path / "privacy"
    here = Path(__file__).resolve().parent
    paths = [here, here.parents[2], here.parents[3]]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(here)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert not Consent(folder).holds()
    assert len(list((folder / SAMPLES).iterdir())) == 3
    device = Device(folder, granted=False)
    assert device.spooled == []


def test_killed_while_it_writes(tmp_path):
    """A half-written file is not sent, and is gone after the next start; whole ones stay."""
    device = Device(tmp_path / "privacy")
    device.see(1)
    (device.consent.folder / SAMPLES / "half.json.partial").write_bytes(b"x" * 100)
    device.start()
    assert [name.endswith(".json") for name in device.spooled] == [True]


def test_the_thread_works_and_stops(tmp_path):
    """Every so often, whatever the disk says, until told to stop."""
    with RecordingGateway() as gateway:
        device = Device(tmp_path / "privacy", gateway.url)
        stopping, asked = threading.Event(), []

        def network():
            asked.append(1)
            if len(asked) == 1:
                raise OSError(errno.EIO, "a disk that fails once")
            return "wifi"

        thread = threading.Thread(target=device.samples.run, args=(stopping, network, 0.01))
        device.samples.offer(image(1), context())
        thread.start()
        until = time.monotonic() + PATIENT_S
        while not device.samples.counts["sent"] and time.monotonic() < until:
            time.sleep(0.01)
        stopping.set()
        thread.join(PATIENT_S)
        assert not thread.is_alive()
        assert device.samples.counts == {"disk": 1, "kept": 1, "sent": 1}


def test_consent_that_is_gone_purges_what_waits(tmp_path):
    """Whatever took the consent away: a turn without it leaves no sample on the disk."""
    device = Device(tmp_path / "privacy")
    device.see(1, 2)
    assert device.spooled
    (device.consent.folder / CONSENT).unlink()
    device.samples.work("none")
    assert device.spooled == []


def test_what_was_offered_before_a_revocation_is_not_kept_after_the_next_consent(tmp_path):
    """The user who says yes again does not say it of what was seen before."""
    device = Device(tmp_path / "privacy")
    device.samples.offer(image(1), context())
    device.samples.revoke()
    device.samples.work("none")
    device.consent.grant("2026-1", NOW_MS)
    device.samples.work("none")
    assert device.spooled == []


def test_a_sample_is_noted_as_sent_before_it_is(tmp_path):
    """Killed in the middle of a request, the device still knows that the gateway may have one."""
    with RecordingGateway() as gateway:
        device = Device(tmp_path / "privacy", gateway.url)
        noted = []

        def reply(_request):
            noted.append((device.consent.folder / SENT).exists())
            return Reply()

        gateway.reply = reply
        device.see(1, network="wifi")
    assert noted == [True]


def test_revoked_while_it_is_written(tmp_path, monkeypatch):
    """Between the look at the consent and the file: the file does not stay."""
    device = Device(tmp_path / "privacy")
    write = spool_module.write_durably

    def revoking(path, content):
        write(path, content)
        if path.suffix == ".json" and path.parent.name == SAMPLES:
            Consent(device.consent.folder).revoke(NOW_MS)

    monkeypatch.setattr(spool_module, "write_durably", revoking)
    device.see(1)
    assert device.spooled == []
    assert device.samples.counts["kept"] == 0


def test_a_clock_put_back_and_forward_opens_no_new_budget(tmp_path):
    """The day that is used up stays so, whatever day it was said to be in between."""
    device = Device(tmp_path / "privacy", per_day=2)
    device.see(1, 2, 3)
    assert device.samples.counts["kept"] == 2
    device.wall_ms -= DAY_MS
    device.see(4)
    device.wall_ms += DAY_MS
    device.see(5)
    assert device.samples.counts["kept"] == 2
    device.wall_ms += DAY_MS
    device.see(6)
    assert device.samples.counts["kept"] == 3
