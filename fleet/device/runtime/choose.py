"""Which release runs: the active one if it may and can, else the one before it."""

from fleet.device.runtime.home import Home
from fleet.device.runtime.loaded import HowToRun, LoadedModel, check_release, configs
from fleet.device.runtime.records import runtime_config
from fleet.device.runtime.refusal import Reason, UpdateRefusedError
from fleet.device.runtime.slots import Entry
from fleet.device.runtime.tiers import denied, threads_of

_NOT_ITS_FAULT: frozenset[Reason] = frozenset(("engine", "monitor", "hash", "length", "signature", "disk"))
"""The app is another than the release is bound to, or what lies here is damaged: an update mends both."""
_OF_THE_BACKEND: frozenset[Reason] = frozenset(("model", "golden"))


def first_that_runs(home: Home, running: LoadedModel | None) -> tuple[LoadedModel, list[UpdateRefusedError]]:
    """The model to answer with, and why releases before it in order do not.

    Args:
        home: Its state says what is active. A release on trial that fails here is bad from now on.
        running: Returned itself where it is the one.

    Raises:
        UpdateRefusedError: no release here may run; the reason is that of the active one.
    """
    refusals: list[UpdateRefusedError] = []
    while (active := home.slots.state.active) is not None:
        try:
            return _loaded(home, active, running), refusals
        except UpdateRefusedError as error:
            refusals.append(error)
            if error.reason in _NOT_ITS_FAULT or home.slots.state.status == "good":
                home.slots.rest(home.slots.state.served)
                break
            home.slots.fail(str(error))
    previous = home.slots.state.previous
    if previous is not None:
        try:
            return _loaded(home, previous, running), refusals
        except UpdateRefusedError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    raise UpdateRefusedError("nothing", "no release on this device yet: update first")


def _loaded(home: Home, entry: Entry, running: LoadedModel | None) -> LoadedModel:
    """The release of `entry`, on the backend it wants or else on the CPU."""
    release, plan = home.plan_of(entry)
    check_release(release, plan, engine=home.device.engine_version, monitor=home.monitor_version)
    bound = runtime_config(plan.config)
    why_denied = denied(home.device, bound.backend, home.policy)
    if running is not None and running.how.entry == entry and running.how.denied == why_denied:
        return running
    home.slots.begin(entry)
    failed: UpdateRefusedError | None = None
    for config in configs(bound, denied=why_denied, threads=_threads(home, entry, measured=plan.measured)):
        how = HowToRun(
            entry=entry,
            release=release,
            plan=plan,
            config=config,
            denied=why_denied,
            instead=why_denied or (str(failed) if failed else ""),
        )
        try:
            return LoadedModel(how, home.store)
        except UpdateRefusedError as error:
            if error.reason not in _OF_THE_BACKEND:
                raise
            failed = error
    assert failed is not None  # there is always the CPU to try
    raise failed


def _threads(home: Home, entry: Entry, *, measured: bool) -> int | None:
    return None if measured else threads_of(home.device, entry.tier)
