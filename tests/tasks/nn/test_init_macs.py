"""Initial weights are loaded whole or refused; the size of a model is counted the published way."""

import hashlib
import pickle
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.nn.arch import Architecture
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.init import InitFile, load_matching, read_state, torchvision_state
from tasks.nn.macs import macs, params

ARCHITECTURE = Architecture(name="mobilenet_v3_small", num_classes=4)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return ARCHITECTURE.build().state_dict()


@pytest.fixture
def state_file(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    torch.save(state, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_state_dict_and_checkpoint_are_read_alike(
    state: dict[str, torch.Tensor], state_file: Path, tmp_path: Path
) -> None:
    """Both kinds of file give the same tensors."""
    labels = ("a", "b", "c", "d")
    checkpoint = tmp_path / "checkpoint.pt"
    Checkpoint(architecture=ARCHITECTURE, state=state, preprocess=Preprocess(size_px=32), labels=labels).save(
        checkpoint
    )
    for file in (state_file, checkpoint):
        read = read_state(InitFile(file=file, sha256=hashlib.sha256(file.read_bytes()).hexdigest()))
        assert read.keys() == state.keys()
        assert all(torch.equal(read[name], state[name]) for name in state)


def test_same_classes_load_completely(state: dict[str, torch.Tensor]) -> None:
    """Every tensor arrives, the classifier too."""
    model = ARCHITECTURE.build()
    loaded = load_matching(model, state, origin="test")
    assert (loaded.loaded_count, loaded.fresh_count) == (len(state), 0)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_other_classes_keep_a_fresh_classifier(state: dict[str, torch.Tensor]) -> None:
    """With another number of classes the last layer stays as initialised and is counted."""
    model = Architecture(name="mobilenet_v3_small", num_classes=9).build()
    fresh = model.classifier[3].weight.clone()
    loaded = load_matching(model, state, origin="test")
    assert (loaded.loaded_count, loaded.fresh_count) == (len(state) - 2, 2)
    assert torch.equal(model.classifier[3].weight, fresh)
    assert torch.equal(model.features[0][0].weight, state["features.0.0.weight"])


@pytest.mark.parametrize(
    ("name", "word"),
    [("mobilenet_v2", "unknown|missing"), ("mobilenet_v3_large", "missing|unknown|instead of")],
)
def test_weights_of_another_architecture_are_refused(
    state: dict[str, torch.Tensor], name: str, word: str
) -> None:
    """A few tensors that happen to fit are not loaded quietly."""
    model = Architecture(name=name, num_classes=4).build()
    with pytest.raises(UserError, match=word):
        load_matching(model, state, origin="test")


def test_a_missing_tensor_is_refused(state: dict[str, torch.Tensor]) -> None:
    """One tensor less than the model has is an error that names it."""
    partial = {name: tensor for name, tensor in state.items() if name != "features.0.1.running_var"}
    with pytest.raises(UserError, match=r"features\.0\.1\.running_var missing"):
        load_matching(ARCHITECTURE.build(), partial, origin="test")


class Evil:
    """A pickle that would create a file when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "kind", ["missing", "empty", "text", "module", "numbers", "empty_dict", "list", "folder"]
)
def test_other_files_are_refused(kind: str, tmp_path: Path) -> None:
    """What is no state dict is refused with the file's name and how to make one."""
    file = tmp_path / "weights.pt"
    if kind == "folder":
        file.mkdir()
    elif kind in {"empty", "text"}:
        file.write_bytes(b"" if kind == "empty" else b"weights")
    elif kind != "missing":
        content = {"module": nn.Linear(1, 1), "numbers": {"a": 1}, "empty_dict": {}, "list": [torch.ones(1)]}
        torch.save(content[kind], file)
    with pytest.raises(UserError, match=r"weights\.pt") as caught:
        read_state(InitFile(file=file, sha256="0" * 64))
    assert "state_dict" in str(caught.value)


def test_foreign_pickles_are_not_executed(tmp_path: Path) -> None:
    """Loading a hostile file runs nothing, in torch's format and as a bare pickle."""
    trace = tmp_path / "executed"
    torch.save({"a": Evil(trace)}, tmp_path / "torch.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"a": Evil(trace)}))
    for name in ("torch.pt", "bare.pt"):
        with pytest.raises(UserError):
            read_state(InitFile(file=tmp_path / name, sha256="0" * 64))
        with pytest.raises(UserError):
            Checkpoint.load(tmp_path / name)
    assert not trace.exists()


def test_hash_pins_the_file(state_file: Path) -> None:
    """The right hash passes; another is refused, and the error shows the one to enter."""
    digest = hashlib.sha256(state_file.read_bytes()).hexdigest()
    read_state(InitFile(file=state_file, sha256=digest))
    with pytest.raises(UserError, match=digest):
        read_state(InitFile(file=state_file, sha256="0" * 64))


def test_torchvision_weights_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A download that fails is one clear error that names the way without network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="mobilenet_v3_small") as caught:
        torchvision_state("mobilenet_v3_small")
    assert "init.file" in caught.value.next_step


@pytest.mark.parametrize(
    ("name", "millions", "mmacs"),
    [("mobilenet_v3_small", 2.54, 56.5), ("mobilenet_v2", 3.50, 300.8), ("resnet18", 11.69, 1814.1)],
)
def test_size_is_the_published_one(name: str, millions: float, mmacs: float) -> None:
    """Parameters and multiply-accumulates at 224 px as torchvision's weights pages state them."""
    model = torchvision.models.get_model(name, weights=None).train()
    assert params(model) / 1e6 == pytest.approx(millions, abs=0.005)
    assert macs(model, (1, 3, 224, 224)) / 1e6 == pytest.approx(mmacs, rel=0.001)
    assert model.training


def test_macs_by_hand() -> None:
    """A 3x3 convolution over 8x8 outputs and a matrix, counted on paper, for a batch of two."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
    assert macs(model, (1, 3, 8, 8)) == 8 * 8 * 4 * 3 * 9 + 256 * 5
    assert macs(model, (2, 3, 8, 8)) == 2 * (8 * 8 * 4 * 3 * 9 + 256 * 5)
