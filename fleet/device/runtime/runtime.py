"""A signed release in an app: it answers, and updates itself without dropping a request.

One runtime runs one model; an app with several has several, each with a folder of its own.
"""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from fleet.device.errors import EngineError, UserError
from fleet.device.release import Policy, Tier
from fleet.device.runtime.choose import first_that_runs
from fleet.device.runtime.fetch import Patience
from fleet.device.runtime.home import Home
from fleet.device.runtime.loaded import Answer, HowToRun, LoadedModel
from fleet.device.runtime.refusal import UpdateRefusedError
from fleet.device.runtime.slots import Entry
from fleet.device.runtime.tiers import DeviceInfo
from fleet.device.runtime.update import Update, update_from
from fleet.device.runtime.updater import Updater

TRIAL_INFERENCES = 20
NO_MONITOR = "none"
"""Monitor version of an app without one."""


class Monitor(Protocol):
    """What listens to a runtime; called on the thread that asked, so it has to be quick."""

    @property
    def version(self) -> str:
        """Bound to the release."""
        ...

    def answered(self, image_HWC: npt.NDArray[np.uint8], answer: Answer, latency_ms: float) -> None:
        """A request was answered; the latency is that of preprocessing and inference."""
        ...

    def failed(self, error: EngineError, latency_ms: float, how: HowToRun) -> None:
        """An inference of this release failed; the request may still be answered, by the release before."""
        ...


@dataclass(frozen=True, kw_only=True)
class Status:
    """What runs, and what does not."""

    running: HowToRun | None
    """None: not loaded."""
    trying: bool
    """Whether the active release has still to prove itself."""
    previous: Entry | None
    """What to fall back on."""
    bad: dict[str, str]
    """COUNTER/TIER to what was wrong."""
    policy_version: int
    """0: none."""
    tier: Tier
    """That policy and device say."""
    sessions: int
    memory_mb: float
    """MiB that the engine says the idle sessions hold."""
    refusals: tuple[str, ...]
    """Why another release than the active one runs."""


class Runtime:
    """The release in a folder. Thread-safe; use as a context manager.

    Raises:
        UserError: another runtime works in the folder, or it cannot be written.
        UpdateRefusedError: reason `signature`: `root` is no root of trust.
    """

    def __init__(
        self,
        folder: Path,
        device: DeviceInfo,
        monitor_hook: Monitor | None = None,
        *,
        root: bytes,
        trial_inferences: int = TRIAL_INFERENCES,
    ) -> None:
        """Open the folder; a device of tier `low` loads its model now, others with the first request.

        Args:
            folder: Of this runtime alone.
            device: `DeviceInfo.detect(...)`.
            monitor_hook: Hears of every request; its version is bound to the release.
            root: `root.json` that the app carries: who may sign.
            trial_inferences: That a new release has to answer before it is good.
        """
        self._monitor, self._trial = monitor_hook, trial_inferences
        version = monitor_hook.version if monitor_hook else NO_MONITOR
        self._home = Home(folder, device, root=root, monitor_version=version)
        # One update at a time; one change of what is active or loaded at a time; the pointer, for no time.
        self._updating, self._changing, self._pointer = threading.Lock(), threading.RLock(), threading.Lock()
        self._current: LoadedModel | None = None
        self._on_trial: LoadedModel | None = None
        self._served = self._home.slots.state.served
        self._closed = False
        self._refusals: list[UpdateRefusedError] = []
        if self._home.tier == "low" and self._home.slots.state.active:
            try:
                self.load()
            except UpdateRefusedError as error:  # an update may mend it; a request will say so again
                self._refusals = [error]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End in order: requests that run are answered, then the model is closed. Safe to call twice."""
        with self._changing:
            if self._closed:
                return
            try:
                self.unload()
            finally:
                with self._pointer:
                    self._closed = True
                self._home.release()

    def status(self) -> Status:
        """What runs, and why nothing else does."""
        state, current, policy = self._home.slots.state, self._current, self._home.policy
        return Status(
            running=current.how if current else None,
            trying=state.status == "trying",
            previous=state.previous,
            bad=dict(state.bad),
            policy_version=policy.version if policy else 0,
            tier=self._home.tier,
            sessions=current.sessions if current else 0,
            memory_mb=current.memory_mb if current else 0.0,
            refusals=tuple(map(str, self._refusals)),
        )

    @property
    def running(self) -> HowToRun | None:
        """What is loaded now; None before the first request."""
        current = self._current
        return current.how if current else None

    @property
    def policy(self) -> Policy | None:
        """The one in force; None before the first."""
        return self._home.policy

    def predict(self, image_HWC: npt.NDArray[np.uint8]) -> Answer:
        """The answer of the active release to one uint8 RGB image [H, W, 3] of any size.

        A release that fails while it is on trial is given up: the one before it answers this same request.

        Raises:
            UserError: not such an image, or the runtime is closed.
            UpdateRefusedError: there is no release here that may run.
            EngineError: the inference failed.
        """
        while True:
            with self._request() as model:
                started = time.perf_counter()
                try:
                    answer = model.predict(image_HWC)
                except EngineError as error:
                    if self._monitor:
                        self._monitor.failed(error, (time.perf_counter() - started) * 1e3, model.how)
                    if not self._give_up(model, error):
                        raise
                    continue
                latency_ms = (time.perf_counter() - started) * 1e3
            if model is self._on_trial:
                self._count(model)
            if self._monitor:
                self._monitor.answered(image_HWC, answer, latency_ms)
            return answer

    def load(self) -> HowToRun:
        """Load the active release now, or the one before it where that cannot run.

        Raises:
            UpdateRefusedError: none of them may run here.
            UserError: the runtime is closed.
        """
        with self._changing:
            self._require_open()
            if self._current is None:
                self._load_what_runs()
            assert self._current is not None
            return self._current.how

    def unload(self) -> None:
        """Give the memory back; the next request loads again."""
        with self._changing:
            on_trial = self._on_trial is not None
            self._swap(None)
            if on_trial:
                self._home.slots.rest(self._served)

    def update(
        self, url: str, *, patience: Patience | None = None, tls: ssl.SSLContext | None = None
    ) -> Update:
        """Look for a policy and a release below `url`, and change over; requests go on meanwhile.

        Args:
            url: Of the repository, https or http on loopback.
            patience: How long it may take.
            tls: Where not the system's certificates decide.

        Raises:
            UpdateRefusedError: what was refused, an attack or an outage too; what ran goes on.
            UserError: the runtime is closed.
        """
        with self._updating:
            self._require_open()
            updater = Updater(self._home.tuf_folder, url, self._home.root, patience=patience, tls=tls)
            try:
                return update_from(self._home, updater, self._change_over)
            finally:
                self._home.coming = ()

    def _change_over(self, step: Callable[[], None]) -> None:
        """Do a step that changes what should run; then run that, and raise if it is refused."""
        with self._changing:
            self._require_open()
            before = self._home.slots.state.active
            step()
            wanted = self._home.slots.state.active
            if wanted is None or (wanted == before and self._current is None):
                return  # a policy, before the first release or the first request
            if wanted != before:
                self._served = 0
            self._load_what_runs()
            if self._refusals and self._current and self._current.how.entry != wanted:
                raise self._refusals[0]

    def _load_what_runs(self) -> None:
        try:
            model, self._refusals = first_that_runs(self._home, self._current)
        except UpdateRefusedError as error:
            self._refusals = [error]
            raise
        self._swap(model)

    def _swap(self, model: LoadedModel | None) -> None:
        """Requests that come from now on are for this model; those on the way stay with theirs."""
        state = self._home.slots.state
        on_trial = model is not None and state.status == "trying" and model.how.entry == state.active
        with self._pointer:
            old, self._current = self._current, model
            self._on_trial = model if on_trial else None
        if old is not None and old is not model:
            old.retire()

    @contextmanager
    def _request(self) -> Iterator[LoadedModel]:
        model = self._enter()
        try:
            yield model
        finally:
            model.leave()

    def _enter(self) -> LoadedModel:
        while True:
            with self._pointer:
                if self._current is not None:
                    self._current.enter()
                    return self._current
            self.load()

    def _count(self, model: LoadedModel) -> None:
        """One more answer of a release on trial; after enough of them it is good."""
        with self._pointer:
            self._served += 1
            due = self._served % self._trial == 0
        if not due:
            return
        with self._changing:
            if self._on_trial is not model:
                return
            try:
                self._home.slots.confirm()
            except (
                UpdateRefusedError
            ) as error:  # the disk is full: no reason to fail a request; once more later
                self._refusals = [error]
                return
            self._on_trial = None
            self._home.tidy()

    def _give_up(self, model: LoadedModel, error: EngineError) -> bool:
        """Whether another model may answer the request that failed."""
        with self._changing:
            if self._current is not model:
                return not self._closed
            if self._on_trial is not model:
                return False
            self._home.slots.fail(str(error))
            self._swap(None)
            if self._home.slots.state.active is None:
                return False
            self._load_what_runs()
            return True

    def _require_open(self) -> None:
        if self._closed:
            raise UserError(
                "a request to a runtime that is closed",
                allowed="requests before `close`",
                next_step="open a new Runtime on the folder",
            )
