"""The stage prepare: every file is in the dataset or in the list of refusals; same input, same bytes."""

import csv
import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import COLUMNS, Dataset
from tasks.prepare import PrepareParams, prepare

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
DIGITS = {"source": {"kind": "digits", "path": "tasks/data/digits.py"}, "stored_size_px": 32}


def _params(source: dict, **more) -> PrepareParams:
    defaults = {"stored_size_px": 24, "calibration": {"min_images": 5}, "source": source}
    return PrepareParams.model_validate({**defaults, **more})


def _folder(path: Path, **more) -> PrepareParams:
    return _params({"kind": "folder", "path": str(path)}, **more)


def _run(params: PrepareParams, where: Path) -> tuple[dict, Dataset, list[dict]]:
    report = prepare(params, out=where / "data/prepared", reports=where / "reports")
    with (where / "reports/prepare_refused.csv").open(encoding="utf-8", newline="") as stream:
        return report, Dataset.open(where / "data/prepared"), list(csv.DictReader(stream))


def _digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def _plant_bad_files(root: Path, pixels, image_file) -> dict[str, str]:
    """Put every kind of bad file into class_0; returns name -> the kind of refusal that is due."""
    good = image_file(pixels(900, 64, 48), "JPEG", quality=95)
    frames = [Image.fromarray(pixels(seed)) for seed in (901, 902)]
    twice, torn, leaked = (image_file(pixels(seed)) for seed in (910, 911, 912))
    bad = {
        "class_0/empty.jpg": (b"", "empty"),
        "class_0/truncated.jpg": (good[: len(good) // 2], "corrupt"),
        "class_0/page.jpg": (b"<html>not found</html>", "not_an_image"),
        "class_0/dot.png": (image_file(Image.new("RGB", (1, 1))), "too_small"),
        "class_0/moving.gif": (
            image_file(frames[0], "GIF", save_all=True, append_images=frames[1:]),
            "animated",
        ),
        "class_0/float.tif": (image_file(Image.new("F", (20, 20)), "TIFF"), "unsupported_mode"),
        "class_0/.DS_Store": (b"\0\0\0\1Bud1", "hidden_file"),
        "class_0/twice_b.png": (twice, "duplicate"),
        "class_0/torn.png": (torn, "label_conflict"),
        "class_1/torn.png": (torn, "label_conflict"),
        "README.md": (b"# my set", "outside_class"),
    }
    for name, (data, _) in bad.items():
        (root / name).write_bytes(data)
    (root / "class_0/twice_a.png").write_bytes(twice)
    (root / "class_1/again.png").write_bytes(leaked)
    (root / "class_3").mkdir()
    (root / "class_0/out.png").symlink_to("/etc/hostname")
    os.mkfifo(root / "class_0/pipe")
    return {name: kind for name, (_, kind) in bad.items()} | {
        "class_0/out.png": "link",
        "class_0/pipe": "special_file",
        "class_3": "empty_class",
    }


@pytest.fixture(scope="module")
def bad_set(tmp_path_factory, class_folder, pixels, image_file):
    """90 good images, every kind of bad file, odd but good ones: (root, refusals due, result)."""
    where = tmp_path_factory.mktemp("bad")
    root = class_folder(where / "set", classes=3, images=30)
    due = _plant_bad_files(root, pixels, image_file)
    odd = root / "class_2"
    exif = Image.Exif()
    exif[0x0112] = 6
    (odd / "grey.png").write_bytes(image_file(Image.fromarray(pixels(920)[..., 0])))
    (odd / "print.jpg").write_bytes(image_file(Image.fromarray(pixels(921)).convert("CMYK"), "JPEG"))
    (odd / "palette.png").write_bytes(image_file(Image.fromarray(pixels(922)).quantize(32)))
    (odd / "deep.png").write_bytes(image_file(Image.fromarray(pixels(923)[..., 0].astype(np.uint16) * 257)))
    (odd / "alpha.png").write_bytes(image_file(Image.fromarray(pixels(924)).convert("RGBA")))
    (odd / "phone.jpg").write_bytes(image_file(pixels(925, 40, 24), "JPEG", exif=exif))
    (odd / "\u82f9\u679c \u00e9.png").write_bytes(image_file(pixels(926)))
    (odd / "two\nlines.png").write_bytes(image_file(pixels(927)))
    return root, due, _run(_folder(root, max_refused_share=0.2), where)


def test_every_bad_file_is_refused_by_name_with_its_reason(bad_set):
    """The list names each bad file once, with kind and reason; the report counts them."""
    _, due, (report, _, refused) = bad_set
    assert {row["name"]: row["kind"] for row in refused} == due
    assert all(row["reason"] for row in refused)
    for kind in set(due.values()):
        assert report[f"refused_{kind}_count"] == list(due.values()).count(kind), kind


def test_nothing_else_is_lost(bad_set):
    """Every file of the source is a row of the manifest or a refusal, never both, never neither."""
    root, due, (report, dataset, refused) = bad_set
    files = {f.relative_to(root).as_posix().replace("\n", "\\n") for f in root.rglob("*") if not f.is_dir()}
    kept = set(dataset.manifest["source"])
    assert kept | {row["name"] for row in refused} == files | {"class_3"}
    assert not kept & set(due)
    assert report["images_count"] == len(kept) == 100


def test_odd_files_are_converted_and_counted(bad_set):
    """Grey, print, palette, 16 bit, alpha and sideways pictures are in, under printable names."""
    _, _, (report, dataset, _) = bad_set
    for kind in ("cmyk", "palette", "sixteen_bit", "exif_rotated"):
        assert report[f"handled_{kind}_count"] == 1, kind
    assert report["handled_greyscale_count"] == 2
    rows = dataset.manifest.set_index("source")
    assert rows.loc["class_2/phone.jpg", ["width", "height"]].tolist() == [24, 40]
    assert {"class_2/\u82f9\u679c \u00e9.png", "class_2/two\\nlines.png"} <= set(rows.index)


def test_manifest_labels_and_shards_are_the_contract(bad_set):
    """Stored pixels are the contract's crop and area resize of the file, found by shard and row."""
    root, _, (report, dataset, _) = bad_set
    assert tuple(dataset.manifest.columns) == COLUMNS
    assert dataset.label_names == ("class_0", "class_1", "class_2")
    assert dataset.stored_size == 24
    for row in dataset.manifest[dataset.manifest["source"].str.fullmatch(r"class_\d/\d+\.png")].itertuples():
        picture = np.asarray(Image.open(root / row.source))
        stored = np.load(dataset.root / row.shard, mmap_mode="r")[row.row]
        assert np.array_equal(stored, Preprocess(size_px=24).resize(picture))
        assert hashlib.sha256(stored.tobytes()).hexdigest() == row.sha256
        assert dataset.label_names[row.label] == row.source.split("/")[0]
        assert row.shard.startswith(f"{row.split}-")
    assert sum(report[f"{s}_images_count"] for s in ("train", "val", "calibration", "test")) == len(
        dataset.manifest
    )


def test_splits_are_disjoint_and_mixed(bad_set):
    """No pixels are in two splits, and rows are in random order, so any first rows show several classes."""
    _, _, (_, dataset, _) = bad_set
    assert dataset.manifest["sha256"].is_unique
    assert len(set(dataset.split("train").labels[:12])) == 3
    assert [len(dataset.split(s)) for s in ("field", "field_test")] == [0, 0]


def test_too_many_bad_files_stop_the_build(bad_set, tmp_path):
    """Above the allowed share the source itself is in doubt; the list is written all the same."""
    root, _, _ = bad_set
    with pytest.raises(UserError, match=r"10 of 110 images are unusable \(9\.1 %\): class_0") as caught:
        _run(_folder(root, max_refused_share=0.05), tmp_path)
    assert "prepare_refused.csv" in caught.value.next_step
    assert "class_0/empty.jpg,empty," in (tmp_path / "reports/prepare_refused.csv").read_text()
    assert not (tmp_path / "data/prepared").exists()


def test_same_input_same_bytes(class_folder, tmp_path):
    """Twice, over an old result, and from a tar in another order: the same files to the byte."""
    root = class_folder(tmp_path / "set")
    _run(_folder(root), tmp_path / "one")
    _run(_folder(root, seed=1), tmp_path / "two")
    assert _digest(tmp_path / "one/data/prepared") != _digest(tmp_path / "two/data/prepared")
    _run(_folder(root), tmp_path / "two")
    assert _digest(tmp_path / "one/data/prepared") == _digest(tmp_path / "two/data/prepared")
    with tarfile.open(tmp_path / "set.tar.gz", "w:gz") as archive:
        for file in sorted(root.rglob("*.png"), reverse=True):
            archive.add(file, file.relative_to(root).as_posix())
    _run(_params({"kind": "tar", "path": str(tmp_path / "set.tar.gz")}), tmp_path / "tar")
    assert _digest(tmp_path / "one/data/prepared") == _digest(tmp_path / "tar/data/prepared")


def test_a_killed_run_leaves_no_trace_in_the_next(class_folder, tmp_path):
    """Left-over scratch is replaced, a result appears whole or not at all."""
    root = class_folder(tmp_path / "set")
    scratch = tmp_path / "data/prepared.partial"
    scratch.mkdir(parents=True)
    (scratch / "pixels.npy").write_bytes(b"half")
    _run(_folder(root), tmp_path)
    assert [f.name for f in (tmp_path / "data").iterdir()] == ["prepared"]


def test_a_file_that_vanishes_is_unreadable_not_fatal(class_folder, tmp_path, monkeypatch):
    """A disk error on one file costs that file and is said."""
    root = class_folder(tmp_path / "set")
    real = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "007.png" and "class_1" in str(path):
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    report, _, refused = _run(_folder(root), tmp_path)
    assert report["refused_unreadable_count"] == 1
    assert (refused[0]["name"], refused[0]["kind"]) == ("class_1/007.png", "unreadable")
    assert "Input/output error" in refused[0]["reason"]


def test_given_splits_and_the_same_image_in_two(class_folder, image_file, pixels, tmp_path):
    """A training image that is also in test stays in test only; a class of one image stays in train."""
    root = tmp_path / "set"
    class_folder(root / "train", images=30)
    class_folder(root / "test", images=8, seed=500)
    (root / "train/rare").mkdir()
    (root / "train/rare/only.png").write_bytes(image_file(pixels(800)))
    (root / "train/class_0/leak.png").write_bytes((root / "test/class_0/000.png").read_bytes())
    report, dataset, refused = _run(_folder(root), tmp_path)
    assert [(r["name"], r["kind"]) for r in refused] == [("train/class_0/leak.png", "split_overlap")]
    assert report["test_images_count"] == 24
    rows = dataset.manifest.set_index("source")
    assert rows.loc["train/rare/only.png", "split"] == "train"
    assert dataset.label_names[rows.loc["train/rare/only.png", "label"]] == "rare"


def test_groups_never_span_splits(class_folder, tmp_path):
    """With a pattern for the person, all images of a person are in one split."""
    root = class_folder(tmp_path / "set", images=60)
    source = {"kind": "folder", "path": str(root), "group": r"/(\d\d)\d\.png$"}
    _, dataset, _ = _run(_params(source), tmp_path)
    assert set(dataset.manifest["group"]) == {f"0{n}" for n in range(6)}
    assert dataset.manifest.groupby("group")["split"].nunique().max() == 1


@pytest.mark.parametrize("images", [0, 3])
def test_too_few_images_are_refused(class_folder, tmp_path, images):
    """Nothing, or too little to set calibration apart: an error with the next step, no dataset."""
    root = class_folder(tmp_path / "set", images=images)
    with pytest.raises(UserError):
        _run(_folder(root), tmp_path)
    assert not (tmp_path / "data/prepared").exists()


def test_digits_are_all_there(tmp_path):
    """The embedded default: 1,797 digits, ten classes, calibration of 125."""
    report, dataset, _ = _run(PrepareParams.model_validate(DIGITS), tmp_path)
    assert (report["images_count"], report["classes_count"]) == (1797, 10)
    assert report["calibration_images_count"] == 125
    first = dataset.split("train").image(0)
    assert first.shape == (32, 32, 3)
    assert np.array_equal(first[..., 0], first[..., 2])
    assert first.max() > 200


def test_limit_takes_every_class_in_proportion(tmp_path):
    """The tiny preset: a few hundred images, all classes, exact count."""
    report, dataset, _ = _run(PrepareParams.model_validate({**DIGITS, "limit": 400}), tmp_path)
    assert (report["images_count"], report["over_limit_count"]) == (400, 1397)
    counts = dataset.manifest["label"].value_counts()
    assert counts.min() >= 38
    assert counts.max() <= 42


@pytest.mark.parametrize(
    "change",
    [
        {"stored_size_px": 4},
        {"source": {"kind": "zip", "path": "x"}},
        {"source": {"kind": "folder", "path": "x", "group": "("}},
        {"calibration": {"min_imgs": 3}},
        {"holdout": {"test": 0}},
        {"limit": 0},
    ],
)
def test_params_that_cannot_be_meant_are_refused(change):
    """Misspelt and impossible values never become a dataset."""
    with pytest.raises(ValidationError):
        PrepareParams.model_validate({**DIGITS, **change})


def test_stage_reports_a_missing_source_with_exit_code_2(tmp_path):
    """From the command line: one message with the path and what to do, no traceback."""
    (tmp_path / "params.yaml").write_text(
        "prepare: {source: {kind: tar, path: ../nowhere.tar}, stored_size_px: 32}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "tasks.prepare"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 2
    assert "../nowhere.tar is not there" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(
    not (SHARED / "clothing96.tar").exists(), reason="../shared/data/clothing96.tar is not here"
)
def test_real_clothing_set(tmp_path):
    """3,781 photos by their folders: none is refused, test and validation are the source's own."""
    source = {"kind": "tar", "path": str(SHARED / "clothing96.tar")}
    report, dataset, refused = _run(PrepareParams(source=source, stored_size_px=96), tmp_path)
    assert [(r["name"], r["kind"]) for r in refused] == [("LICENSE", "outside_class")]
    assert [len(dataset.split(s)) for s in ("train", "val", "calibration", "test")] == [2762, 341, 306, 372]
    assert report["classes_count"] == 10


@pytest.mark.skipif(
    not (SHARED / "grocery256.tar").exists(), reason="../shared/data/grocery256.tar is not here"
)
def test_real_grocery_set_keeps_its_lists(tmp_path):
    """81 fine classes by the published lists; the product pictures are field and field_test."""
    source = {"kind": "split_list", "path": str(SHARED / "grocery256.tar"), "iconic": True}
    params = PrepareParams(source=source, stored_size_px=32)
    report, dataset, refused = _run(params, tmp_path)
    assert refused == []
    assert [len(dataset.split(s)) for s in ("test", "val", "field", "field_test")] == [2485, 296, 41, 40]
    assert report["train_images_count"] + report["calibration_images_count"] == 2640
    assert dataset.label_names[80] == "Zucchini"
