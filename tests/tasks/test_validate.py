"""The stage validate: what would spoil training stops it by name; what is merely doubtful is reported."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleet.device.errors import UserError
from tasks.data.rules import ValidateParams
from tasks.prepare import PrepareParams, prepare
from tasks.validate import Verdict, validate

LENIENT = ValidateParams(
    min_test_images=1, min_train_images_per_class=1, min_test_images_per_class=1, min_calibration_images=1
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, class_folder) -> Path:
    """A sound dataset of three classes."""
    where = tmp_path_factory.mktemp("sound")
    root = class_folder(where / "set", images=30)
    params = PrepareParams(
        source={"kind": "folder", "path": root}, stored_size_px=24, calibration={"min_images": 6}
    )
    prepare(params, out=where / "prepared", reports=where / "reports")
    return where / "prepared"


def _validate(folder: Path, params: ValidateParams = LENIENT) -> Verdict:
    return validate(params, prepared=folder, reports=folder.parent / "reports")


def _edit(folder: Path, change: Callable[[pd.DataFrame], None]) -> None:
    manifest = pd.read_parquet(folder / "manifest.parquet")
    change(manifest)
    manifest.to_parquet(folder / "manifest.parquet", index=False)


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    """The sound dataset, to be spoiled."""
    return Path(shutil.copytree(prepared, tmp_path / "prepared"))


def test_sound_data_passes_without_leaving_the_machine(copy, monkeypatch):
    """No failure, pages written, and no connection opened: Great Expectations would report to its maker."""
    reached = []
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: reached.append(arguments))
    verdict = _validate(copy)
    assert verdict.failures == ()
    verdict.require()
    report = verdict.report()
    assert (report["images_count"], report["critical_failures_count"], report["warnings_count"]) == (90, 0, 0)
    assert report["expectations_count"] == len([key for key in report if key.endswith("_count")]) - 4
    assert (copy.parent / "reports/data_docs/index.html").is_file()
    assert reached == []
    json.dumps(report, allow_nan=False)


def _pages(docs: Path) -> dict[str, bytes]:
    return {str(page.relative_to(docs)): page.read_bytes() for page in docs.rglob("*") if page.is_file()}


def test_the_pages_are_the_same_bytes_whenever_and_wherever_they_are_made(copy, tmp_path, monkeypatch):
    """DVC keeps them by their hash: no time, no random name, no time zone is in them; every link leads on."""
    made = []
    for zone in ("UTC", "America/Sao_Paulo"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        validate(LENIENT, prepared=copy, reports=tmp_path / zone)
        made.append(_pages(tmp_path / zone / "data_docs"))
    monkeypatch.undo()
    time.tzset()
    assert made[0] == made[1]
    pages = {name: page.decode() for name, page in made[0].items() if name.endswith(".html")}
    assert len(pages) == 7
    for name, page in pages.items():
        assert "?d=" not in page  # the maker's logo, fetched with the time of the run
        links = re.findall(r'(?:href|src)="([^"#:]+\.(?:html|png))"', page)
        assert links
        assert all(os.path.normpath(Path(name).parent / link) in made[0] for link in links), (name, links)


# Row of the manifest, column, what is written there, the rule that must find it.
FAULTS = (
    (0, "sha256", None, "no_sha256"),
    (1, "label", 3, "label_range"),
    (2, "label", -1, "label_split"),
    (3, "origin", "internet", "origin"),
    (4, "width", 0, "width"),
    (5, "height", -4, "height"),
    (6, "source", None, "no_source"),
    (9, "label", None, "no_label"),
    (10, "split", None, "no_split"),
)


def test_each_fault_of_the_manifest_is_found_by_its_rule(copy):
    """A fault is counted, its row named, the build stopped with all of them in one message."""
    names = {}

    def spoil(manifest: pd.DataFrame) -> None:
        for row, column, value, rule in FAULTS:
            manifest.loc[row, column] = value
            names[rule] = manifest.loc[row, "source"]
        last, other = len(manifest) - 1, len(manifest) - 2
        manifest.loc[last, "sha256"] = manifest.loc[7, "sha256"]
        manifest.loc[[8, other], "group"] = "person 1"

    _edit(copy, spoil)
    verdict = _validate(copy)
    failures = {f.rule.name: f for f in verdict.failures if f.rule.severity == "critical"}
    for _, _, _, rule in FAULTS:
        assert failures[rule].count == (2 if rule == "label_split" else 1), (
            rule
        )  # no label fits no split either
        assert rule == "no_source" or names[rule] in failures[rule].examples
    assert failures["repeated"].count == failures["torn_group"].count == 2
    with pytest.raises(UserError, match="not fit to train on") as caught:
        verdict.require()
    assert all(f"{rule}: {failures[rule].count} images" in str(caught.value) for _, _, _, rule in FAULTS)


def test_a_class_without_training_images_stops_the_build(copy):
    """Its test images could only ever be wrong."""

    def spoil(manifest: pd.DataFrame) -> None:
        manifest.loc[(manifest["label"] == 2) & (manifest["split"] == "train"), "label"] = 1

    _edit(copy, spoil)
    (failure,) = [f for f in _validate(copy).failures if f.rule.severity == "critical"]
    assert str(failure) == "untrained_class: 1 classes have no training image: class_2"


def test_an_empty_split_stops_the_build(copy):
    """No test images, no accuracy."""
    manifest = pd.read_parquet(copy / "manifest.parquet")
    manifest[manifest["split"] != "test"].to_parquet(copy / "manifest.parquet", index=False)
    failures = {f.rule.name: f for f in _validate(copy).failures}
    assert failures["empty_split"].examples == ("test",)
    assert failures["empty_split"].rule.severity == "critical"


def test_spoilt_shards_are_named_by_all_their_images(copy):
    """Missing, cut off, of another type, pickled: nothing is unpickled, every image of the shard is named."""
    (copy / "val-000.npy").unlink()
    (copy / "test-000.npy").write_bytes((copy / "test-000.npy").read_bytes()[:200])
    np.save(copy / "calibration-000.npy", np.load(copy / "calibration-000.npy").astype(np.float32))
    np.save(copy / "train-000.npy", np.array([{"code": 1}], object), allow_pickle=True)
    verdict = _validate(copy)
    (failure,) = verdict.failures
    assert (failure.rule.name, failure.count) == ("bad_shard", 90)
    with pytest.raises(UserError, match="bad_shard: 90 images have no readable pixels"):
        verdict.require()


def test_shards_that_disagree_with_the_manifest_are_found(copy):
    """A row too few, a shard named outside the folder, no shard named at all."""
    np.save(copy / "val-000.npy", np.load(copy / "val-000.npy")[:-1])
    named = []

    def spoil(manifest: pd.DataFrame) -> None:
        rows = manifest["split"] == "test"
        manifest.loc[rows, "shard"] = "../prepared/test-000.npy"
        manifest.loc[manifest["split"] == "calibration", "shard"] = None
        named.append(int((manifest["split"] != "train").sum()))

    _edit(copy, spoil)
    (failure,) = _validate(copy).failures
    assert (failure.rule.name, failure.count) == ("bad_shard", named[0])


def test_a_flipped_pixel_is_found(copy):
    """One changed bit in one shard is one image that is not what the manifest says."""
    shard = np.load(copy / "train-000.npy", mmap_mode="r+")
    shard[3, 0, 0, 0] ^= 1
    shard.flush()
    manifest = pd.read_parquet(copy / "manifest.parquet")
    row = manifest[(manifest["split"] == "train") & (manifest["row"] == 3)]
    (failure,) = _validate(copy).failures
    assert (failure.rule.name, failure.count) == ("changed_pixels", 1)
    assert failure.examples == (row["source"].item(),)


def test_small_and_lopsided_sets_are_warned_about(copy):
    """Warnings in words and numbers, the same at every run (train depends on them); the build goes on."""
    strict = ValidateParams(max_class_imbalance=1, min_train_images_per_class=25)
    verdict = _validate(copy, strict)
    verdict.require()
    report = verdict.report()
    assert _validate(copy, strict).report() == report
    assert report["class_few_train_count"] == 3
    assert report["small_test_count"] == report["small_calibration_count"] == 1
    assert report["critical"] == []
    assert any(
        w.startswith("class_few_train: 3 classes have < 25 train images: class_0") for w in report["warnings"]
    )


def test_odd_pictures_are_warned_about(tmp_path, class_folder, image_file):
    """Black, white, stretched and enlarged pictures are named, one rule each."""
    root = class_folder(tmp_path / "set", images=30)
    dark, bright = np.zeros((30, 30, 3), np.uint8), np.full((30, 30, 3), 255, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (24, 300, 3), np.uint8)
    odd = {"dark": dark, "bright": bright, "elongated": noise, "enlarged": noise[:9, :9]}
    for name, picture in odd.items():
        (root / "class_0" / f"{name}.png").write_bytes(image_file(picture))
    params = PrepareParams(
        source={"kind": "folder", "path": root}, stored_size_px=24, calibration={"min_images": 6}
    )
    prepare(params, out=tmp_path / "prepared", reports=tmp_path / "reports")
    failures = {f.rule.name: f for f in _validate(tmp_path / "prepared").failures}
    for name in odd:
        assert failures[name].examples == (f"class_0/{name}.png",)
        assert failures[name].rule.severity == "warning"
    assert set(failures["blank"].examples) == {"class_0/dark.png", "class_0/bright.png"}


@pytest.mark.parametrize("missing", ["manifest.parquet", "labels.json"])
def test_no_dataset_says_what_to_run(copy, missing):
    """Without a manifest there is nothing to judge."""
    (copy / missing).unlink()
    with pytest.raises(UserError, match=missing) as caught:
        _validate(copy)
    assert "dvc repro prepare" in caught.value.next_step
