"""The training loop: learns, repeats itself bit for bit, survives a kill, refuses what it cannot train."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from digit_set import write_digits
from torch import nn

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset
from tasks.nn.augment import AugmentConfig
from tasks.nn.loop import DistillConfig, FitConfig, FitResult, evaluate, fit
from tasks.nn.optim import ParameterOptions

PREPROCESS = Preprocess(size_px=16)
CONFIG = FitConfig(
    epochs=3, batch_size=32, learning_rate=5e-3, augment=AugmentConfig(shift=0.1), ema_decay=0.9
)


def small_model(seed: int = 0, width: int = 16) -> nn.Module:
    """A convolutional classifier with batch norm and dropout that trains in a second."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.BatchNorm2d(width, momentum=0.01),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(2 * width * 4 * 4, 10),
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(
        tmp_path_factory.mktemp("digits") / "prepared", {"train": 320, "val": 100, "test": 100}
    )


@pytest.fixture(scope="module")
def dataset(root: Path) -> Dataset:
    return Dataset.open(root)


@pytest.fixture(scope="module")
def trained(dataset: Dataset) -> tuple[nn.Module, FitResult]:
    model = small_model()
    return model, fit(model, dataset, PREPROCESS, CONFIG)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_learns_the_digits(dataset: Dataset) -> None:
    """A few epochs bring a random model far above chance on images it never saw."""
    model = small_model()
    before = evaluate(model, dataset.split("test"), PREPROCESS).top1
    result = fit(model, dataset, PREPROCESS, CONFIG.model_copy(update={"epochs": 12}))
    after = evaluate(model, dataset.split("test"), PREPROCESS)
    assert before < 0.3
    assert after.top1 > 0.8
    assert after.top1 == (after.predictions == dataset.split("test").labels).mean()
    assert result.history[-1].train_loss < result.history[0].train_loss / 2


def test_model_holds_the_kept_epoch(trained: tuple[nn.Module, FitResult], dataset: Dataset) -> None:
    """The model ends with the reported state, and evaluating it gives the reported accuracy."""
    model, result = trained
    assert same(model.state_dict(), result.state)
    assert evaluate(model, dataset.split("val"), PREPROCESS).top1 == result.val_top1
    assert result.history[result.epoch - 1].val_top1 == result.val_top1


def test_keeps_the_last_epoch_as_good_as_the_best(dataset: Dataset) -> None:
    """A late epoch within one standard error of the best is kept, one far below is not."""
    rising = {"epochs": 8, "ema_decay": 0.0, "learning_rate": 3.0, "warmup_epochs": 8}
    config = CONFIG.model_copy(update=rising)
    kept = []
    for seed in range(4):
        result = fit(small_model(seed), dataset, PREPROCESS, config.model_copy(update={"seed": seed}))
        found = [entry.val_top1 for entry in result.history]
        good, best = 0, 0.0
        for epoch, top1 in enumerate(found, start=1):
            best = max(best, top1)
            if best - top1 <= (best * (1 - best) / 100) ** 0.5:
                good = epoch
        assert result.epoch == good
        assert result.val_top1 == found[good - 1]
        kept.append(good)
    assert min(kept) < 8, "no seed ended badly: the rule was not exercised"


def test_leaves_the_model_as_it_found_it(trained: tuple[nn.Module, FitResult]) -> None:
    """Momentum, memory layout and eval mode are what later stages expect."""
    model, _ = trained
    assert [m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)] == [0.01, 0.1]
    assert all(p.is_contiguous() for p in model.parameters())
    assert not any(m.training for m in model.modules())


def test_same_seed_same_bits(trained: tuple[nn.Module, FitResult], dataset: Dataset) -> None:
    """Equal seeds give equal tensors whatever the global random state; another seed gives others."""
    torch.manual_seed(1234)
    again = fit(small_model(), dataset, PREPROCESS, CONFIG)
    other = fit(small_model(), dataset, PREPROCESS, CONFIG.model_copy(update={"seed": 1}))
    assert same(again.state, trained[1].state)
    assert again.history == trained[1].history
    assert not same(other.state, trained[1].state)


def test_does_not_touch_the_global_random_state(dataset: Dataset) -> None:
    """A caller's random numbers do not depend on whether a training ran in between."""
    model = small_model()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    fit(model, dataset, PREPROCESS, CONFIG.model_copy(update={"epochs": 1}))
    assert torch.equal(torch.rand(3), expected)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_loop import CONFIG, PREPROCESS, small_model
from tasks.data.dataset import Dataset
from tasks.nn.loop import fit
config = CONFIG.model_copy(update={{"epochs": 30}})
result = fit(small_model(), Dataset.open(Path({root!r})), PREPROCESS, config, resume=Path({state!r}))
import torch
torch.save(result.state, {out!r})
"""


def test_killed_training_resumes_to_the_same_bits(root: Path, tmp_path: Path) -> None:
    """kill -9 in mid-training, start again: the uninterrupted result, and the state file is gone."""

    def start(name: str) -> subprocess.Popen[bytes]:
        paths = {"state": str(tmp_path / f"{name}.state"), "out": str(tmp_path / f"{name}.pt")}
        code = KILLED.format(here=str(Path(__file__).parent), root=str(root), **paths)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-c", code], env=environment)

    assert start("whole").wait(timeout=300) == 0
    state = tmp_path / "broken.state"
    child = start("broken")
    deadline = time.monotonic() + 300
    while not state.exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    epochs_done = len(torch.load(state, weights_only=True)["state"]["history"])
    assert 1 <= epochs_done < 30
    assert not (tmp_path / "broken.pt").exists()
    assert start("broken").wait(timeout=300) == 0
    whole, broken = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "broken"))
    assert same(whole, broken)
    assert not state.exists()


class InterruptedTrainingError(Exception):
    """Stands for the kill where a process is not worth starting."""


class StopAfterFirstEpoch:
    """A tracking run that stops the training at its first curve point."""

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        raise InterruptedTrainingError


def interrupted(dataset: Dataset, state: Path, config: FitConfig = CONFIG) -> None:
    with pytest.raises(InterruptedTrainingError):
        fit(small_model(), dataset, PREPROCESS, config, resume=state, run=StopAfterFirstEpoch())
    assert state.exists()


@pytest.mark.parametrize("change", ["config", "model", "preprocess", "pixels"])
def test_state_of_another_training_is_not_continued(
    change: str, dataset: Dataset, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state file left by other params, weights or data is named and not used."""
    state = tmp_path / "state"
    interrupted(dataset, state)
    config = CONFIG.model_copy(update={"label_smoothing": 0.0}) if change == "config" else CONFIG
    preprocess = replace(PREPROCESS, color_order="BGR") if change == "preprocess" else PREPROCESS
    data = dataset
    if change == "pixels":
        changed = tmp_path / "prepared"
        changed.mkdir()
        for file in root.iterdir():
            (changed / file.name).write_bytes(file.read_bytes())
        shard = np.load(changed / "train-001.npy")
        shard[0, 0, 0, 0] ^= 255
        np.save(changed / "train-001.npy", shard)
        data = Dataset.open(changed)

    def model() -> nn.Module:
        return small_model(seed=1 if change == "model" else 0)

    resumed = fit(model(), data, preprocess, config, resume=state)
    assert "other parameters or data" in capsys.readouterr().err
    assert same(resumed.state, fit(model(), data, preprocess, config).state)


@pytest.mark.parametrize("content", [b"", b"not a state", b"PK\x03\x04 cut"])
def test_damaged_state_starts_anew(
    content: bytes,
    dataset: Dataset,
    trained: tuple[nn.Module, FitResult],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A state file that cannot be read costs the epochs done, says so, and does not change the result."""
    state = tmp_path / "state"
    state.write_bytes(content)
    result = fit(small_model(), dataset, PREPROCESS, CONFIG, resume=state)
    assert "cannot be read" in capsys.readouterr().err
    assert same(result.state, trained[1].state)


def test_resumes_without_ema_too(dataset: Dataset, tmp_path: Path) -> None:
    """The optimiser's moments and the best weights travel through the state file."""
    config = CONFIG.model_copy(update={"ema_decay": 0.0})
    interrupted(dataset, tmp_path / "state", config)
    resumed = fit(small_model(), dataset, PREPROCESS, config, resume=tmp_path / "state")
    assert same(resumed.state, fit(small_model(), dataset, PREPROCESS, config).state)


def test_distillation_pulls_towards_the_teacher(dataset: Dataset) -> None:
    """With alpha 1 the labels do not count: the student agrees with a teacher that is wrong on purpose."""
    teacher = small_model(width=24)
    fit(teacher, dataset, PREPROCESS, CONFIG.model_copy(update={"epochs": 12}))
    last = teacher[-1]
    with torch.no_grad():  # class k is now called k + 1
        last.weight.copy_(last.weight.roll(1, 0))
        last.bias.copy_(last.bias.roll(1, 0))
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    config = CONFIG.model_copy(update={"epochs": 12, "distill": DistillConfig(alpha=1.0)})
    student = small_model(seed=3)
    fit(student, dataset, PREPROCESS, config, teacher=teacher)
    test = dataset.split("test")
    said = evaluate(student, test, PREPROCESS).predictions
    taught = evaluate(teacher, test, PREPROCESS).predictions
    assert (said == taught).mean() > 0.6  # not higher: the epoch kept is the one nearest to the labels
    assert (said == test.labels).mean() < 0.2
    assert same(before, teacher.state_dict())


def test_bf16_runs_and_says_so(dataset: Dataset) -> None:
    """amp: bf16 trains in bf16 and returns float32 weights that differ from the float32 run's."""
    config = CONFIG.model_copy(update={"epochs": 1})
    half = fit(small_model(), dataset, PREPROCESS, config.model_copy(update={"amp": "bf16"}))
    full = fit(small_model(), dataset, PREPROCESS, config)
    assert half.bf16
    assert not full.bf16
    assert {t.dtype for t in half.state.values() if t.is_floating_point()} == {torch.float32}
    assert not same(half.state, full.state)


def test_measuring_amp_leaves_no_trace(dataset: Dataset) -> None:
    """amp: auto gives exactly the result of the choice it made."""
    config = CONFIG.model_copy(update={"epochs": 1, "amp": "auto"})
    measured = fit(small_model(), dataset, PREPROCESS, config)
    told = config.model_copy(update={"amp": "bf16" if measured.bf16 else "off"})
    assert same(measured.state, fit(small_model(), dataset, PREPROCESS, told).state)


def test_parameters_with_their_own_rate(dataset: Dataset) -> None:
    """A rate factor of zero freezes the parameters it is given to, and only those."""
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def options(name: str, parameter: nn.Parameter) -> ParameterOptions:
        return ParameterOptions(lr_scale=0.0 if name == "0.weight" else 1.0)

    config = CONFIG.model_copy(update={"epochs": 1, "ema_decay": 0.0})
    fit(model, dataset, PREPROCESS, config, options=options)
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    assert not torch.equal(model.state_dict()["3.weight"], before["3.weight"])


def test_curves_reach_the_run(dataset: Dataset) -> None:
    """Each epoch sends its numbers, as they are in the history, at its step."""
    points: list[tuple[int, dict[str, float]]] = []

    class Recorder:
        def metrics(self, values: dict[str, float], *, step: int) -> None:
            points.append((step, dict(values)))

    result = fit(small_model(), dataset, PREPROCESS, CONFIG, run=Recorder(), description="finetune")
    assert [step for step, _ in points] == [1, 2, 3]
    assert points[1][1] == {
        "finetune/train_loss": result.history[1].train_loss,
        "finetune/val_top1": result.history[1].val_top1,
        "finetune/learning_rate": result.history[1].learning_rate,
    }


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"train": 1, "val": 10}, "1 training"),
        ({"train": 10}, "0 validation"),
    ],
)
def test_too_few_images_are_refused(counts: dict[str, int], words: str, tmp_path: Path) -> None:
    """Splits one cannot train or validate on are refused with their sizes."""
    data = Dataset.open(write_digits(tmp_path / "prepared", counts))
    with pytest.raises(UserError, match=words):
        fit(small_model(), data, PREPROCESS, CONFIG)


def test_unlabelled_images_are_refused(root: Path, dataset: Dataset) -> None:
    """A label of -1 in the training split is counted and refused, not trained on."""
    manifest = dataset.manifest.copy()
    manifest.loc[manifest.index[:3], "label"] = -1
    with pytest.raises(UserError, match="3 of them unlabelled"):
        fit(small_model(), Dataset(root, manifest, dataset.label_names), PREPROCESS, CONFIG)


def test_divergence_is_an_error(dataset: Dataset) -> None:
    """A loss that is not a number stops the training with the rate to lower, and no checkpoint can follow."""
    with pytest.raises(UserError, match=r"loss is (nan|inf)") as caught:
        fit(small_model(), dataset, PREPROCESS, CONFIG.model_copy(update={"learning_rate": 1e30}))
    assert "learning_rate" in str(caught.value)


def test_a_split_smaller_than_the_batch_trains(tmp_path: Path) -> None:
    """The batch shrinks to the split instead of training on nothing."""
    data = Dataset.open(write_digits(tmp_path / "prepared", {"train": 7, "val": 5}))
    result = fit(small_model(), data, PREPROCESS, CONFIG)
    assert len(result.history) == CONFIG.epochs
    assert result.history[-1].train_loss < result.history[0].train_loss


def test_evaluate_an_empty_split(dataset: Dataset) -> None:
    """No images: no predictions, and an accuracy that is no number instead of a wrong one."""
    evaluation = evaluate(small_model(), dataset.split("field"), PREPROCESS)
    assert evaluation.predictions.shape == (0,)
    assert np.isnan(evaluation.top1)
