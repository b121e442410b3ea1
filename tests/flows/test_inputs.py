"""What is wrong with a workspace is said before DVC starts: what was got, what is allowed, what to do."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from fleet.device.errors import UserError
from flows.inputs import SectionCheck, check_workspace, section_problems, stage_names
from tasks.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workspace(tmp_path):
    """A workspace of its own in a repository with the root's graph and parameters."""
    folder = tmp_path / "workspaces" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (folder / "dvc.yaml").symlink_to("../../dvc.yaml")
    (folder / "images").mkdir()
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params |= {"root": "../..", "prepare": {"source": {"kind": "folder", "path": "images"}}}
    params["prepare"]["stored_size_px"] = 32
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    return Workspace(name="mine", path=folder, repository=tmp_path)


def _edit(workspace: Workspace, old: str, new: str) -> None:
    path = workspace.path / "params.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_sound_workspace_has_no_problems(workspace):
    """The graph's stages are read from dvc.yaml, the matrix ones by their plain names."""
    check_workspace(workspace)
    assert stage_names(workspace)[0] == "prepare"
    assert "benchmark" in stage_names(workspace)


@pytest.mark.parametrize(
    ("old", "new", "got", "next_step"),
    [
        ("quantize:", "quantise:", "`quantise` that no stage reads, but none `quantize`", "call `quantise`"),
        ("parity: {}", "", "no section `parity`", "copy `parity`"),
        ("parity: {}", "parity: {}\nextra: {}", "`extra`", "remove `extra`"),
        ("root: ../..", "root: ../nowhere", "root is '../nowhere'", "root: ../.."),
        ("root: ../..", "root: [1]", "root is [1]", "root: ../.."),
        ("root: ../..", "", "no section `root`", "copy `root`"),
        ("devices:\n- local", "devices: local", "devices is 'local'", "devices: [local]"),
        ("devices:\n- local", "devices: []", "devices is []", "devices: [local]"),
        ("devices:\n- local", "devices: [local, phone]", "phone", "devices: [local]"),
        ("devices:\n- local", "devices: [[1]]", "devices is [[1]]", "devices: [local]"),
        ("gate:", "gate:\n  devices: [phone]", "gate.devices is ['phone']", "leave gate.devices away"),
        ("path: images", "path: none.tar", "are not at", "put them there"),
        ("path: images", 'path: "im\\udcffages"', r"im\xffages", "rename"),
        ("path: images", 'path: "im\\ud800ages"', r"im\ud800ages", "rename"),
        ("path: images", "path: 3", "prepare.source.path is 3", "own-images.md"),
        ("prepare:", "prepare: 3\nold:", "prepare.source.path is None", "own-images.md"),
        ("root: ../..", "root: [", "params.yaml", "mend the line"),
        ("root: ../..", "root: 2026-99-99", "month must be", "mend the line"),
    ],
)
def test_what_is_wrong_is_said_with_a_next_step(workspace, old, new, got, next_step):
    """Each of these once ended in `dvc ended with exit code 255`, a traceback, or an hour later."""
    _edit(workspace, old, new)
    with pytest.raises(UserError) as refused:
        check_workspace(workspace)
    assert got in refused.value.got
    assert next_step in refused.value.next_step
    assert refused.value.allowed
    str(refused.value).encode("utf-8")


@pytest.mark.parametrize("content", [None, b"- 1\n", b"", b"\xff\xfe", "folder"], ids=str)
def test_a_params_file_that_is_none_is_refused(workspace, content):
    """Missing, a list, empty, no UTF-8, a folder."""
    path = workspace.path / "params.yaml"
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"params\.yaml"):
        check_workspace(workspace)


@pytest.mark.parametrize("content", [None, "stages: [", "other: 1", "[]"], ids=str)
def test_a_graph_that_is_none_is_refused(workspace, content):
    """A workspace without its link to the graph gets the command that makes it."""
    (workspace.path / "dvc.yaml").unlink()
    if content:
        (workspace.path / "dvc.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        check_workspace(workspace)
    assert "dvc.yaml" in refused.value.got
    assert "ln -sf ../../dvc.yaml" in refused.value.next_step


@pytest.mark.parametrize("name", [b"a\xff.png", b"class\xff/a.png"], ids=str)
def test_a_file_whose_name_is_not_utf8_is_named(workspace, name):
    """Put into the source after `init`: DVC would crash without naming it."""
    path = workspace.path / "images" / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(UserError, match=r"\\xff"):
        check_workspace(workspace)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("pipe", "is a pipe"), ("link", "images: Too many levels"), ("name", "File name too long")],
)
def test_a_source_that_is_neither_folder_nor_file_is_refused(workspace, kind, said):
    """DVC would wait at a pipe for ever; a link to itself and a name that cannot be one are not there."""
    source = workspace.path / "images"
    source.rmdir()
    if kind == "pipe":
        os.mkfifo(source)
    elif kind == "link":
        source.symlink_to("images")
    else:
        _edit(workspace, "path: images", f"path: {'x' * 300}")
    with pytest.raises(UserError, match=said):
        check_workspace(workspace)


def test_all_that_is_wrong_is_said_at_once(workspace):
    """Two mistakes are one error, not two builds."""
    _edit(workspace, "root: ../..", "root: x")
    _edit(workspace, "path: images", "path: nowhere")
    with pytest.raises(UserError) as refused:
        check_workspace(workspace)
    assert "root is 'x'" in refused.value.got
    assert "nowhere" in refused.value.got


def test_the_sections_of_stages_that_are_due_are_checked(workspace):
    """Only what is asked for is imported; a matrix stage goes by its plain name."""
    _edit(workspace, "gate:\n  min_top1", "gate:\n  min_topp1")
    assert section_problems(workspace.path, ["probe", "benchmark"]) == []
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    with (
        SectionCheck(workspace, ["gate", "benchmark@local"], env) as check,
        pytest.raises(UserError, match=r"gate\.min_topp1") as refused,
    ):
        check.require()
    assert "GateParams" in refused.value.allowed
    with SectionCheck(workspace, ["benchmark@local"], env) as check:
        check.require()


def test_stages_that_cannot_be_imported_are_an_error_of_the_environment(workspace):
    """The child's traceback becomes one line and `make setup`."""
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    with (
        SectionCheck(workspace, ["no_such_stage"], env) as check,
        pytest.raises(UserError, match="no_such_stage") as refused,
    ):
        check.require()
    assert "make setup" in refused.value.next_step


def test_a_check_that_nobody_waits_for_leaves_no_child(workspace):
    """A build that ends before the answer does not leave the child behind."""
    with SectionCheck(workspace, ["train"], {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}) as check:
        child = check._child
    assert child.poll() is not None
    assert sys.executable in child.args
