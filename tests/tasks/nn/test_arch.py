"""Architectures and checkpoints are data: rebuilt equal, same bytes twice, hostile files refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.nn.arch import Architecture, layer_widths
from tasks.nn.checkpoint import Checkpoint

WIDTHS = {
    "features.0.0": (3, 8, 1),
    "features.0.1": (8, 8, 1),
    "features.1.block.0.0": (8, 8, 8),
    "features.1.block.0.1": (8, 8, 1),
    "features.1.block.1.fc1": (8, 8, 1),
    "features.1.block.1.fc2": (8, 8, 1),
    "features.1.block.2.0": (8, 16, 1),
}


def checkpoint(architecture: Architecture) -> Checkpoint:
    torch.manual_seed(0)
    return Checkpoint(
        architecture=architecture,
        state=architecture.build().state_dict(),
        preprocess=Preprocess(size_px=32, color_order="BGR"),
        labels=("cat", "Hündin"),
        pruned_percent=30,
    )


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "mobilenet_v2", "resnet18", "googlenet"])
def test_builds_torchvision_models(name: str) -> None:
    """The model takes images and gives one logit a class, in train mode too: no auxiliary outputs."""
    model = Architecture(name=name, num_classes=7).build()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("name", ["no_such_model", "fasterrcnn_resnet50_fpn", "raft_small", ""])
def test_unknown_names_are_refused(name: str) -> None:
    """Detection, optical flow and misspelt names are refused with the list of what is allowed."""
    with pytest.raises(UserError, match="mobilenet_v3_small"):
        Architecture(name=name, num_classes=2).build()


def test_relu6_replaces_every_hardswish() -> None:
    """No Hardswish is left, there are as many ReLU6 as there were, and the tensors have the same names."""
    plain = Architecture(name="mobilenet_v3_small", num_classes=2).build()
    relu6 = Architecture(name="mobilenet_v3_small", num_classes=2, activation="relu6").build()
    count = sum(isinstance(module, nn.Hardswish) for module in plain.modules())
    assert count == 19
    assert sum(isinstance(module, nn.ReLU6) for module in relu6.modules()) == count
    assert not any(isinstance(module, nn.Hardswish) for module in relu6.modules())
    assert plain.state_dict().keys() == relu6.state_dict().keys()


def test_widths_are_rebuilt() -> None:
    """A model with other widths computes, and its record is found again from the model alone."""
    architecture = Architecture(name="mobilenet_v3_small", num_classes=2, widths=WIDTHS)
    model = architecture.build().eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    assert layer_widths(model)["features.0.0"] == (3, 8, 1)
    plain = Architecture(name="mobilenet_v3_small", num_classes=2)
    assert plain.with_widths_of(model) == architecture
    assert Architecture.from_dict(architecture.to_dict()) == architecture


@pytest.mark.parametrize("widths", [{}, WIDTHS])
def test_checkpoint_round_trip(widths: dict[str, tuple[int, int, int]], tmp_path: Path) -> None:
    """What is read is what was written, and the rebuilt model computes the same."""
    written = checkpoint(Architecture(name="mobilenet_v3_small", num_classes=2, widths=widths))
    written.save(tmp_path / "a.pt")
    read = Checkpoint.load(tmp_path / "a.pt")
    assert read.architecture == written.architecture
    assert read.preprocess == written.preprocess
    assert (read.labels, read.pruned_percent) == (("cat", "Hündin"), 30)
    image = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(read.build()(image), written.build()(image))
    assert not read.build().training
    assert read.variant("i8").name == "mbv3s-p30-i8-r32"


def test_same_content_same_bytes(tmp_path: Path) -> None:
    """File name, memory layout and shared storage leave no trace in the bytes."""
    first = checkpoint(Architecture(name="mobilenet_v3_small", num_classes=2))
    first.save(tmp_path / "a.pt")
    state = {k: v.to(memory_format=torch.channels_last) if v.ndim == 4 else v for k, v in first.state.items()}
    Checkpoint(
        architecture=first.architecture,
        state=state,
        preprocess=first.preprocess,
        labels=first.labels,
        pruned_percent=30,
    ).save(tmp_path / "another name.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "another name.pt").read_bytes()
    Checkpoint.load(tmp_path / "a.pt").save(tmp_path / "again.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "again.pt").read_bytes()
    (tmp_path / "again.pt").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "another name.pt"]


@pytest.mark.parametrize("content", ["missing", "cut", "state_dict", "old_format", "text"])
def test_other_files_are_no_checkpoint(content: str, tmp_path: Path) -> None:
    """Missing, cut off, foreign or of another format: one UserError that names the file."""
    file = tmp_path / "c.pt"
    if content == "text":
        file.write_text("checkpoint")
    elif content == "state_dict":
        torch.save({"weight": torch.ones(1)}, file)
    elif content in {"cut", "old_format"}:
        checkpoint(Architecture(name="mobilenet_v3_small", num_classes=2)).save(file)
        if content == "cut":
            file.write_bytes(file.read_bytes()[:-2000])
        else:
            torch.save({**torch.load(file, weights_only=True), "format": 0}, file)
    with pytest.raises(UserError, match=r"c\.pt"):
        Checkpoint.load(file)
