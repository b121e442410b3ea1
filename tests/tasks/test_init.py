"""`edgeloop init`: a workspace for someone's own images, or one clear error."""

import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from fleet.device.errors import UserError
from flows.doctor.workspace import check_workspace
from tasks.champion import read_champion
from tasks.init import init_workspace
from tasks.nn.arch import Architecture
from tasks.nn.init import load_matching, read_state
from tasks.prepare import PrepareParams, prepare
from tasks.stage import load_params
from tasks.train import TrainParams

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def repository(tmp_path):
    """A repository with the default workspace's parameters and the graph only."""
    root = tmp_path / "repository"
    root.mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        (root / name).write_bytes((ROOT / name).read_bytes())
    return root


def _images(folder: Path, *, classes: int = 2, each: int = 3, side: int = 100) -> Path:
    noise = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class {label}").mkdir(parents=True)
        for number in range(each):
            pixels = noise.integers(0, 255, (side + 20, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"class {label}" / f"ü {number}.png")
    return folder


def test_a_workspace_refers_to_the_images_where_they_lie(repository, tmp_path):
    """The folder is named by its absolute path; the graph is a link to the root's."""
    images = _images(tmp_path / "my photos")
    made, found = init_workspace(repository, "mine", images)
    params = yaml.safe_load((made.path / "params.yaml").read_text(encoding="utf-8"))
    assert params["prepare"]["source"] == {"kind": "folder", "path": str(images)}
    assert (made.path / params["root"]).resolve() == repository
    assert params["gate"] == {"min_top1": 0.9}  # the gate's default, not the digits' accuracy floor
    assert "flip" in params["train"]["augment"]
    assert {f.status for f in check_workspace(made)} == {"ok"}
    assert (made.path / "dvc.yaml").readlink() == Path("../../dvc.yaml")
    assert read_champion(made.path / "champion") is None  # nothing has been released
    assert (found.images_count, found.classes_count, found.side_px) == (6, 2, 100)


@pytest.mark.parametrize(("side", "size"), [(20, 32), (100, 96), (500, 224)])
def test_the_input_size_follows_the_images(repository, tmp_path, side, size):
    """Inputs are the largest usual size that needs no enlarging."""
    made, _ = init_workspace(repository, "mine", _images(tmp_path / "images", side=side))
    params = yaml.safe_load((made.path / "params.yaml").read_text(encoding="utf-8"))
    assert params["train"]["preprocess"]["size_px"] == params["prepare"]["stored_size_px"] == size


@pytest.mark.parametrize("name", ["", "Mine", "../mine", "a b", "-x", "digits", "x" * 41])
def test_a_bad_name_is_refused(repository, tmp_path, name):
    """A name that is no folder name, or means something else already, makes nothing."""
    with pytest.raises(UserError, match="workspace name"):
        init_workspace(repository, name, _images(tmp_path / "images"))
    assert not (repository / "workspaces").exists()


def test_an_existing_name_is_refused_and_kept(repository, tmp_path):
    """A second init under one name does not touch the first."""
    images = _images(tmp_path / "images")
    made, _ = init_workspace(repository, "mine", images)
    before = (made.path / "params.yaml").read_bytes()
    with pytest.raises(UserError, match="taken"):
        init_workspace(repository, "mine", images)
    assert (made.path / "params.yaml").read_bytes() == before


def test_bad_folders_are_refused(repository, tmp_path):
    """Missing, empty, one class, no images, or the repository itself: each with what is allowed."""
    (tmp_path / "empty").mkdir()
    text = tmp_path / "text"
    for label in "ab":
        (text / label).mkdir(parents=True)
        (text / label / "note.jpg").write_text("no picture", encoding="utf-8")
    cases = {
        tmp_path / "missing": "missing",
        tmp_path / "empty": "0 files",
        _images(tmp_path / "one", classes=1): "1 class",
        text: "none of a sample of 2",
        repository: "holds edgeloop itself",
    }
    for folder, said in cases.items():
        with pytest.raises(UserError, match=said):
            init_workspace(repository, "mine", folder)
    assert not (repository / "workspaces" / "mine").exists()


def test_a_relative_folder_is_made_absolute(repository, tmp_path, monkeypatch):
    """`edgeloop init mine images` works from any folder, and so does the workspace later."""
    images = _images(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    made, _ = init_workspace(repository, "mine", Path("images"))
    params = yaml.safe_load((made.path / "params.yaml").read_text(encoding="utf-8"))
    assert Path(params["prepare"]["source"]["path"]).samefile(images)


def test_a_newline_in_the_path_stays_in_its_line(repository, tmp_path):
    """A folder's name cannot write parameters of its own."""
    images = tmp_path / "photos\ngate: {min_top1: 0}"
    _images(tmp_path / "plain").rename(images)
    made, _ = init_workspace(repository, "hostile", images)
    params = yaml.safe_load((made.path / "params.yaml").read_text(encoding="utf-8"))
    assert params["prepare"]["source"]["path"] == str(images)
    assert params["gate"] == {"min_top1": 0.9}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (b"images/class 0/caf\xe9.png", r"caf\xe9.png"),
        (b"images/class \xe9/1.png", r"class \xe9"),
        (b"imag\xe9s/class 0/1.png", r"imag\xe9s"),
    ],
    ids=["file", "class folder", "source folder"],
)
def test_names_that_are_not_utf8_are_refused(repository, tmp_path, place, said):
    """DVC crashes on them at the first build: `init` names the file, escaped, and makes no workspace."""
    _images(tmp_path / "images")
    file = tmp_path / os.fsdecode(place)
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tmp_path / "images" / "class 1" / "ü 0.png", file)
    source = file.parents[1]
    with pytest.raises(UserError) as refused:
        init_workspace(repository, "mine", source)
    assert said in refused.value.got
    str(refused.value).encode("utf-8")  # it can be printed
    assert not (repository / "workspaces").exists()


@pytest.mark.parametrize(
    ("leads_to", "reason"), [(None, "pipe"), ("nowhere", "leads nowhere"), ("odd", "Too many levels")]
)
def test_what_dvc_cannot_hash_is_refused(repository, tmp_path, leads_to, reason):
    """DVC would wait at a pipe for ever, and crash at a link to nothing or to itself."""
    images = _images(tmp_path / "images")
    odd = images / "class 0" / "odd"
    odd.symlink_to(leads_to) if leads_to else os.mkfifo(odd)
    with pytest.raises(UserError, match=f"class 0/odd.*{reason}"):
        init_workspace(repository, "mine", images)


@pytest.mark.parametrize("leads_to", [None, "odd"], ids=["pipe", "link to itself"])
def test_a_source_that_is_neither_folder_nor_file_is_refused(repository, tmp_path, leads_to):
    """Nothing hangs and nothing crashes on it."""
    odd = tmp_path / "odd"
    odd.symlink_to(leads_to) if leads_to else os.mkfifo(odd)
    with pytest.raises(UserError, match="odd"):
        init_workspace(repository, "mine", odd)


def test_a_folder_of_links_is_accepted(repository, tmp_path):
    """Links to files and folders inside are images as others are."""
    images = _images(tmp_path / "images")
    (images / "class 0" / "again.png").symlink_to("ü 0.png")
    (images / "class 0" / "loop").symlink_to("../class 0")
    made, found = init_workspace(repository, "mine", images)
    assert found.images_count == 7
    assert made.path.is_dir()


def test_a_tar_may_hold_names_in_any_encoding(repository, tmp_path):
    """DVC hashes the archive; `prepare` reads the names inside."""
    images = _images(tmp_path / "images")
    with tarfile.open(tmp_path / "images.tar", "w", encoding="latin-1") as archive:
        archive.add(images, "images")
    made, found = init_workspace(repository, "mine", tmp_path / "images.tar")
    assert found.images_count == 6
    assert made.path.is_dir()


def _named_only(folder: Path, splits: dict[str, int]) -> Path:
    """So many images a class in each split; the same picture under many names, which only `prepare` sees."""
    picture = _images(folder.with_name("one"), each=1) / "class 0" / "ü 0.png"
    for split, count in splits.items():
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                (folder / split / label / f"{number}.png").hardlink_to(picture)
    return folder


@pytest.mark.parametrize(
    ("splits", "expected", "least"),
    [
        ({"": 150}, {"train": 110, "val": 30, "calibration": 100, "test": 60}, None),
        ({"": 140}, {"train": 131, "val": 28, "calibration": 65, "test": 56}, 65),
        ({"": 6}, {"train": 6, "val": 1, "calibration": 3, "test": 2}, 3),
        ({"train": 20, "test": 10, "val": 5}, {"train": 27, "val": 10, "calibration": 13, "test": 20}, 13),
    ],
    ids=str,
)
def test_small_sets_are_divided_as_they_allow(repository, tmp_path, splits, expected, least):
    """The splits are told at once; where min_images asks too much it is lowered, and that is said."""
    made, found = init_workspace(repository, "mine", _named_only(tmp_path / "images", splits))
    assert found.forecast.splits == expected
    params = yaml.safe_load((made.path / "params.yaml").read_text(encoding="utf-8"))
    assert params["prepare"].get("calibration") == (least and {"min_images": least})
    notes = found.forecast.notes()
    few = f"{expected['calibration']} calibration images"
    assert any(note.startswith(few) for note in notes) is bool(least)
    assert any(f"min_images is set to {least}:" in note for note in notes) is bool(least)
    assert any(note.startswith(f"{expected['test']} test images: a top-1 of 90%") for note in notes)
    assert any(note.startswith("2 classes with fewer than 20") for note in notes) is (expected["train"] < 40)


@pytest.mark.parametrize("count", [30, 120])
def test_the_splits_that_are_told_are_those_that_come_out(repository, tmp_path, count, monkeypatch):
    """`prepare` with the parameters written divides as `init` said, and does not stop."""
    made, found = init_workspace(repository, "mine", _images(tmp_path / "images", each=count, side=32))
    monkeypatch.chdir(made.path)
    report = prepare(load_params("prepare", PrepareParams))
    assert {name: report[f"{name}_images_count"] for name in found.forecast.splits} == found.forecast.splits


def test_what_cannot_be_divided_is_refused(repository, tmp_path):
    """Four images give no validation set: nothing is made."""
    with pytest.raises(UserError, match="no images in val"):
        init_workspace(repository, "mine", _images(tmp_path / "images", each=2))
    assert not (repository / "workspaces").exists()


def test_our_own_weights_are_offered_and_fit(repository, tmp_path, monkeypatch):
    """Without the `#` the lines name a file of the repository that loads into the default architecture."""
    golden = ROOT / "models" / "golden"
    (repository / "models").mkdir()
    (repository / "models" / "golden").symlink_to(golden)
    made, _ = init_workspace(repository, "mine", _images(tmp_path / "images"))
    path = made.path / "params.yaml"
    text = path.read_text(encoding="utf-8")
    assert "init" not in yaml.safe_load(text)["train"]
    path.write_text(re.sub(r"^#(  +\w+:)", r"\1", text, flags=re.MULTILINE), encoding="utf-8")
    monkeypatch.chdir(made.path)
    params = load_params("train", TrainParams)
    model = Architecture(name=params.architecture, num_classes=2, activation=params.activation).build()
    loaded = load_matching(model, read_state(params.init), origin="golden")
    assert (loaded.loaded_count > 200, loaded.fresh_count) == (True, 2)
