"""`edgeloop init`: a workspace for someone's own images, or one clear error."""

import os
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
    assert not params["gate"]  # not the digits' accuracy floor
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
    assert not params["gate"]


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
