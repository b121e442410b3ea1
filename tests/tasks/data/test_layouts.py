"""Class folders and split lists become labelled entries; what fits neither is listed with its reason."""

import re
from pathlib import Path

import pytest

from fleet.device.errors import UserError
from tasks.data.layouts import class_folders, split_lists
from tasks.data.trees import Tree

CLASSES = (
    "Class Name (str),Class ID (int),Coarse Class Name (str),Coarse Class ID (int),Iconic Image Path (str)\n"
    "Pink-Lady,0,Apple,0,/icons/Pink-Lady.jpg\n"
    "Royal-Gala,1,Apple,0,/icons/Royal-Gala.jpg\n"
    "Lime,2,Lime,1,/icons/Lime.jpg\n"
)


def _tree(*names: str, folders: tuple[str, ...] = (), **texts: str) -> Tree:
    files = dict.fromkeys(names, lambda: b"pixels")
    for name, text in texts.items():
        files[name.replace("_", ".")] = lambda text=text: text.encode()
    parents = {str(p) for name in files for p in Path(name).parents if str(p) != "."}
    return Tree(Path("set"), files, parents | set(folders))


def _labels(listing) -> dict[str, tuple[str | None, str | None]]:
    return {entry.name: (entry.split, entry.label) for entry in listing.entries}


def _refused(listing) -> dict[str, str]:
    return {refusal.name: refusal.kind for refusal in listing.refusals}


def test_class_folders_without_splits():
    """The first folder is the class, however deep the image lies in it."""
    listing = class_folders(_tree("dog/1.jpg", "cat/2020/summer/2.jpg"))
    assert _labels(listing) == {"dog/1.jpg": (None, "dog"), "cat/2020/summer/2.jpg": (None, "cat")}
    assert listing.class_names == ("cat", "dog")


def test_split_folders():
    """train, validation, val, test, calibration, field and field_test are splits."""
    tree = _tree("train/a/1", "validation/a/2", "test/b/3", "calibration/a/4", "field/5", "field_test/b/6")
    assert _labels(class_folders(tree)) == {
        "train/a/1": ("train", "a"),
        "validation/a/2": ("val", "a"),
        "test/b/3": ("test", "b"),
        "calibration/a/4": ("calibration", "a"),
        "field/5": ("field", None),
        "field_test/b/6": ("field_test", "b"),
    }


@pytest.mark.parametrize("wrapper", ["mydata/", "export/v2/", "train-set/"])
def test_wrapping_folders_are_looked_through(wrapper):
    """Archives usually wrap everything in one folder, with a README beside the classes."""
    listing = class_folders(_tree(f"{wrapper}dog/1", f"{wrapper}cat/2", f"{wrapper}README.md"))
    assert listing.class_names == ("cat", "dog")
    assert _refused(listing) == {f"{wrapper}README.md": "outside_class"}


def test_a_lone_split_or_class_is_no_wrapper():
    """`train/` alone keeps its meaning, and a single class stays a class."""
    assert _labels(class_folders(_tree("train/a/1", "train/b/2")))["train/a/1"] == ("train", "a")
    assert class_folders(_tree("dog/1", "dog/2")).class_names == ("dog",)


def test_a_class_may_be_called_train():
    """Among other classes `train` is the vehicle."""
    listing = class_folders(_tree("train/1", "car/2", "plane/3"))
    assert listing.class_names == ("car", "plane", "train")


def test_mixed_top_level_is_refused():
    """Split folders beside others: guessing would lose the others unsaid."""
    with pytest.raises(UserError, match="split folders beside others: icons"):
        class_folders(_tree("train/a/1", "test/a/2", "icons/a/3"))


def test_system_files_are_hidden_and_said_so():
    """What operating systems leave behind is no broken image."""
    listing = class_folders(_tree("a/1", "a/.DS_Store", "a/Thumbs.db", "__MACOSX/a/._1", "b/2"))
    assert _refused(listing) == dict.fromkeys(("a/.DS_Store", "a/Thumbs.db", "__MACOSX/a/._1"), "hidden_file")
    assert listing.class_names == ("a", "b")


def test_empty_class_folder_is_a_class_of_the_source():
    """So that prepare can say that nothing is in it."""
    assert class_folders(_tree("a/1", "b/2", folders=("c",))).class_names == ("a", "b", "c")


def test_one_name_in_two_encodings_is_one_class():
    """macOS writes a letter and its accent apart: the class is the same."""
    composed, apart = "caf\u00e9", "cafe\u0301"
    listing = class_folders(_tree(f"train/{composed}/1", f"test/{apart}/2"))
    assert listing.class_names == (composed,)


def test_hostile_names_become_one_line_of_text():
    """Control characters, undecodable bytes and direction marks are escaped wherever a name is shown."""
    listing = class_folders(_tree("a/x\n.png", "a/caf\udce9.png", "b/\u202egnp.png", "b/\u82f9\u679c.png"))
    names = [entry.name for entry in listing.entries]
    assert names == ["a/x\\n.png", "a/caf\\udce9.png", "b/\\u202egnp.png", "b/\u82f9\u679c.png"]


@pytest.mark.parametrize(
    ("pattern", "group"), [(r"(person\d+)_", "person7"), (r"person\d+", "person7"), ("zebra", "")]
)
def test_groups_are_found_in_the_path(pattern, group):
    """The first parenthesis, or the whole match; empty where there is none."""
    (entry,) = class_folders(_tree("a/person7_3.png"), re.compile(pattern)).entries
    assert entry.group == group


def test_split_lists_fine_and_coarse():
    """Lines are path, fine id, coarse id; either id is the label, in the order of the ids."""
    files = ("train/1.jpg", "test/2.jpg", "val/3.jpg")
    lists = {
        "train_txt": "train/1.jpg, 1, 0\n",
        "test_txt": "test/2.jpg, 2, 1\n",
        "val_txt": "val/3.jpg, 0, 0\n\n",
        "classes_csv": CLASSES,
    }
    fine = split_lists(_tree(*files, **lists), level="fine", iconic=False)
    assert fine.class_names == ("Pink-Lady", "Royal-Gala", "Lime")
    assert _labels(fine) == {
        "train/1.jpg": ("train", "Royal-Gala"),
        "test/2.jpg": ("test", "Lime"),
        "val/3.jpg": ("val", "Pink-Lady"),
    }
    coarse = split_lists(_tree(*files, **lists), level="coarse", iconic=False)
    assert coarse.class_names == ("Apple", "Lime")
    assert _labels(coarse)["test/2.jpg"] == ("test", "Lime")


def test_iconic_pictures_are_field_images():
    """One product picture a class, of another domain; a missing one is named."""
    tree = _tree(
        "1.jpg", "icons/Lime.jpg", "icons/Pink-Lady.jpg", train_txt="1.jpg,0,0\n", classes_csv=CLASSES
    )
    listing = split_lists(tree, level="fine", iconic=True)
    assert _labels(listing)["icons/Lime.jpg"] == ("field", "Lime")
    assert _refused(listing) == {"/icons/Royal-Gala.jpg": "missing_file"}


def test_bad_lines_are_refused_with_their_number():
    """A broken line costs itself only."""
    lines = (
        "1.jpg, 0, 0",
        "2.jpg, one, 0",
        "3.jpg",
        "../../etc/passwd, 0, 0",
        "4.jpg, 9, 0",
        "gone.jpg, 1, 0",
    )
    text = "\n".join((*lines, "5.jpg, 2, 1"))
    tree = _tree(*(f"{n}.jpg" for n in range(1, 6)), train_txt=text, classes_csv=CLASSES)
    listing = split_lists(tree, level="fine", iconic=False)
    assert set(_labels(listing)) == {"1.jpg", "5.jpg"}
    assert [(r.name, r.kind, r.reason.split(":")[0]) for r in listing.refusals] == [
        ("2.jpg, one, 0", "bad_line", "train.txt line 2"),
        ("3.jpg", "bad_line", "train.txt line 3"),
        ("../../etc/passwd", "missing_file", "train.txt line 4"),
        ("4.jpg", "bad_line", "train.txt line 5"),
        ("gone.jpg", "missing_file", "train.txt line 6"),
    ]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"classes_csv": CLASSES}, "no train.txt"),
        ({"train_txt": "1.jpg,0,0\n"}, "no classes.csv"),
        ({"train_txt": "1.jpg,0,0\n", "classes_csv": "name,id\nx,0\n"}, "classes.csv"),
        ({"train_txt": "1.jpg,0,0\n", "classes_csv": ""}, "classes.csv"),
        ({"train_txt": "1.jpg,0,0\n", "classes_csv": CLASSES.replace(",2,Lime", ",two,Lime")}, "classes.csv"),
    ],
)
def test_missing_or_foreign_lists_are_refused(texts, said):
    """Without its lists the set cannot be read: the file is named."""
    with pytest.raises(UserError, match=re.escape(said)):
        split_lists(_tree("1.jpg", **texts), level="fine", iconic=False)
