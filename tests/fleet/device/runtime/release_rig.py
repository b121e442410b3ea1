"""A small repository with real models, served over HTTP by a server that can misbehave, and devices."""

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fleet.device.engine import ENGINE_VERSION, Session
from fleet.device.preprocess import Preprocess
from fleet.device.release import (
    AnomalyLimits,
    FileOf,
    FramePolicy,
    Policy,
    Release,
    Rollout,
    TierPlan,
)
from fleet.device.runtime import DeviceInfo, Patience, Runtime
from fleet.device.runtime.golden import Golden
from tasks.mnn.converter import convert
from tasks.release_repository import ReleaseRepository, file_of

SIDE = 16
LABELS = ("ant", "bee", "cat", "dog", "elk")
PREPROCESS = Preprocess(size_px=SIDE)
CONFIG = {"backend": "CPU", "threads": 1, "precision": "normal", "memory": "normal"}
IMAGES = np.random.default_rng(7).integers(0, 256, (4, SIDE, SIDE, 3), np.uint8)
QUICK = Patience(silence_s=2, metadata_s=5)
PHONE = DeviceInfo(
    id="phone-1", model="Pixel 8", cores=8, big_cores=4, memory_mb=8000,
)  # fmt: skip


def make_model(folder: Path, seed: int, *, trap: bool = False) -> Path:
    """A linear classifier of 16 px images; with `trap` one that takes a root of the brightness."""
    classes = len(LABELS)
    weights = {"w": np.random.default_rng(seed).standard_normal((classes, 3, SIDE, SIDE)) / 20}
    nodes = [helper.make_node("Conv", ["input", "w"], ["y"])]
    if trap:
        weights |= {"ones": np.ones((1, 3, SIDE, SIDE)) / (3 * SIDE**2), "one": np.ones((1, 1, 1, 1))}
        nodes += [
            helper.make_node("Conv", ["input", "ones"], ["mean"]),
            helper.make_node("Add", ["mean", "one"], ["bright"]),
            helper.make_node("Sqrt", ["bright"], ["root"]),
            helper.make_node("Add", ["y", "root"], ["z"]),
        ]
    nodes.append(helper.make_node("Flatten", ["z" if trap else "y"], ["logits"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, classes])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    source, target = folder / f"{seed}.onnx", folder / f"{seed}.mnn"
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), source)
    convert(source, target)
    return target


def logits_of(model: Path, images: np.ndarray = IMAGES) -> np.ndarray:
    """What the engine answers, asked without the runtime."""
    with Session(model) as session:
        return np.concatenate([session.run({"input": PREPROCESS.apply(i)})["logits"] for i in images])


def write_golden(model: Path, target: Path, labels: tuple[str, ...] = LABELS) -> Path:
    """Golden inputs of a model."""
    target.write_bytes(Golden(images=IMAGES, logits=logits_of(model), labels=labels).to_bytes())
    return target


def plan(variant: str, model: Path, golden: Path) -> TierPlan:
    """What a tier runs."""
    return TierPlan(
        action="run",
        variant=variant,
        model=file_of(model),
        preprocess=PREPROCESS.to_dict(),
        preprocess_sha256=PREPROCESS.digest(),
        config=dict(CONFIG),
        golden=file_of(golden),
        golden_tolerance=1e-3,
        measured=True,
    )


def release(counter: int, tier_plan: TierPlan, **changes: object) -> Release:
    """A release that runs the same on every tier."""
    made = Release(
        schema=1,
        counter=counter,
        model_version=f"m{counter}",
        engine_version=ENGINE_VERSION,
        engine_minimum="3.0.0",
        config_version="c1",
        monitor_version="none",
        labels=LABELS,
        confidence_minimum=0.3,
        tiers=dict.fromkeys(("high", "mid", "low"), tier_plan),
        git_commit="0" * 40,
        dvc_lock_sha256="0" * 64,
        mlflow={},
        changes=(f"release {counter}",),
    )
    return replace(made, **changes)


def policy(version: int, rollout: Rollout | None = None, **changes: object) -> Policy:
    """A policy that leaves everything as it is."""
    made = Policy(
        schema=1,
        version=version,
        tier_of={},
        deny=(),
        upload=(),
        anomalies=AnomalyLimits(),
        frames=FramePolicy(),
        rollout=rollout or Rollout(counter=1_000_000, salt="s", buckets=10_000),
    )
    return replace(made, **changes)


@dataclass
class Server:
    """Serves a folder on loopback, with byte ranges; `tamper` may change what it says."""

    folder: Path
    tamper: Callable[[str, bytes], bytes | None] | None = None
    """Path and content to what is served instead; None: status 404."""
    cut_after: int | None = None
    """Close the connection after so many bytes of a body."""
    redirect_to: str = ""
    stall_s: float = 0.0
    """Between the bytes of a body."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Path and Range of each request."""
    url: str = ""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server that runs while it is used."""
    server = Server(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, server)

        def log_message(self, *_: object) -> None:
            pass

    class Httpd(http.server.ThreadingHTTPServer):
        daemon_threads = True

    httpd = Httpd(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{httpd.server_port}/"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()


def _answer(request: http.server.BaseHTTPRequestHandler, server: Server) -> None:
    wanted = request.headers.get("Range", "")
    server.requests.append((request.path, wanted))
    if server.redirect_to:
        request.send_response(302)
        request.send_header("Location", server.redirect_to + request.path)
        request.end_headers()
        return
    path = server.folder / request.path.lstrip("/")
    content = path.read_bytes() if path.is_file() else None
    if server.tamper and content is not None:
        content = server.tamper(request.path, content)
    if content is None:
        request.send_error(404)
        return
    start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
    request.send_response(206 if start else 200)
    if start:
        request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    request.send_header("Content-Length", str(len(content) - start))
    request.end_headers()
    body = content[start : None if server.cut_after is None else start + server.cut_after]
    if server.stall_s:
        for index in range(len(body)):
            request.wfile.write(body[index : index + 1])
            time.sleep(server.stall_s)
    else:
        request.wfile.write(body)
    request.close_connection = True


class Rig:
    """A repository, its server, and what its releases are made of."""

    def __init__(self, folder: Path, models: list[Path], goldens: list[Path], server: Server) -> None:
        self.folder, self.models, self.goldens, self.server = folder, models, goldens, server
        self.repository = ReleaseRepository(folder / "repository", folder / "keys")
        self.home = folder / "device"

    def publish(self, counter: int, model: int = 0, **changes: object) -> Release:
        """Release `counter`, which runs one of the models."""
        made = release(counter, self.plan(model), **changes)
        self.repository.publish_release(made, [*self.models, *self.goldens])
        return made

    def plan(self, model: int = 0, **changes: object) -> TierPlan:
        """What runs one of the models."""
        return replace(plan(f"v{model}", self.models[model], self.goldens[model]), **changes)

    def runtime(self, device: DeviceInfo = PHONE, **others: object) -> Runtime:
        """The device's runtime; 3 inferences prove a release."""
        return Runtime(self.home, device, **{"root": self.repository.root, "trial_inferences": 3, **others})

    def expected(self, model: int, image: np.ndarray = IMAGES[0]) -> np.ndarray:
        return logits_of(self.models[model], image[None])[0]

    def stored(self, file: FileOf | None) -> Path:
        assert file is not None
        return self.home / "files" / file.sha256


def update(runtime: Runtime, rig: Rig):
    """An update that does not wait long."""
    return runtime.update(rig.server.url, patience=QUICK)


def prove(runtime: Runtime, times: int = 3) -> None:
    """Let a release on trial become good."""
    for _ in range(times):
        runtime.predict(IMAGES[0])
