"""The champion: its folder says what it is or is refused, and builds are compared image by image."""

import hashlib
import json

import pandas as pd
import pytest

from fleet.device.errors import UserError
from tasks.champion import (
    Champion,
    ChampionVariant,
    compare,
    read_champion,
    read_predictions,
    records,
    write_champion,
)
from tasks.paired import Paired

FP32, INT8, OTHER = "mbv3s-p0-fp32-r32", "mbv3s-p30-i8-r32", "rn18-p0-i8-r32"


def champion(labels=("cat", "dog", "owl"), names=(FP32, INT8), sha256="", **top1):
    """A record of version 3 with these variants."""
    variants = {
        name: ChampionVariant(mnn_sha256="ab" * 32, size_bytes=10, top1=top1.get(name, 0.9)) for name in names
    }
    return Champion(
        name="edgeloop-x",
        version=3,
        release_sha256="cd" * 32,
        evidence_sha256="ef" * 32,
        git_commit="0" * 40,
        labels=labels,
        variants=variants,
        predictions_sha256=sha256,
    )


def table(**rows):
    """Predictions of INT8 on images named after their rows: image=(label, class)."""
    return pd.DataFrame(
        {
            "sha256": list(rows),
            "label": pd.array([label for label, _ in rows.values()], "int16"),
            INT8: pd.array([answer for _, answer in rows.values()], "int16"),
        }
    )


def test_classes_are_compared_by_name():
    """The same answers under another order of labels are no change; a class that is gone is wrong."""
    then = table(a=(0, 0), b=(1, 1), c=(2, 2), d=(0, 2))
    now = table(a=(2, 2), b=(0, 0), c=(1, 1), d=(2, 1))
    found = compare(champion(("cat", "dog", "owl")), then, ("dog", "owl", "cat"), now)[INT8]
    assert found.paired == Paired(both=3, lost=0, gained=0, neither=1)
    assert [(c.label, c.paired.n) for c in found.classes] == [("dog", 1), ("owl", 1), ("cat", 2)]
    assert records({INT8: found}, {INT8})[INT8] == {
        "same_file": True,
        "against": INT8,
        "n": 4,
        "drop_pp": 0.0,
        "interval_pp": [pytest.approx(-34.9, abs=15), pytest.approx(34.9, abs=15)],
        "classes": [
            {"label": "dog", "n": 1, "champion": 1.0, "candidate": 1.0},
            {"label": "owl", "n": 1, "champion": 1.0, "candidate": 1.0},
            {"label": "cat", "n": 2, "champion": 0.5, "candidate": 0.5},
        ],
    }


def test_images_without_truth_and_of_unknown_classes_do_not_count():
    """-1 is no truth; a class that the champion never saw must not make it look worse than it is."""
    then = table(a=(0, 0), b=(-1, 1), c=(1, 1), d=(0, 0))
    now = table(a=(0, 1), b=(-1, 1), c=(-1, 0), d=(2, 2), e=(2, 2))
    found = compare(champion(("cat", "dog")), then, ("cat", "dog", "new"), now)[INT8]
    assert found.paired == Paired(both=0, lost=1, gained=0, neither=0)
    assert (found.test_count, found.unknown_count) == (1, 2)


def test_what_is_true_is_what_the_build_says():
    """A label that was wrong when the champion was judged is right for both now."""
    found = compare(champion(), table(a=(0, 0), b=(1, 1)), ("cat", "dog", "owl"), table(a=(1, 1), b=(1, 1)))
    assert found[INT8].paired == Paired(both=1, lost=0, gained=1, neither=0)


def test_another_test_set_is_no_comparison():
    """Without a common image n is 0 and gate.json says nothing."""
    found = compare(champion(), table(a=(0, 0)), ("cat", "dog", "owl"), table(b=(0, 0)))
    assert found[INT8].n == 0
    assert found[INT8].test_count == 1
    assert records(found, set()) == {}


@pytest.mark.parametrize(
    ("name", "names", "against"),
    [
        (INT8, (FP32, INT8, OTHER), INT8),
        ("mbv3s-p40-i8-r32", (FP32, INT8, OTHER), OTHER),  # the more accurate one
        ("mbv3s-p40-i8-r32", (FP32, INT8), INT8),
        ("mbv3s-p40-w8-r32", (FP32, INT8, OTHER), None),
    ],
)
def test_a_variant_meets_its_name_else_its_precision(name, names, against):
    """The same name, else the champion's best variant of the same precision, else nothing to compare with."""
    assert champion(names=names, **{OTHER: 0.95}).counterpart(name) == against


def _write(folder, **changes):
    """A whole champion folder; then keys of its record changed."""
    source = folder.parent / "from.parquet"
    table(a=(0, 0), b=(1, 1)).to_parquet(source)
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    write_champion(folder, champion(names=(INT8,), sha256=sha256), source)
    record = json.loads((folder / "champion.json").read_text())
    (folder / "champion.json").write_text(json.dumps(record | changes))


def test_what_is_written_is_read(tmp_path):
    """Record and predictions come back; taken back, there is no champion and no file of it."""
    folder = tmp_path / "champion"
    _write(folder)
    found = read_champion(folder)
    assert (found.version, found.labels, list(found.variants)) == (3, ("cat", "dog", "owl"), [INT8])
    assert len(read_predictions(folder / "predictions.parquet", found.labels, [INT8])) == 2
    write_champion(folder)
    assert read_champion(folder) is None
    assert [path.name for path in folder.iterdir()] == ["champion.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "three"}, "version: Input should be a valid integer"),
        ({"predictions_sha256": "00" * 32}, "the predictions .* names"),
        ({"labels": ["cat", "cat"]}, "a label twice"),
        ({"champoin": 1}, "champoin: Extra inputs"),
        ({"variants": {"best": {"mnn_sha256": "", "size_bytes": 1, "top1": 1}}}, "variant name 'best'"),
        ({"variants": {INT8: {"mnn_sha256": "", "size_bytes": 1, "top1": float("nan")}}}, "top1"),
    ],
)
def test_a_record_that_cannot_be_is_refused(tmp_path, changes, message):
    """One error that names the file and what is wrong in it."""
    _write(tmp_path / "champion", **changes)
    with pytest.raises(UserError, match=message):
        read_champion(tmp_path / "champion")


def test_a_folder_without_record_is_refused(tmp_path):
    """No record is not `no champion`: a deleted file must not let a build pass uncompared."""
    with pytest.raises(UserError, match=r"there is no .*champion\.json"):
        read_champion(tmp_path / "champion")
    (tmp_path / "champion.json").write_text("[]")
    with pytest.raises(UserError, match=r"champion\.json"):
        read_champion(tmp_path)


def test_predictions_that_were_changed_are_refused(tmp_path):
    """The record names the bytes of the predictions: other bytes, or none, are not the champion's."""
    _write(tmp_path / "champion")
    (tmp_path / "champion" / "predictions.parquet").unlink()
    with pytest.raises(UserError, match="no file"):
        read_champion(tmp_path / "champion")
    table(a=(0, 1)).to_parquet(tmp_path / "champion" / "predictions.parquet")
    with pytest.raises(UserError, match=r"champion\.json names"):
        read_champion(tmp_path / "champion")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (table(a=(0, 3)), r"0\.\.0, .* 3\.\.3"),
        (table(a=(-2, 0)), r"label -2\.\.-2"),
        (table(a=(-1, -1)), rf"{INT8} -1\.\.-1"),  # no truth there is, no answer there is not
        (pd.concat([table(a=(0, 0)), table(a=(0, 0))]), "1 images twice"),
        (table(a=(0, 0)).astype({INT8: "float32"}), "whole numbers"),
        (table(a=(0, 0)).drop(columns=INT8), INT8),
        (table(a=(0, 0)).drop(columns="sha256"), "sha256"),
    ],
)
def test_predictions_that_cannot_be_are_refused(tmp_path, frame, message):
    """A class without label, an image twice, no whole numbers, a column too few: refused by name."""
    frame.to_parquet(tmp_path / "predictions.parquet")
    with pytest.raises(UserError, match=message):
        read_predictions(tmp_path / "predictions.parquet", ("cat", "dog", "owl"), [INT8])


def test_no_parquet_is_refused(tmp_path):
    """A truncated or missing file is one clear error."""
    (tmp_path / "predictions.parquet").write_bytes(b"PAR1")
    for path in (tmp_path / "predictions.parquet", tmp_path / "none.parquet"):
        with pytest.raises(UserError, match="Parquet with the columns sha256"):
            read_predictions(path, ("cat",), [INT8])
