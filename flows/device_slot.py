"""Measuring alone: a slot in Prefect for each device, beside the lock on the machine that measures.

The lock of `fleet.lab.lock` is what keeps two measurements off a device, whoever started them.
The slot makes waiting visible: who shares a Prefect server sees in its pages which device is taken and by
which build, and a build says that it waits. `prune`, which measures for seconds within minutes of training,
takes the lock only.
"""

import contextlib
import platform
import sys
from collections.abc import Iterator
from http import HTTPStatus
from uuid import UUID

LEASE_S = 60.0
"""The shortest that Prefect grants; the holder renews it, and the slot of a killed one is free after it."""


def device_of(stage: str) -> str | None:
    """The device a stage measures on, None for one that does not measure."""
    name, _, device = stage.partition("@")
    return device if name == "benchmark" and device else None


def limit_name(device: str, own_server: bool) -> str:
    """The name of a device's limit. On a server that several machines share, `local` is a device on each."""
    return f"device-local-{platform.node()}" if device == "local" and not own_server else f"device-{device}"


@contextlib.contextmanager
def held(stage: str, own_server: bool, task_run: UUID | None) -> Iterator[None]:
    """Hold the slot of the device that `stage` measures on for the block; says so when it has to wait.

    Args:
        stage: Its name in dvc.yaml; one that does not measure waits for nothing.
        own_server: Whether Prefect's server serves this machine alone.
        task_run: Who holds the slot, for Prefect's pages.

    Raises:
        ConcurrencySlotAcquisitionError: the server refused, or does not answer.
    """
    device = device_of(stage)
    if device is None:
        yield
        return
    from prefect.client.schemas.objects import ConcurrencyLeaseHolder
    from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
    from prefect.concurrency.sync import concurrency

    name = limit_name(device, own_server)
    _make_limit(name)
    holder = ConcurrencyLeaseHolder(type="task_run", id=task_run) if task_run else None

    def slot(retries: int | None) -> contextlib.AbstractContextManager[None]:
        return concurrency(
            name,
            occupy=1,
            strict=True,
            max_retries=retries,  # and no timeout: a slot granted just after it would be nobody's
            lease_duration=LEASE_S,
            holder=holder,
            raise_on_lease_renewal_failure=False,  # the lock still protects a measurement that runs
        )

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(slot(0))
        except ConcurrencySlotAcquisitionError as error:
            if not _is_taken(error):
                raise
            waits = f"{stage}: another build measures on device {device}; waiting for its end"
            print(waits, file=sys.stderr, flush=True)
            stack.enter_context(slot(None))
        yield


def _is_taken(error: Exception) -> bool:
    """Whether the server said that all slots are taken, and not something else."""
    import httpx

    cause = error.__cause__
    return isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == HTTPStatus.LOCKED


def _make_limit(name: str) -> None:
    """Create a device's limit of one; one that somebody has changed, to 0 to rest a device, stays so."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            with contextlib.suppress(ObjectAlreadyExists):  # another build was faster
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
