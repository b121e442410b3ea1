"""A device's key: made once, read by its owner alone."""

import pytest

from fleet.device.credentials import DeviceKey
from fleet.device.errors import UserError


def test_a_key_is_made_once(tmp_path):
    """The second process has the first one's, and nobody else may read it."""
    first, second = (DeviceKey.load(tmp_path / "key") for _ in range(2))
    assert first.device == second.device
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("size", "mode"), [(32, 0o644), (32, 0o640), (31, 0o600), (0, 0o600), (33, 0o600)])
def test_a_key_that_is_none_is_refused(tmp_path, size, mode):
    """One that others may read, or of another length."""
    path = tmp_path / "key"
    path.write_bytes(b"k" * size)
    path.chmod(mode)
    with pytest.raises(UserError, match=f"{size} bytes, mode {mode:o}"):
        DeviceKey.load(path)
