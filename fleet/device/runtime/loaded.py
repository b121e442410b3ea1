"""A release's model in memory: proven before it answers, sessions reused, closed after its last request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fleet.device.engine import RuntimeConfig, Session
from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from fleet.device.probabilities import softmax
from fleet.device.release import FileOf, Release, TierPlan, engine_key
from fleet.device.runtime.golden import Golden
from fleet.device.runtime.records import config_name, preprocess_of, runtime_config
from fleet.device.runtime.refusal import AbnormalOutputError, UpdateRefusedError
from fleet.device.runtime.slots import Entry
from fleet.device.runtime.store import Store

MOST_SESSIONS = 4
"""Of one model: requests beyond wait. Each costs the memory of a model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a model says of an image, and who said it."""

    label: str
    index: int
    """Of the label."""
    confidence: float
    """Largest softmax probability."""
    logits: npt.NDArray[np.float32]
    """[classes], as the engine gave them."""
    release: int
    """Counter."""
    variant: str
    backend: str
    """The one that really computed."""


@dataclass(frozen=True, kw_only=True)
class HowToRun:
    """A release, the part of it that this device runs, and on what."""

    entry: Entry
    release: Release
    plan: TierPlan
    config: RuntimeConfig
    denied: str = ""
    """Why policy lets the release's backend not run here; empty if it does."""
    instead: str = ""
    """Why the config has another backend than the release."""

    @property
    def config_name(self) -> str:
        """Canonical name of the config that runs."""
        return config_name(self.config)


def check_release(release: Release, plan: TierPlan, *, engine: str, monitor: str) -> None:
    """Whether this app is the one the release is bound to.

    Args:
        release: Signed.
        plan: Its part for this device.
        engine: Version of the engine that is installed.
        monitor: Version of the monitor that the app brings; `none` without one.

    Raises:
        UpdateRefusedError: reasons `engine`, `monitor`, `config`, `preprocess`.
    """
    if not engine_key(release.engine_minimum) <= engine_key(engine) <= engine_key(release.engine_version):
        raise UpdateRefusedError(
            "engine",
            f"engine {engine} is installed; release {release.counter} is for {release.engine_minimum}"
            f" to {release.engine_version}",
        )
    if release.monitor_version != monitor:
        raise UpdateRefusedError(
            "monitor",
            f"monitor {monitor} is part of this app; release {release.counter} is bound to"
            f" {release.monitor_version}",
        )
    runtime_config(plan.config)
    preprocess_of(plan)


def configs(bound: RuntimeConfig, *, denied: str, threads: int | None) -> Iterator[RuntimeConfig]:
    """The configs to try, in order: the bound one, then the CPU.

    Args:
        bound: The release's.
        denied: Why policy denies its backend here; empty if it does not.
        threads: By rule, where the tier was not measured.
    """
    config = bound if threads is None else replace(bound, threads=threads)
    if not denied:
        yield config
    if config.backend != "CPU":
        yield replace(config, backend="CPU")


class LoadedModel:
    """A model that passed its self-test. Thread-safe; `enter` before `predict`, `leave` after."""

    def __init__(self, how: HowToRun, store: Store) -> None:
        """Open the model and prove it.

        Raises:
            UpdateRefusedError: reasons `hash`, `length`, `model`, `labels`, `preprocess`, `golden`.
        """
        self.how = how
        self._model = _file(how.plan.model)
        self._golden = _file(how.plan.golden)
        self._store = store
        self._preprocess: Preprocess = preprocess_of(how.plan)
        self._free = threading.Condition()
        self._idle: list[Session] = []
        self._opened, self._most = 0, MOST_SESSIONS
        self._users = 0
        self._retired = False
        try:
            self._prove()
        except BaseException:  # nobody has the object that would close it
            self._close_idle()
            raise

    @property
    def sessions(self) -> int:
        """Open now."""
        return self._opened

    @property
    def memory_mb(self) -> float:
        """MiB that the engine says the idle sessions hold."""
        with self._free:
            return sum(session.memory_mb for session in self._idle)

    def enter(self) -> None:
        """Begin a request: the model stays open until it leaves."""
        with self._free:
            self._users += 1

    def leave(self) -> None:
        """End a request; the last one of a retired model closes it."""
        with self._free:
            self._users -= 1
            last = self._retired and self._users == 0
        if last:
            self._close_idle()

    def retire(self) -> None:
        """Close when the last request has ended; no new ones come."""
        with self._free:
            self._retired = True
            last = self._users == 0
        if last:
            self._close_idle()

    def predict(self, image_HWC: npt.NDArray[np.uint8]) -> Answer:
        """One answer.

        Raises:
            UserError: not an image.
            EngineError: the inference failed; AbnormalOutputError: what it answered is none.
        """
        logits = self._logits(image_HWC)
        probabilities = softmax(logits)
        index = int(probabilities.argmax())
        return Answer(
            label=self.how.release.labels[index],
            index=index,
            confidence=float(probabilities[index]),
            logits=logits,
            release=self.how.entry.counter,
            variant=self.how.plan.variant,
            backend=self.how.config.backend,
        )

    def _logits(self, image_HWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        tensor = self._preprocess.apply(image_HWC)
        with self._session() as session:
            outputs = session.run({next(iter(session.inputs)): tensor})
        logits: npt.NDArray[np.float32] = next(iter(outputs.values())).reshape(-1)
        if logits.size != len(self.how.release.labels) or not np.isfinite(logits).all():
            raise AbnormalOutputError(
                f"{self.how.plan.variant}: {logits.size} logits for {len(self.how.release.labels)} labels,"
                f" {int((~np.isfinite(logits)).sum())} of them not finite"
            )
        return logits

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """A session that nobody else uses meanwhile; the one used last, whose buffers are warm."""
        session = self._take()
        try:
            yield session
        finally:
            with self._free:
                self._idle.append(session)
                self._free.notify()

    def _take(self) -> Session:
        while True:
            with self._free:
                while not self._idle and self._opened >= self._most:
                    self._free.wait()
                if self._idle:
                    return self._idle.pop()
                self._opened += 1
            try:
                return self._open()
            except (EngineError, UpdateRefusedError):
                with self._free:
                    self._opened -= 1
                    if self._opened == 0:
                        raise
                    # No memory for one more, or the file was damaged meanwhile: those that are open go on.
                    self._most = self._opened

    def _open(self) -> Session:
        """One more session on the file, which is read whole and compared each time."""
        self._store.check(self._model)
        return Session(
            self._store.path(self._model),
            config=self.how.config,
        )

    def _prove(self) -> None:
        self._store.check(self._golden)
        golden = Golden.read(self._store.path(self._golden))
        if golden.labels != self.how.release.labels:
            raise UpdateRefusedError(
                "labels",
                f"the model was proven with {len(golden.labels)} labels {golden.labels[:3]}…, the release has"
                f" {len(self.how.release.labels)}: {self.how.release.labels[:3]}…",
            )
        try:
            with self._session() as session:
                self._check_shapes(session)
            logits = np.stack([self._logits(image) for image in golden.images])
        except (EngineError, UserError) as error:
            raise UpdateRefusedError("model", str(error)) from error
        difference = golden.difference(logits)
        if not difference <= self.how.plan.golden_tolerance:
            raise UpdateRefusedError(
                "golden",
                f"{self.how.plan.variant} on {self.how.config_name} is {difference:.2g} of the range of the"
                f" logits away from what it was proven with, allowed {self.how.plan.golden_tolerance:g}",
            )

    def _check_shapes(self, session: Session) -> None:
        """The model takes what the preprocessing makes, and has one output."""
        inputs, outputs = session.inputs, session.outputs
        shape = self._preprocess.input_shape
        declared = next(iter(inputs.values())).shape if len(inputs) == 1 else ()
        if len(outputs) != 1 or not _takes(declared, shape):
            raise UpdateRefusedError(
                "preprocess",
                f"{self.how.plan.variant} has inputs {[spec.shape for spec in inputs.values()]} and"
                f" {len(outputs)} outputs; its preprocessing makes {shape}, and one output is needed",
            )

    def _close_idle(self) -> None:
        with self._free:
            idle, self._idle = self._idle, []
            self._opened -= len(idle)
        for session in idle:
            session.close()


def _takes(declared: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an input declared so (-1: any extent) takes this shape."""
    return len(declared) == len(shape) and all(d in (-1, n) for d, n in zip(declared, shape, strict=True))


def _file(file: FileOf | None) -> FileOf:
    assert file is not None  # Release.parse: a tier that runs has a model and golden inputs
    return file
