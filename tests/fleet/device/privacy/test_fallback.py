"""The cloud's answer to a hard input: in time and with consent, or not at all."""

import json
import threading
import time

import pytest
from made import NOW_MS, context, image
from recording_gateway import RecordingGateway, Reply

from fleet.device.credentials import DeviceKey, is_signed_by, signed_request
from fleet.device.errors import UserError
from fleet.device.privacy.consent import Consent
from fleet.device.privacy.fallback import FIRST_REST_S, CloudFallback

KEY = DeviceKey(b"k" * 32)
LABELS = ("cat", "dog", "fox", "owl")
FOUND = {"index": 1, "label": "dog", "confidence": 0.9, "model": "large", "server_ms": NOW_MS}
PATIENT_S = 30.0


@pytest.fixture
def consent(tmp_path):
    consent = Consent(tmp_path / "privacy")
    consent.grant("2026-1", NOW_MS)
    return consent


@pytest.fixture
def gateway():
    with RecordingGateway() as running:
        running.reply = lambda _request: Reply(200, FOUND)
        yield running


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def cloud(consent, gateway):
    made = fallback(gateway.url, consent)
    yield made
    made.close(PATIENT_S)


def fallback(url, consent, **options):
    options = {"deadline_s": PATIENT_S, **options}
    made = CloudFallback(
        url, KEY, consent, labels=LABELS, confidence_minimum=0.5, wall=lambda: NOW_MS / 1000, **options
    )
    made.enabled = True
    return made


def test_it_is_off_until_a_policy_says_otherwise(gateway, consent):
    """Nothing leaves for the cloud because somebody forgot to look at the policy."""
    cloud = CloudFallback(gateway.url, KEY, consent, labels=LABELS, confidence_minimum=0.5)
    assert cloud.ask(image(1), context()) is None
    cloud.close()
    assert gateway.raw == []


def test_a_hard_input_is_answered(cloud, gateway):
    """Signed, with the same body as a sample; the answer is the gateway's."""
    pending = cloud.ask(image(1), context())
    assert pending.wait() == pending.answer()
    found = pending.answer()
    assert (found.index, found.label, found.confidence, found.model) == (1, "dog", 0.9, "large")
    (request,) = gateway.requests
    assert (request.method, request.path) == ("POST", "/v1/classify")
    assert json.loads(request.body)["consent"] is True
    described = signed_request("POST", request.path, request.headers, request.body)
    assert is_signed_by(KEY.public, described, request.headers["edgeloop-signature"])


@pytest.mark.parametrize(("enabled", "confidence"), [(True, 0.5), (True, None), (False, 0.1)])
def test_the_devices_answer_stands_at_once(cloud, gateway, enabled, confidence):
    """It is sure, or the policy says no: nothing is asked."""
    cloud.enabled = enabled
    assert cloud.ask(image(1), context(confidence)) is None
    assert gateway.raw == []


def test_without_consent_nothing_leaves(tmp_path, gateway):
    """The question is dropped before the network is touched."""
    cloud = fallback(gateway.url, Consent(tmp_path / "never asked"))
    assert cloud.ask(image(1), context()).wait() is None
    cloud.close()
    assert gateway.raw == []


def test_revoked_before_the_answer(cloud, gateway, consent):
    """An answer to what is no longer allowed is none."""
    arrived, go_on = threading.Event(), threading.Event()

    def reply(_request):
        arrived.set()
        go_on.wait(PATIENT_S)
        return Reply(200, FOUND)

    gateway.reply = reply
    pending = cloud.ask(image(1), context())
    assert arrived.wait(PATIENT_S)
    consent.revoke(NOW_MS)
    go_on.set()
    assert pending.wait() is None


def test_revoked_while_it_is_on_its_way(consent):
    """The rest of the picture stays here."""
    with RecordingGateway(read_slowly_s=0.02) as gateway:
        cloud = fallback(gateway.url, consent)
        pending = cloud.ask(image(1, side=1000), context())
        until = time.monotonic() + PATIENT_S
        while not (gateway.raw and b"image_png" in gateway.raw[0]) and time.monotonic() < until:
            time.sleep(0.005)
        consent.revoke(NOW_MS)
        cloud.revoked()
        assert pending.wait() is None
        assert gateway.requests == []
        cloud.close()


@pytest.mark.parametrize(
    "reply",
    [
        Reply(delay_s=2.0, record=FOUND),
        Reply(drip_s=0.05, record=FOUND),
        Reply(hang_up=True),
        *(Reply(status) for status in (503, 501, 302, 204)),
    ],
    ids=lambda reply: f"{reply.status}-{reply.delay_s}-{reply.drip_s}-{reply.hang_up}",
)
def test_no_answer_in_time(consent, gateway, reply):
    """A gateway that is slow, drips, hangs up or refuses: the device's answer stands, by the deadline."""
    gateway.reply = lambda _request: reply
    cloud = fallback(gateway.url, consent, deadline_s=0.5)
    pending = cloud.ask(image(1), context())
    assert pending.wait() is None
    until = time.monotonic() + PATIENT_S
    while not cloud.counts and time.monotonic() < until:
        time.sleep(0.01)
    assert pending.answer() is None
    assert sum(cloud.counts.values()) == 1
    cloud.close()


def test_an_answer_after_the_deadline_is_none(consent, gateway):
    """However good it is: by then the device has spoken."""
    clock = Clock()

    def reply(_request):
        clock.now_s += 2.0
        return Reply(200, FOUND)

    gateway.reply = reply
    cloud = fallback(gateway.url, consent, deadline_s=1.0, clock=clock)
    pending = cloud.ask(image(1), context())
    pending._done.wait(PATIENT_S)
    assert pending.answer() is None
    cloud.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": 4},
        {"index": -1},
        {"index": True},
        {"index": "1"},
        {"label": "cat"},
        {"label": None},
        {"confidence": 1.1},
        {"confidence": "x"},
        {"confidence": None},
        {"model": 5},
        {"server_ms": "x"},
    ],
)
def test_an_answer_of_other_classes_is_none(cloud, gateway, wrong):
    """The gateway's model may know other labels than this release."""
    gateway.reply = lambda _request: Reply(200, FOUND | wrong)
    assert cloud.ask(image(1), context()).wait() is None
    assert cloud.counts == {"no such class": 1}


def test_asking_never_waits(consent, gateway):
    """While one question hangs, two wait and the others are not asked; closing gives all of them up."""
    arrived, go_on = threading.Event(), threading.Event()

    def reply(_request):
        arrived.set()
        go_on.wait(PATIENT_S)
        return Reply(200, FOUND)

    gateway.reply = reply
    cloud = fallback(gateway.url, consent)
    first = cloud.ask(image(1), context())
    assert arrived.wait(PATIENT_S)
    others = [cloud.ask(image(2), context()) for _ in range(5)]
    assert [pending is None for pending in others] == [False, False, True, True, True]
    cloud.close()
    go_on.set()
    assert [pending.answer() for pending in (first, *others[:2])] == [None] * 3
    assert len(gateway.requests) == 1


def test_a_network_that_fails_is_left_alone(consent):
    """After three failures in a row nothing is asked for a while; then again."""
    clock = Clock()
    cloud = fallback("http://127.0.0.1:9", consent, clock=clock)
    for _ in range(3):
        assert cloud.ask(image(1), context()).wait() is None
    assert cloud.ask(image(1), context()) is None
    clock.now_s += FIRST_REST_S
    assert cloud.ask(image(1), context()).wait() is None
    assert cloud.ask(image(1), context()) is None
    assert cloud.counts == {"no answer": 4}
    cloud.close()


def test_pictures_do_not_travel_in_the_clear(consent):
    """Only over TLS, or to this machine."""
    with pytest.raises(UserError, match="https"):
        fallback("http://example.org", consent)
