"""Devices by name."""

from fleet.device.errors import UserError
from fleet.lab.device import Device
from fleet.lab.local import LocalDevice


def open_device(name: str) -> Device:
    """The device called `name`.

    Raises:
        UserError: there is none of that name.
    """
    if name != LocalDevice.name:
        raise UserError(
            f"device {name!r}",
            allowed="local (this host)",
            next_step="remove the other names from `devices` in params.yaml",
        )
    return LocalDevice()
