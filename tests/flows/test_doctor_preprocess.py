"""`edgeloop doctor --preprocess` from the command line: models, cards, records and folders, good and bad."""

import hashlib
import json
from dataclasses import replace

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from flows.cli import main
from flows.doctor.model import find_model, open_model
from tasks.mnn.converter import convert
from tasks.mnn.picture_folder import read_folder
from tasks.workspace import Workspace

RIGHT = Preprocess(size_px=8, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
LABELS = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model that tells which colour is strongest, its card, and 60 noisy pictures, 20 of each colour."""
    folder = tmp_path_factory.mktemp("colours")
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Conv", ["mean", "w", "b"], ["scores"]),
        helper.make_node("Flatten", ["scores"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1) * 4, "w"),
        numpy_helper.from_array(np.zeros(3, np.float32), "b"),
    ]
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", [1, 3, 8, 8]), ("y", [1, 3]))
    ]
    graph = helper.make_graph(nodes, "colours", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "m.onnx")
    convert(folder / "m.onnx", folder / "model.mnn")
    card = {
        "labels": LABELS,
        "preprocess": RIGHT.to_dict(),
        "mnn_sha256": hashlib.sha256((folder / "model.mnn").read_bytes()).hexdigest(),
    }
    (folder / "card.json").write_text(json.dumps(card), encoding="utf-8")
    rng = np.random.default_rng(0)
    for index, name in enumerate(LABELS):
        (folder / "images" / name).mkdir(parents=True)
        for n in range(20):
            picture = rng.integers(60, 190, (16, 24, 3), np.uint8)
            picture[..., index] = np.minimum(picture[..., index].astype(int) + 8 + n, 255)
            cv2.imwrite(str(folder / "images" / name / f"{n}.png"), picture[..., ::-1])
    return folder


def doctor(capsys, *words):
    """Exit code and what was printed."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, words)])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def record(tmp_path, **changes):
    """A record file that differs from the right one."""
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RIGHT.to_dict() | changes), encoding="utf-8")
    return path


def test_the_right_record_is_confirmed(place, tmp_path, capsys):
    """Exit 0, and the card's word that nothing else was trained with."""
    words = ("--preprocess", place / "images", "--model", place / "model.mnn", "--json")
    code, out, _ = doctor(capsys, *words, "--record", record(tmp_path))
    told = json.loads(out)
    assert (code, told["verdict"], told["ok"]) == (0, "fits", True)
    assert told["preprocess"]["images"] == 60
    assert told["preprocess"]["suits_record"] == RIGHT.to_dict()


def test_a_wrong_record_is_named_with_what_it_costs(place, tmp_path, capsys):
    """Exit 2; the mismatch, both accuracies, an interval, n, and how to mend it."""
    wrong = record(tmp_path, color_order="BGR")
    code, out, _ = doctor(
        capsys, "--preprocess", place / "images", "--model", place / "model.mnn", "--record", wrong
    )
    assert code == 2
    assert f"{wrong} is not what the model was trained with: colour order BGR instead of RGB" in out
    assert "mismatch: the model wants colour order RGB instead of BGR" in out
    assert "of 60 images right" in out
    assert "hand the channels over in that order" in out
    assert "colour order  " in out.split("What a single difference costs")[1]


def test_a_record_for_another_input_is_told_before_anything_is_measured(place, tmp_path, capsys):
    """Size, axes, and a mean of 0..255, which no picture is needed for."""
    wrong = record(tmp_path, size_px=16, layout="NHWC", mean=[127.5] * 3, std=[63.75] * 3)
    code, out, _ = doctor(
        capsys, "--preprocess", place / "images", "--model", place / "model.mnn", "--record", wrong
    )
    assert code == 2
    assert "says 16 px NHWC, but the model takes 8 px NCHW" in out
    assert "look like those of pixels of 0..255" in out


def test_images_without_classes_give_no_verdict(place, tmp_path, capsys):
    """Neither does a folder whose names the model does not know; a difference to the card stays a fact."""
    other = tmp_path / "images" / "purple"
    other.mkdir(parents=True)
    for n in range(5):
        (other / f"{n}.png").write_bytes((place / "images" / "red" / f"{n}.png").read_bytes())
    code, out, _ = doctor(
        capsys, "--preprocess", tmp_path / "images", "--model", place / "model.mnn", "--json"
    )
    told = json.loads(out)
    assert (code, told["verdict"]) == (0, "cannot tell")
    images = next(f for f in told["findings"] if f["check"] == "images")
    assert "purple" in images["found"]
    assert "red, green, blue" in images["found"]
    code, _, _ = doctor(
        capsys, "--preprocess", other, "--model", place / "model.mnn",
        "--record", record(tmp_path, color_order="BGR"),
    )  # fmt: skip
    assert code == 2


def test_a_card_of_other_bytes_is_not_believed(place, tmp_path, capsys):
    """Its labels still name the folders, and a warning says why it counts no further."""
    (tmp_path / "model.mnn").write_bytes((place / "model.mnn").read_bytes())
    card = json.loads((place / "card.json").read_text(encoding="utf-8"))
    (tmp_path / "card.json").write_text(json.dumps(card | {"mnn_sha256": "0" * 64}), encoding="utf-8")
    opened = open_model(tmp_path / "model.mnn", None)
    assert opened.trained is None
    assert opened.card.labels == tuple(LABELS)
    for text in ("{torn", "[]", '{"preprocess": 3}', '{"preprocess": {"size_px": "8"}}'):
        (tmp_path / "card.json").write_text(text, encoding="utf-8")
        opened = open_model(tmp_path / "model.mnn", None)
        assert opened.trained is None
        assert opened.card.doubt
    _, out, _ = doctor(capsys, "--preprocess", place / "images", "--model", tmp_path / "model.mnn")
    assert "is not believed" in out


def test_a_model_without_a_card_takes_folders_in_alphabetical_order(place):
    """As training tools do; or as indices; and says what it took. Other folders give no labels."""
    images = read_folder(place / "images", None, 3, 10)
    assert "alphabetical" in images.note
    assert len(images.pictures) == 10
    first = [path.parent.name for path in images.pictures.paths[:3]]
    assert (first, images.labels[:3]) == (["blue", "green", "red"], (0, 1, 2))
    assert read_folder(place / "images", None, 4, 10).labels is None
    assert "3 folders" in read_folder(place / "images", None, 4, 10).unlabelled_because


def test_numbered_folders_are_class_indices(place, tmp_path):
    """Folder 7 is class 7 of 1000, whatever else is there."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "a.png").write_bytes((place / "images" / "red" / "0.png").read_bytes())
    assert read_folder(tmp_path, None, 1000, 10).labels == (7,)


def test_files_that_are_no_images_are_left_out_and_counted(place, tmp_path):
    """An empty file, noise with a picture's name, and a text; one usable picture is enough to go on."""
    folder = tmp_path / "red"
    folder.mkdir()
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "noise.jpg").write_bytes(bytes(range(256)) * 10)
    (folder / "notes.txt").write_text("no picture", encoding="utf-8")
    with pytest.raises(UserError, match="none of the 2 image files"):
        read_folder(tmp_path, LABELS, 3, 10)
    (folder / "a.png").write_bytes((place / "images" / "red" / "0.png").read_bytes())
    found = read_folder(tmp_path, LABELS, 3, 10)
    assert found.skipped == {"empty": 1, "not_an_image": 1}
    assert found.labels == (0,)


@pytest.mark.parametrize(
    ("name", "words"), [("gone", "not there"), ("empty", "holds no images"), ("file", "no folder")]
)
def test_a_folder_that_is_none_is_a_user_error(tmp_path, name, words):
    """Missing, empty, or a file."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_folder(tmp_path / name, None, 3, 10)


def test_what_is_no_model_is_an_error(place, tmp_path, capsys):
    """Noise, nothing of that name, and options without --preprocess."""
    (tmp_path / "noise.mnn").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(EngineError, match=r"noise\.mnn"):
        open_model(tmp_path / "noise.mnn", None)
    with pytest.raises(UserError, match="none yet"):
        find_model(Workspace(name="digits", path=tmp_path, repository=tmp_path), None)
    code, _, err = doctor(capsys, "--record", tmp_path / "noise.mnn")
    assert code == 2
    assert "--record without --preprocess" in err


def test_the_best_variant_is_the_most_accurate_then_the_smallest(tmp_path):
    """By the workspace's parity report; a variant can be named, too."""
    workspace = Workspace(name="shoes", path=tmp_path, repository=tmp_path)
    for name, size in (("a", 30), ("b", 20), ("c", 10)):
        (tmp_path / "models" / "mnn" / name).mkdir(parents=True)
        (tmp_path / "models" / "mnn" / name / "model.mnn").write_bytes(b"x" * size)
    (tmp_path / "reports").mkdir()
    top1 = {"a/top1": 0.9, "b/top1": 0.9, "c/top1": 0.8}
    (tmp_path / "reports" / "parity.json").write_text(json.dumps(top1), encoding="utf-8")
    assert find_model(workspace, None).parent.name == "b"
    assert find_model(workspace, "c").parent.name == "c"


def _dumped(place, tmp_path, preprocess):
    """An image, and the input that an app with this preprocessing makes of it, as .npy."""
    image = place / "images" / "red" / "0.png"
    np.save(tmp_path / "input.npy", preprocess.apply(cv2.imread(str(image))[..., ::-1]))
    return image, tmp_path / "input.npy"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "is what"),
        ({"color_order": "BGR"}, "colour order BGR instead of RGB"),
        ({"mean": (0.0,) * 3, "std": (1.0,) * 3}, "0..1 without mean and std instead of"),
    ],
)
def test_one_dumped_input_tells_what_the_app_did(place, tmp_path, capsys, changes, said):
    """Against the model's card, without running the model."""
    image, dumped = _dumped(place, tmp_path, replace(RIGHT, **changes))
    words = ("--preprocess", image, "--tensor", dumped, "--model", place / "model.mnn", "--json")
    ended, out, _ = doctor(capsys, *words)
    (finding,) = json.loads(out)["findings"]
    assert ended == (2 if changes else 0)
    assert said in finding["found"]


def test_an_input_of_another_image_names_nothing(place, tmp_path, capsys):
    """Whatever the app did, it was not this picture."""
    _, dumped = _dumped(place, tmp_path, RIGHT)
    other = place / "images" / "blue" / "7.png"
    words = ("--preprocess", other, "--tensor", dumped, "--model", place / "model.mnn")
    code, out, _ = doctor(capsys, *words)
    assert code == 0
    assert "unknown preprocessing" in out


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00v\x00{"])
def test_a_dump_that_is_no_array_is_one_error(place, tmp_path, capsys, content):
    """Exit 2, with what is wanted; nothing of it is unpickled."""
    image, dumped = _dumped(place, tmp_path, RIGHT)
    dumped.write_bytes(content)
    words = ("--preprocess", image, "--tensor", dumped, "--model", place / "model.mnn")
    code, _, err = doctor(capsys, *words)
    assert code == 2
    assert "as NumPy writes it, .npy" in err
