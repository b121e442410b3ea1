"""Raw inputs: only with consent and over a private way, laid out by device and day, and deleted for good."""

import base64
import dataclasses
import datetime as dt
import hashlib
import http.client
import ipaddress
import json
import ssl
import time
import zlib

import cv2
import gateway_kit as kit
import httpx
import numpy as np
import onnx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from onnx import TensorProto, helper

from fleet.device.preprocess import Preprocess
from fleet.gateway import database, serve
from fleet.gateway.app import create_app
from fleet.gateway.state import Settings

RED = (255, 0, 0)


def png(color=RED, side=16):
    """A plain image, RGB."""
    image = np.full((side, side, 3), color[::-1], np.uint8)
    return cv2.imencode(".png", image)[1].tobytes()


def sample(image=None, **changed):
    window = kit.window(1)
    record = {
        "schema": 1,
        "consent": True,
        "taken_ms": kit.now_ms(),
        "image_png": base64.b64encode(png() if image is None else image).decode(),
        "versions": dataclasses.asdict(window.versions),
        "environment": dataclasses.asdict(window.environment),
        "predicted": 3,
        "confidence": 0.1,
        "reason": "low confidence",
    }
    return json.dumps(record | changed).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose logits are the mean red, green and blue, with its card."""
    from tasks.mnn.converter import convert

    folder = tmp_path_factory.mktemp("model")
    graph = helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["y"])],
        "colours",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        str(folder / "model.onnx"),
    )
    convert(folder / "model.onnx", folder / "model.mnn")
    preprocess = Preprocess(size_px=8, mean=(0.0, 0.0, 0.0), std=(0.1, 0.1, 0.1))
    card = {"variant": "colours-fp32", "labels": ["red", "green", "blue"], "preprocess": preprocess.to_dict()}
    (folder / "card.json").write_text(json.dumps(card))
    return folder / "model.mnn"


@pytest.fixture(scope="module")
def running(tmp_path_factory, model):
    with kit.gateway(tmp_path_factory.mktemp("samples") / "state", classifier=model) as started:
        yield started


@pytest.fixture
def device(running):
    return running.client()


def _files(running, device):
    folder = running.folder / "samples" / device.key.device
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def test_a_sample_lies_by_device_and_day(running, device):
    """Image and context, named by the image's hash; sent again it is there once."""
    answers = [device.signed("POST", "/v1/samples", sample()) for _ in range(2)]
    name = hashlib.sha256(png()).hexdigest()
    assert [(a.status, a.json()["sha256"]) for a in answers] == [(201, name)] * 2
    day = dt.datetime.now(dt.UTC).strftime("%Y/%m/%d")
    assert _files(running, device) == [f"{day}/{name}.json", f"{day}/{name}.png"]
    folder = running.folder / "samples" / device.key.device / day
    assert (folder / f"{name}.png").read_bytes() == png()
    context = json.loads((folder / f"{name}.json").read_text())
    assert context["predicted"] == 3
    assert "image_png" not in context


def test_revoking_consent_removes_everything(running, device):
    """All of the device's samples and none of another's; it may be repeated, and that it happened is kept."""
    other = running.client()
    other.signed("POST", "/v1/samples", sample())
    for side in (8, 9):
        assert device.signed("POST", "/v1/samples", sample(png(side=side))).status == 201
    answers = [device.signed("DELETE", "/v1/samples") for _ in range(2)]
    assert [(a.status, a.json()["samples"]) for a in answers] == [(200, 2), (200, 0)]
    assert _files(running, device) == []
    assert len(_files(running, other)) == 2
    connection = database.reader(running.folder)
    rows = connection.execute(
        "SELECT samples FROM deletions JOIN devices ON number = deletions.device WHERE devices.device = ?"
        " ORDER BY deletions.rowid",
        (device.key.device,),
    ).fetchall()
    connection.close()
    assert rows == [(2,), (0,)]
    assert device.signed("POST", "/v1/samples", sample()).status == 201


def test_a_deletion_cannot_be_replayed(device):
    """Recorded and sent again, a deletion is refused: samples sent since then stay."""
    headers = device.key.headers("DELETE", "/v1/samples", b"", time_ms=kit.now_ms())
    assert device.send("DELETE", "/v1/samples", b"", headers).status == 200
    assert device.signed("POST", "/v1/samples", sample()).status == 201
    time.sleep(2.5)  # nonces are tidied once a second
    assert device.send("DELETE", "/v1/samples", b"", headers).code == "replay"
    assert device.signed("DELETE", "/v1/samples").json()["samples"] == 1


BOMB = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (100_000).to_bytes(4) * 2 + b"\x08\x02\0\0\0" + b"\0" * 40


@pytest.mark.parametrize("path", ["/v1/samples", "/v1/classify"])
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (sample(consent=False), 403, "consent"),
        (sample(consent=1), 400, "sample"),
        (sample(schema=2), 400, "sample"),
        (sample(reason="x" * 500), 400, "sample"),
        (sample(image_png="%%%"), 400, "sample"),
        (sample(b"GIF89a"), 415, "image"),
        (sample(b""), 415, "image"),
        (sample(BOMB), 415, "image"),
        (b"{}", 400, "sample"),
        (b"\xff", 400, "sample"),
    ],
)
def test_what_is_no_sample_with_consent_is_not_taken(  # noqa: PLR0917  # a table
    running, device, path, body, status, code
):
    """Refused by both endpoints, and nothing of it is kept."""
    answer = device.signed("POST", path, body)
    assert (answer.status, answer.code) == (status, code)
    assert _files(running, device) == []


def test_raw_inputs_do_not_cross_a_network_in_the_clear(tmp_path):
    """From another machine plain HTTP is refused before anything is looked at, whatever a header claims."""

    async def ask():
        app = create_app(Settings(folder=tmp_path, compact_every_s=0))
        got = []
        async with app.router.lifespan_context(app):
            for scheme in ("http", "https"):
                transport = httpx.ASGITransport(app, client=("203.0.113.5", 4))
                headers = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "127.0.0.1"}
                async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://gateway") as client:
                    for path in ("/v1/samples", "/v1/classify"):
                        answer = await client.post(path, content=b"", headers=headers)
                        got.append((answer.status_code, answer.json()["error"]["code"]))
                    got.append(((await client.get("/")).status_code, "page"))
        return got

    assert kit.run(ask()) == [
        (403, "transport"),
        (403, "transport"),
        (403, "page"),
        (401, "signature"),
        (401, "signature"),
        (403, "page"),
    ]


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_what_comes_through_a_proxy_is_not_local(device, header):
    """A proxy on the gateway's machine does not make a stranger's request one of the operator's."""
    for method, path in (("GET", "/"), ("GET", "/metrics"), ("POST", "/v1/samples")):
        answer = device.send(method, path, headers={header: "127.0.0.1"})
        assert (answer.status, answer.code) in {(403, "operator"), (403, "transport")}


def _certificate(folder):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return folder / "cert.pem", folder / "key.pem"


def test_the_gateway_speaks_tls(tmp_path):
    """With a certificate it serves HTTPS, and answers nobody in the clear."""
    cert, key = _certificate(tmp_path)
    with kit.gateway(tmp_path / "state", certfile=cert, keyfile=key) as running:
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", running.port, context=context, timeout=30)
        device = kit.Client(running.port)
        (token,) = serve.token(running.folder)
        connection.request("POST", "/v1/enrol", device.enrolment(token))
        response = connection.getresponse()
        assert response.status == 201
        response.read()
        body = sample()
        headers = device.key.headers("POST", "/v1/samples", body, time_ms=kit.now_ms())
        connection.request("POST", "/v1/samples", body, headers)
        assert connection.getresponse().status == 201
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            kit.Client(running.port, timeout_s=20).send("GET", "/healthz")


@pytest.mark.parametrize(("color", "label"), [(RED, "red"), ((0, 255, 0), "green"), ((9, 0, 200), "blue")])
def test_the_cloud_answers_a_hard_sample(running, device, color, label):
    """The model's class with its softmax share, by the same preprocessing as everywhere; nothing is kept."""
    answer = device.signed("POST", "/v1/classify", sample(png(color)))
    assert answer.status == 200, answer.body
    found = answer.json()
    assert (found["label"], found["model"]) == (label, "colours-fp32")
    logits = np.array(color) / 25.5
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert found["index"] == int(shares.argmax())
    assert found["confidence"] == pytest.approx(shares.max(), rel=1e-4)
    assert _files(running, device) == []


def test_an_image_that_does_not_decode_is_refused(device):
    """A PNG by its header only: 422, and the model goes on."""
    broken = png()[:40] + b"\0" * 30
    answer = device.signed("POST", "/v1/classify", sample(broken))
    assert (answer.status, answer.code) == (422, "image")
    assert device.signed("POST", "/v1/classify", sample()).status == 200


def test_a_gateway_without_a_model_says_so(tmp_path):
    """501; the rate of questions and the amount of samples are bounded."""
    limits = dataclasses.replace(kit.FAST, classify_per_s=0.01, classify_burst=2, samples_bytes=100)
    with kit.gateway(tmp_path / "state", limits=limits) as running:
        device = running.client()
        answers = [device.signed("POST", "/v1/classify", sample()) for _ in range(3)]
        assert [(a.status, a.code) for a in answers] == [(501, "no_classifier")] * 2 + [(429, "rate")]
        noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
        large = cv2.imencode(".png", noise)[1].tobytes()
        assert len(zlib.compress(large)) > 100
        assert device.signed("POST", "/v1/samples", sample(large)).status == 201
        assert device.signed("POST", "/v1/samples", sample()).code == "samples"
