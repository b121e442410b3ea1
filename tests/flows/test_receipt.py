"""The note that a build leaves of its registration, so that the next need not ask MLflow."""

import pytest

from flows.build import _read_receipt

WHOLE = '{"evidence": "e", "store_sha256": "s", "registered": {"name": "edgeloop-x", "version": 3}}'


def test_what_was_noted_is_read(tmp_path):
    """Evidence, store and version."""
    (tmp_path / "x.json").write_text(WHOLE, encoding="utf-8")
    assert _read_receipt(tmp_path / "x.json")["registered"] == {"name": "edgeloop-x", "version": 3}


@pytest.mark.parametrize(
    "text", [None, "", WHOLE[:40], "[]", "null", "3", '{"registered": 3}', '{"registered": {}}']
)
def test_a_damaged_note_is_none(tmp_path, text):
    """Missing, cut off or of another shape: the build registers again, which finds the same version."""
    if text is not None:
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
    assert _read_receipt(tmp_path / "x.json") == {}


def test_a_note_that_is_a_folder_is_none(tmp_path):
    """Somebody's mistake in the state folder."""
    (tmp_path / "x.json").mkdir()
    assert _read_receipt(tmp_path / "x.json") == {}
