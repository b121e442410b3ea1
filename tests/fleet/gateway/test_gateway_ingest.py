"""Devices against a real gateway: enrolment, signatures, repeats, clocks, revocation."""

import base64
import gzip
import json
import random
import secrets
import sqlite3
import stat
import subprocess
import sys
import threading
from dataclasses import replace

import gateway_kit as kit
import pytest

from fleet.device.credentials import MOST_SKEW_MS, DeviceKey, SignedRequest
from fleet.device.errors import UserError
from fleet.gateway import batch, database, serve
from fleet.gateway.limits import Limits


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with kit.gateway(tmp_path_factory.mktemp("gateway") / "state", compact_every_s=0) as started:
        yield started


@pytest.fixture
def device(running):
    return running.client()


def test_a_window_is_stored_with_its_bytes(running, device):
    """The body lies in the store as it came, and the receipt counts its windows."""
    content = kit.batch_of([kit.window(k) for k in range(3)])
    answer = device.upload(content)
    assert answer.status == 200
    receipt = answer.json()
    assert {k: receipt[k] for k in ("accepted", "duplicates", "quarantined")} == {
        "accepted": 3,
        "duplicates": 0,
        "quarantined": [],
    }
    assert abs(receipt["server_ms"] - kit.now_ms()) < 60_000
    assert kit.stored(running.folder, device.key.device) == [0, 1, 2]


def test_repeats_and_disorder_change_nothing(running, device):
    """The same windows in any order, in other batches, twice in one batch and at once: each is there once."""
    numbers = [*range(60), *random.Random(3).sample(range(60), 40)]
    random.Random(4).shuffle(numbers)
    batches = [kit.batch_of([kit.window(n) for n in numbers[at : at + 10]]) for at in range(0, 100, 10)]
    answers = []
    threads = [
        threading.Thread(target=lambda content=content: answers.append(device.upload(content).json()))
        for content in batches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(answer["accepted"] for answer in answers) == 60
    assert sum(answer["duplicates"] for answer in answers) == 40
    assert kit.stored(running.folder, device.key.device) == list(range(60))


def test_two_devices_have_numbers_of_their_own(running, device):
    """The same sequence of another device is another window."""
    other, content = running.client(), kit.batch_of([kit.window(1)])
    assert [d.upload(content).json()["accepted"] for d in (device, other, device)] == [1, 1, 0]


def test_a_replayed_request_is_refused(running, device):
    """The very same bytes a second time are refused, whatever they were; the first stays stored."""
    body = gzip.compress(kit.batch_of([kit.window(1)]))
    headers = device.key.headers("POST", "/v1/windows", body, time_ms=kit.now_ms())
    first, again = (
        device.send("POST", "/v1/windows", body, headers | {"Content-Encoding": "gzip"}) for _ in range(2)
    )
    assert (first.status, again.status, again.code) == (200, 409, "replay")
    assert kit.stored(running.folder, device.key.device) == [1]


def test_a_request_that_was_tampered_with_is_refused(device):
    """Body, path, query, time and nonce are under the signature; so is whose it is."""
    body = kit.batch_of([kit.window(1)])
    good = device.key.headers("POST", "/v1/windows", body, time_ms=kit.now_ms())
    changed = {
        "body": ("/v1/windows", body + b" ", good),
        "path": ("/v1/samples", body, good),
        "query": ("/v1/windows?x=1", body, good),
        "time": ("/v1/windows", body, good | {"Edgeloop-Time": str(kit.now_ms() + 5)}),
        "nonce": ("/v1/windows", body, good | {"Edgeloop-Nonce": secrets.token_hex(16)}),
        "signature": (
            "/v1/windows",
            body,
            good | {"Edgeloop-Signature": base64.b64encode(bytes(64)).decode()},
        ),
        "no base64": ("/v1/windows", body, good | {"Edgeloop-Signature": "%%%"}),
        "missing": ("/v1/windows", body, {"Edgeloop-Device": device.key.device}),
        "none": ("/v1/windows", body, {}),
    }
    for what, (path, content, headers) in changed.items():
        answer = device.send("POST", path, content, headers)
        assert (answer.status, answer.code) == (401, "signature"), what


def test_an_unknown_device_is_refused(running):
    """A key that was never enrolled proves nothing."""
    answer = kit.Client(running.port).upload(kit.batch_of([kit.window(1)]))
    assert (answer.status, answer.code) == (401, "device")


@pytest.mark.parametrize("off_ms", [-MOST_SKEW_MS - 60_000, MOST_SKEW_MS + 60_000, -1_700_000_000_000])
def test_a_wrong_clock_learns_the_time(device, off_ms):
    """The refusal carries the gateway's time; with it the same request is taken."""
    content = kit.batch_of([kit.window(1)])
    wrong = kit.now_ms() + off_ms
    answer = device.signed("POST", "/v1/windows", content, time_ms=wrong)
    assert (answer.status, answer.code) == (401, "clock")
    right = answer.json()["error"]["server_ms"]
    assert device.signed("POST", "/v1/windows", content, time_ms=right).status == 200


def test_a_stolen_key_is_of_no_use_once_revoked(running, device):
    """Revoking counts from the next request on, also for one that was signed before; others go on."""
    other = running.client()
    assert device.upload(kit.batch_of([kit.window(1)])).status == 200
    serve.revoke(running.folder, device.key.device)
    serve.revoke(running.folder, device.key.device)
    answer = device.upload(kit.batch_of([kit.window(2)]))
    assert (answer.status, answer.code) == (401, "revoked")
    (token,) = serve.token(running.folder)
    assert device.enrol(token).code == "revoked"
    assert other.upload(kit.batch_of([kit.window(1)])).status == 200
    assert kit.stored(running.folder, device.key.device) == [1]
    assert [d.revoked_ms is None for d in serve.devices(running.folder) if d.device == device.key.device] == [
        False
    ]


def test_a_token_works_once(running):
    """A second device cannot use it; the first may repeat itself, because its answer can get lost."""
    (token,) = serve.token(running.folder)
    first, second = kit.Client(running.port), kit.Client(running.port)
    answers = [first.enrol(token), second.enrol(token), first.enrol(token)]
    assert [answer.status for answer in answers] == [201, 401, 201]
    assert answers[0].json()["device"] == answers[2].json()["device"] == first.key.device
    assert answers[1].code == "token"


def test_a_token_runs_out(running):
    """After its hours it enrols nobody."""
    connection = database.opened(running.folder)
    (token,) = serve.token(running.folder, hours=1)
    connection.execute("UPDATE tokens SET expires_ms = 1 WHERE device IS NULL")
    connection.close()
    assert kit.Client(running.port).enrol(token).code == "token"


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"public_key": "AAAA"}, 400, "public_key"),
        ({"public_key": "*" * 44}, 400, "public_key"),
        ({"token": "no such token"}, 401, "token"),
        ({"token": "\ud800"}, 400, "enrolment"),
        ({"token": 7}, 400, "enrolment"),
    ],
)
def test_an_enrolment_that_is_none_is_refused(running, change, status, code):
    """Each fault has its code, and the token it came with still works."""
    client = kit.Client(running.port)
    (token,) = serve.token(running.folder)
    body = json.dumps(json.loads(client.enrolment(token)) | change).encode()
    answer = client.send("POST", "/v1/enrol", body)
    assert (answer.status, answer.code) == (status, code)
    assert client.enrol(token).status == 201


def test_secrets_are_neither_stored_nor_repeated(running):
    """Tokens lie in the store as hashes, private keys not at all; an error does not repeat a token."""
    (token,) = serve.token(running.folder)
    client = kit.Client(running.port)
    refused = client.send("POST", "/v1/enrol", client.enrolment(token + "x"))
    assert token.encode() not in refused.body
    client.enrol(token)
    on_disk = b"".join(file.read_bytes() for file in running.folder.rglob("*") if file.is_file())
    assert token.encode() not in on_disk
    assert client.key.public in on_disk
    assert all(
        stat.S_IMODE(f.stat().st_mode) & 0o077 == 0 for f in [running.folder, running.folder / database.FILE]
    )


def test_what_is_invalid_is_kept_with_its_reason(running, device):
    """The sound windows of a batch are stored, the others quarantined once, however often they come."""
    bad = replace(kit.window(1), boot="nonsense")
    content = kit.batch_of([kit.window(0), bad, kit.window(2)])
    answers = [device.upload(content).json() for _ in range(2)]
    assert [answer["accepted"] for answer in answers] == [2, 0]
    assert [answer["duplicates"] for answer in answers] == [0, 2]
    assert all(
        answer["quarantined"] == [{"index": 1, "reason": "boot is not 16 hex digits"}] for answer in answers
    )
    newer = kit.batch_of([kit.window(5)], schema=99)
    assert device.upload(newer).json()["quarantined"][0]["index"] == batch.WHOLE
    connection = database.reader(running.folder)
    rows = connection.execute(
        "SELECT reason, raw FROM quarantine JOIN devices ON number = quarantine.device"
        " WHERE devices.device = ? ORDER BY reason",
        (device.key.device,),
    ).fetchall()
    connection.close()
    import zlib

    assert [row[0] for row in rows] == [
        "boot is not 16 hex digits",
        "schema 99 is unknown to this gateway, it knows 1",
    ]
    assert zlib.decompress(rows[1][1]) == newer
    assert json.loads(zlib.decompress(rows[0][1]))["boot"] == "nonsense"


def test_rates_are_held(tmp_path):
    """A device and an address get what their buckets hold; the answer says when to come again."""
    limits = Limits(requests_per_s=0.01, requests_burst=2, enrolments_per_s=0.01, enrolments_burst=2)
    with kit.gateway(tmp_path / "state", limits=limits) as running:
        device, other = running.client(), running.client()
        answers = [device.upload(kit.batch_of([kit.window(k)])) for k in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[2].code == "rate"
        assert 0 < int(answers[2].headers["retry-after"]) <= 100
        assert other.upload(kit.batch_of([kit.window(1)])).status == 200
        (token,) = serve.token(running.folder)
        assert kit.Client(running.port).enrol(token).status == 429


def test_the_gateway_is_observed(running, device):
    """Health, and counts in Prometheus' format; nothing of a device is in them."""
    device.upload(kit.batch_of([kit.window(1)]))
    assert device.send("GET", "/healthz").json() == {"ok": True}
    text = device.send("GET", "/metrics").body.decode()
    values = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }
    assert values['edgeloop_gateway_windows_total{outcome="accepted"}'] >= 1
    assert values["edgeloop_gateway_acknowledge_seconds_count"] >= 1
    assert device.key.device not in text


def test_operator_pages_are_for_this_machine(running):
    """A page elsewhere that made a name lead here gets nothing."""
    client = kit.Client(running.port)
    for path in ("/", "/metrics"):
        answer = client.send("GET", path, headers={"Host": "evil.example"})
        assert (answer.status, answer.code) == (403, "operator")


def test_serving_others_needs_tls(tmp_path):
    """Without a certificate only this machine is served; a state that others can read is refused."""
    with pytest.raises(UserError, match="without TLS"):
        serve.serve(tmp_path / "state", host="0.0.0.0")  # the address is refused, not listened on
    with pytest.raises(UserError, match="without its key"):
        serve.serve(tmp_path / "state", certfile=tmp_path / "cert.pem")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UserError, match="mode 755"):
        serve.serve(tmp_path / "open")
    with pytest.raises(UserError, match="TUF repository"):
        serve.serve(tmp_path / "state", repository=tmp_path / "none")


def test_a_state_of_another_version_is_left_alone(tmp_path):
    """A newer gateway's state is refused, not changed."""
    database.opened(tmp_path).execute("PRAGMA user_version=99")
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        database.opened(tmp_path)


def test_starting_it_imports_no_engine():
    """The gateway needs neither MNN nor OpenCV until a cloud model is asked."""
    code = "import sys, fleet.gateway.serve; print({'MNN', 'cv2', 'torch', 'prefect'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=kit.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_a_key_made_elsewhere_signs_the_same(device):
    """Nothing but the 32 bytes of the key is needed to speak for a device."""
    twin = kit.Client(device.port, DeviceKey(device.key._private.private_bytes_raw()))
    assert twin.upload(kit.batch_of([kit.window(77)])).status == 200


def test_a_signature_is_for_its_method_only(device):
    """Headers of a POST make no DELETE, which would erase what the device sent."""
    headers = device.key.headers("POST", "/v1/samples", b"", time_ms=kit.now_ms())
    answer = device.send("DELETE", "/v1/samples", b"", headers)
    assert (answer.status, answer.code) == (401, "signature")


def test_what_is_signed_stays_what_it_is():
    """Devices in the field sign these bytes: another form would lock all of them out."""
    request = SignedRequest(
        method="POST", path="/v1/windows", device="d" * 32, time_ms=1, nonce="0" * 32, body=b""
    )
    body = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    expected = f"edgeloop-request-1\nPOST\n/v1/windows\n{'d' * 32}\n1\n{'0' * 32}\n{body}"
    assert request.message() == expected.encode()
