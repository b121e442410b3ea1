"""Folders and archives are listed without following anything out of them, and nothing is dropped unsaid."""

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from fleet.device.errors import UserError
from tasks.data.trees import Tree, read_folder, read_tar


def _tar(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def _refused(tree: Tree) -> dict[str, str]:
    return {refusal.name: refusal.kind for refusal in tree.refusals}


def test_folder_is_listed_by_name(tmp_path):
    """Files come in the order of their names, wherever the disk keeps them; empty folders are known."""
    for name in ("b/2.png", "b/1.png", "a/x/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "empty").mkdir()
    tree = read_folder(tmp_path)
    assert list(tree.files) == ["a/x/3.png", "b/1.png", "b/2.png"]
    assert tree.files["b/1.png"]() == b"b/1.png"
    assert tree.folders == {"a", "a/x", "b", "empty"}
    assert tree.refusals == []


def test_links_are_followed_inside_the_folder_only(tmp_path):
    """A link to a file inside is that file; outwards, in a loop, to nothing, to a folder: refused."""
    root = tmp_path / "set"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"key")
    (root / "a" / "real").write_bytes(b"picture")
    (root / "a" / "inside").symlink_to("real")
    (root / "a" / "outside").symlink_to(tmp_path / "secret")
    (root / "a" / "loop").symlink_to("loop")
    (root / "a" / "dangling").symlink_to("nowhere")
    (root / "up").symlink_to(root)
    tree = read_folder(root)
    assert set(tree.files) == {"a/real", "a/inside"}
    assert tree.files["a/inside"]() == b"picture"
    assert _refused(tree) == {"a/outside": "link", "a/loop": "link", "a/dangling": "link", "up": "link"}


def test_the_folder_itself_may_be_a_link(tmp_path):
    """People link their data into place."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "x").write_bytes(b"1")
    (tmp_path / "set").symlink_to(tmp_path / "disk")
    assert list(read_folder(tmp_path / "set").files) == ["x"]


def test_a_pipe_does_not_hang(tmp_path):
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe.jpg")
    assert _refused(read_folder(tmp_path)) == {"pipe.jpg": "special_file"}


def test_undecodable_and_multiline_names_are_kept(tmp_path):
    """Names are bytes to the disk: such files are still read, and printable where named."""
    raw = os.fsencode(tmp_path) + b"/caf\xe9\n.png"
    Path(os.fsdecode(raw)).write_bytes(b"x")
    ((name, read),) = read_folder(tmp_path).files.items()
    assert os.fsencode(name) == b"caf\xe9\n.png"
    assert read() == b"x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unlistable_folder_is_refused_by_name(tmp_path):
    """A class without permission is reported, not an empty class."""
    (tmp_path / "locked").mkdir(mode=0)
    assert _refused(read_folder(tmp_path)) == {"locked": "unreadable"}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tar_is_read_in_archive_order(tmp_path, mode):
    """Compressed archives dislike jumping, so the order stays; `./` prefixes go."""
    path = _tar(tmp_path / "set.tar", [(_member("./b/1"), b"one"), (_member("a/2"), b"two")], mode)
    tree = read_tar(path)
    assert [(name, read()) for name, read in tree.files.items()] == [("b/1", b"one"), ("a/2", b"two")]
    assert tree.folders == {"a", "b"}


@pytest.mark.parametrize(
    ("member", "kind"),
    [
        (_member("../x.png"), "unsafe_name"),
        (_member("a/../../x.png"), "unsafe_name"),
        (_member("/etc/passwd"), "unsafe_name"),
        (_member("C:\\x.png"), "unsafe_name"),
        (_member("..\\x.png"), "unsafe_name"),
        (_member("a/link", tarfile.SYMTYPE, "/etc/passwd"), "link"),
        (_member("a/hard", tarfile.LNKTYPE, "../../etc/shadow"), "link"),
        (_member("a/device", tarfile.CHRTYPE), "special_file"),
        (_member("a/pipe", tarfile.FIFOTYPE), "special_file"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_hostile_member_is_refused_and_the_rest_is_read(tmp_path, member, kind):
    """Names that lead elsewhere, links and devices: refused by name; nothing is written anywhere."""
    box = tmp_path / "box"
    box.mkdir()
    path = _tar(box / "set.tar", [(_member("a/1"), b"one"), (member, b""), (_member("a/2"), b"two")])
    tree = read_tar(path)
    assert list(tree.files) == ["a/1", "a/2"]
    assert tree.files["a/2"]() == b"two"
    assert [refusal.kind for refusal in tree.refusals] == [kind]
    assert list(box.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == [box]


def test_the_last_of_one_name_stays(tmp_path):
    """As when extracting: an archive that was appended to holds the newer file last."""
    path = _tar(tmp_path / "set.tar", [(_member("a/1"), b"old"), (_member("a/1"), b"new")])
    tree = read_tar(path)
    assert tree.files["a/1"]() == b"new"
    assert _refused(tree) == {"a/1": "superseded"}


@pytest.mark.parametrize("keep", [512, 700, 1024, 1500, 2048])
def test_cut_off_tar_is_refused(tmp_path, keep):
    """A download that broke off is an error at whatever byte, not a smaller dataset."""
    path = _tar(tmp_path / "set.tar", [(_member("a/1"), b"1" * 512), (_member("a/2"), b"2" * 512)])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"set\.tar"):
        read_tar(path)


def test_damaged_header_is_refused(tmp_path):
    """tarfile takes a broken header for the end of the archive and would lose what follows."""
    path = _tar(tmp_path / "set.tar", [(_member("a/1"), b"1" * 512), (_member("a/2"), b"2" * 512)])
    data = bytearray(path.read_bytes())
    data[1024 + 148] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="no end marker after 1 files"):
        read_tar(path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 no tar at all", b"\x1f\x8b broken gzip"])
def test_what_is_no_tar_is_refused(tmp_path, data):
    """A zip, an empty file, a broken gzip: one error that names the file."""
    (tmp_path / "set.tar").write_bytes(data)
    with pytest.raises(UserError, match=r"set\.tar"):
        read_tar(tmp_path / "set.tar")


@pytest.mark.parametrize("read", [read_folder, read_tar])
def test_missing_source_says_what_to_do(tmp_path, read):
    """The commonest error: the images are elsewhere."""
    with pytest.raises(UserError, match="is not there") as caught:
        read(tmp_path / "nowhere")
    assert "prepare.source" in caught.value.next_step


def test_wrong_kind_of_source_is_named(tmp_path):
    """A tar given as a folder, a folder given as a tar."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="is not a folder of images"):
        read_folder(tmp_path / "file")
    with pytest.raises(UserError, match="is not a tar archive"):
        read_tar(tmp_path)
