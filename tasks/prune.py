"""The stage `prune`: channels are taken from the trained model step by step, with fine-tuning after each.

"Pruned by 30 %" means: 30 % of the channels of every prunable group of layers are gone, which leaves about
half of the weights and multiply-accumulates (see tasks.nn.pruning). Pruning comes before quantisation: scales
that were learned with channels that are then removed would be wrong.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import nn
from torch.optim.swa_utils import update_bn

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from tasks import tracking
from tasks.data.dataset import Dataset
from tasks.nn import snapshot
from tasks.nn.arch import Architecture
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.config import FitConfig
from tasks.nn.evaluate import evaluate
from tasks.nn.loop import fit
from tasks.nn.macs import macs, params
from tasks.nn.pruning import MAX_RATIO, PruneOptions, prune_to, ratio_for, removed_share, sensitivity
from tasks.prune_ladder import Rung, write_csv, write_html
from tasks.prune_latency import measure_models
from tasks.stage import REPORTS, Params, stage, write_json

DATA = Path("data/prepared")
PARENT = Path("models/train/checkpoint.pt")
CHECKPOINT = Path("models/prune/checkpoint.pt")
LADDER_CSV, LADDER_HTML = REPORTS / "prune_ladder.csv", REPORTS / "prune_ladder.html"
LATENCY = REPORTS / "measured" / "prune_latency.json"
MEASURED_HTML = REPORTS / "measured" / "prune_ladder.html"
RESUME = Path(".edgeloop/resume")  # no out: DVC deletes outs before it runs a stage
_RECALIBRATION_IMAGES, _RECALIBRATION_BATCH = 512, 64
_FEWEST_QUERIES = 50  # a median of fewer inferences decides nothing
_MOST_MEASUREMENTS = 3  # of one candidate for a latency target, while the host is noisy
_FIRST_RATIO, _RATIO_STEP, _WARN_RATIO = 0.2, 0.1, 0.5


class PruneTarget(Params):
    """How far to prune."""

    kind: Literal["ratio", "macs", "latency"] = "ratio"
    """ratio: share of channels to remove from each group; macs: share of multiply-accumulates to keep;
    latency: milliseconds (P50, one thread, fp32) in the engine on this host. A latency is measured, so two
    builds may choose different widths: take the ratio it found from reports/prune.json to repeat a build."""
    value: float = 0.3

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        limit = {"ratio": MAX_RATIO, "macs": 1.0, "latency": float("inf")}[self.kind]
        if not 0 < self.value <= limit or (self.kind == "macs" and self.value == limit):
            raise ValueError(f"a target of kind {self.kind} lies between 0 and {limit:g}")
        return self


class PruneParams(FitConfig):
    """The section `prune`: how far, what to spare, and (inherited) how each step is fine-tuned."""

    target: PruneTarget = PruneTarget()
    steps: int | None = Field(default=None, ge=1)
    """Rounds of pruning and fine-tuning, evenly from 20 % to the target; None: from 20 % in steps of 10 %."""
    epochs: int = Field(default=10, ge=1)
    """Epochs of fine-tuning in each round."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak rate of AdamW: the rate the parent was trained with (learning-rate rewinding, arXiv 2003.02389).
    A tenth of it, as for fine-tuning on new data, recovers too little in a few epochs."""
    warmup_epochs: float = Field(default=0.0, ge=0)
    round_to: int = Field(default=8, ge=1)
    """Widths become multiples of this; engines pack channels by 4, 8 or 16."""
    protect: tuple[str, ...] = ()
    """Names of layers or shell patterns that keep their channels; the classifier always does."""
    sensitivity_ratios: tuple[float, ...] = ()
    """Also report the validation accuracy when each group alone loses this share, e.g. [0.3]; empty: off."""
    latency_queries: int = Field(default=480, ge=0)
    """Timed inferences of each rung in the engine for reports/measured; 0: the ladder is not measured."""

    @model_validator(mode="after")
    def _latency_can_be_measured(self) -> Self:
        if self.target.kind == "latency" and self.latency_queries < _FEWEST_QUERIES:
            raise ValueError(f"a latency target needs latency_queries >= {_FEWEST_QUERIES}")
        return self


def prune(settings: PruneParams, run: tracking.Run | None = None) -> dict[str, float]:
    """Prune and fine-tune up the ladder, write the checkpoint and the ladder, and return the report.

    Raises:
        UserError: the parent, the data or a parameter cannot be used, or the graph cannot be pruned soundly.
        EngineError: a latency target was given and a candidate cannot be measured.
    """
    source, dataset = _parent(), Dataset.open(DATA)
    _check_labels(source, dataset)
    climb = _Climb(settings, source, dataset, run)
    ratio = climb.target_ratio()
    if ratio > _WARN_RATIO:
        print(
            f"prune: {ratio:.0%} of the channels is more than half; expect to lose accuracy", file=sys.stderr
        )
    for step, step_ratio in enumerate(ladder_ratios(ratio, settings.steps), start=1):
        climb.step(step, step_ratio)
    report = climb.report(ratio)
    left = (1 - source.pruned_percent / 100) * (1 - ratio)
    Checkpoint(
        architecture=source.architecture.with_widths_of(climb.model),
        state=climb.model.state_dict(),
        preprocess=source.preprocess,
        labels=source.labels,
        pruned_percent=round(100 * (1 - left)),
    ).save(CHECKPOINT)
    write_csv(climb.rungs, LADDER_CSV)
    write_html(climb.rungs, _title(source), LADDER_HTML)
    climb.measure_ladder()
    climb.forget_snapshots()
    return report


def ladder_ratios(ratio: float, steps: int | None) -> list[float]:
    """The ratio of each round, rising from 20 % (from an even share, when less is asked for) to `ratio`."""
    if steps is None:
        steps = max(1, round((ratio - _FIRST_RATIO) / _RATIO_STEP) + 1)
    if steps == 1:
        return [ratio]
    first = _FIRST_RATIO if ratio > _FIRST_RATIO else ratio / steps
    return [*(round(float(r), 4) for r in np.linspace(first, ratio, steps)[:-1]), ratio]


class _Climb:
    """The model on its way up the ladder."""

    def __init__(
        self, settings: PruneParams, source: Checkpoint, dataset: Dataset, run: tracking.Run | None
    ) -> None:
        self.settings, self.source, self.dataset, self.run = settings, source, dataset, run
        self.options = PruneOptions(round_to=settings.round_to, protect=settings.protect)
        self.parent = source.build()
        self.model = self.parent
        images = dataset.split("train").images([0, 1])
        self.example_NCHW = torch.from_numpy(source.preprocess.batch(list(images)))
        top1 = self.val_top1(self.parent)
        self.rungs = [self._rung(0.0, self.parent, pruned_top1=top1, top1=top1)]
        self.models: dict[str, nn.Module] = {"parent": self.parent}

    @property
    def preprocess(self) -> Preprocess:
        return self.source.preprocess

    def target_ratio(self) -> float:
        """The ratio that was asked for, or the smallest that meets the target."""
        target = self.settings.target
        if target.kind == "ratio":
            return target.value
        if target.kind == "macs":
            limit = target.value * self.macs(self.parent)
            return ratio_for(self.macs, limit, self.parent, self.example_NCHW, self.options)
        return ratio_for(self.latency_ms, target.value, self.parent, self.example_NCHW, self.options)

    def step(self, number: int, ratio: float) -> None:
        """Prune to `ratio`, fine-tune, and note the rung; a finished round is taken up from its snapshot."""
        file = _round_file(number)
        settings = self.settings.model_copy(update={"seed": self.settings.seed + number})
        splits = [self.dataset.split("train"), self.dataset.split("val")]
        identity = {"params": settings.model_dump(mode="json"), "ratio": ratio}
        fingerprint = snapshot.fingerprint(identity, models=[self.model, self.parent], splits=splits)
        done = snapshot.load(file, fingerprint)
        if done is None:
            done = self._fine_tuned(settings, number, ratio)
            snapshot.save(file, fingerprint, done)
        self.model = Architecture.from_dict(done["architecture"]).build()
        self.model.load_state_dict(done["state"])
        self.model.eval()
        self.rungs.append(self._rung(ratio, self.model, pruned_top1=done["pruned_top1"], top1=done["top1"]))
        self.models[self.rungs[-1].name] = self.model

    def _fine_tuned(self, settings: PruneParams, number: int, ratio: float) -> dict[str, Any]:
        model = prune_to(self.model, self.example_NCHW, ratio, self.parent, self.options)
        architecture = self._rebuildable(model)
        self._recalibrate(model)
        pruned_top1 = self.val_top1(model)
        result = fit(
            model,
            self.dataset,
            self.preprocess,
            settings,
            teacher=self.parent,
            run=self.run,
            description=f"prune p{100 * ratio:g}",
            resume=RESUME / f"prune_fit_{number}.pt",
        )
        return {
            "architecture": architecture.to_dict(),
            "state": result.state,
            "pruned_top1": pruned_top1,
            "top1": result.val_top1,
        }

    def _recalibrate(self, model: nn.Module) -> None:
        """Renew the batch-norm statistics: without the removed channels they are those of another model."""
        split = self.dataset.split("train")
        order = np.random.default_rng(self.settings.seed).permutation(len(split))[:_RECALIBRATION_IMAGES]
        pixels = torch.from_numpy(self.preprocess.batch(list(split.images(order))))
        with torch.random.fork_rng(devices=[]):  # dropout draws random numbers
            update_bn(torch.split(pixels, _RECALIBRATION_BATCH), model)
        model.eval()

    def _rebuildable(self, model: nn.Module) -> Architecture:
        """The architecture record of a pruned model, after checking that it rebuilds the same function."""
        architecture = self.source.architecture.with_widths_of(model)
        rebuilt = architecture.build().eval()
        try:
            rebuilt.load_state_dict(model.state_dict())
            with torch.no_grad():
                same = torch.equal(rebuilt(self.example_NCHW), model(self.example_NCHW))
            problem = "" if same else "the rebuilt model computes something else"
        except RuntimeError as error:
            problem = str(error)
        if problem:
            raise UserError(
                f"the pruned {architecture.name} cannot be stored as layer widths: {problem}",
                allowed="pruning that changes convolutions, linear layers and batch norms only",
                next_step="add the layer named above to prune.protect",
            )
        return architecture

    def report(self, ratio: float) -> dict[str, float]:
        """The numbers of reports/prune.json."""
        parent, last, test = self.rungs[0], self.rungs[-1], self.dataset.split("test")
        test_top1 = {
            name: evaluate(model, test, self.preprocess).top1
            for name, model in (("parent_", self.parent), ("", self.model))
        }
        return {
            "ratio": ratio,
            "rounds": len(self.rungs) - 1,
            "epochs": self.settings.epochs,
            "over_half": int(ratio > _WARN_RATIO),
            "macs_kept_ratio": last.macs_count / parent.macs_count,
            "params_kept_ratio": last.params_count / parent.params_count,
            **{k: v for k, v in asdict(last).items() if k != "ratio"},
            **{f"parent_{k}": getattr(parent, k) for k in ("macs_count", "params_count", "val_top1")},
            **{f"{name}test_top1": top1 for name, top1 in test_top1.items()},
            "test_top1_cost_pp": 100 * (test_top1["parent_"] - test_top1[""]),
            **self._sensitivity(),
        }

    def _sensitivity(self) -> dict[str, float]:
        ratios = self.settings.sensitivity_ratios
        if not ratios:
            return {}

        def score(model: nn.Module) -> float:
            self._recalibrate(model)
            return self.val_top1(model)

        found = sensitivity(score, ratios, self.parent, self.example_NCHW, self.options)
        return {
            f"sensitivity/{layer}/val_top1_at_{100 * ratio:.0f}_percent": top1
            for layer, of in found.items()
            for ratio, top1 in of.items()
        }

    def measure_ladder(self) -> None:
        """Engine latency of every rung: measured, so it is no out of the stage."""
        if not self.settings.latency_queries:
            return
        try:
            measured = measure_models(self.models, self.preprocess, queries=self.settings.latency_queries)
        except EngineError as error:
            print(f"prune: the ladder has no engine latency: {error}", file=sys.stderr)
            return
        write_json(LATENCY, {name: m.to_dict() for name, m in measured.items()})
        write_html(self.rungs, _title(self.source), MEASURED_HTML, measured)
        if self.run is not None:
            self.run.metrics({f"ladder/{name}/p50_ms": m.p50_ms for name, m in measured.items()})
            self.run.artifact(LATENCY)
            self.run.artifact(MEASURED_HTML)

    def forget_snapshots(self) -> None:
        """Remove what only an interrupted run needs."""
        for number in range(1, len(self.rungs)):
            _round_file(number).unlink(missing_ok=True)

    def val_top1(self, model: nn.Module) -> float:
        """Accuracy on the validation split, 0..1."""
        return evaluate(model, self.dataset.split("val"), self.preprocess).top1

    def macs(self, model: nn.Module) -> float:
        """Multiply-accumulates for one image."""
        return macs(model, self.preprocess.input_shape)

    def latency_ms(self, model: nn.Module) -> float:
        """Engine latency on this host, P50; measured again while the host is noisy, said when it stays so."""
        for _ in range(_MOST_MEASUREMENTS):
            queries = self.settings.latency_queries
            found = measure_models({"candidate": model}, self.preprocess, queries=queries)["candidate"]
            if "noisy" not in found.flags:
                return found.p50_ms
        print(
            f"prune: {found.p50_ms:.3f} ms was measured on a noisy host; the ratio that meets the target"
            " may be another when it is quiet",
            file=sys.stderr,
        )
        return found.p50_ms

    def _rung(self, ratio: float, model: nn.Module, *, pruned_top1: float, top1: float) -> Rung:
        return Rung(
            ratio=ratio,
            channels_removed_ratio=removed_share(self.parent, model),
            macs_count=int(self.macs(model)),
            params_count=params(model),
            val_top1_pruned=pruned_top1,
            val_top1=top1,
        )


def _round_file(number: int) -> Path:
    return RESUME / f"prune_round_{number}.pt"


def _title(source: Checkpoint) -> str:
    return f"Pruning ladder of {source.architecture.name}"


def _parent() -> Checkpoint:
    checkpoint = Checkpoint.load(PARENT)
    if checkpoint.float_layers is not None:
        raise UserError(
            f"{PARENT} is quantised",
            allowed="a float model: channels go before quantisation, because removing them changes what the"
            " learned scales were fitted to",
            next_step="prune the float parent, then quantise the pruned model",
        )
    return checkpoint


def _check_labels(checkpoint: Checkpoint, dataset: Dataset) -> None:
    if checkpoint.labels != dataset.label_names:
        raise UserError(
            f"{PARENT} knows {len(checkpoint.labels)} classes, {dataset.root} has {len(dataset.label_names)}",
            allowed="the same class names in the same order",
            next_step="run `dvc repro` so that the model is trained on this dataset",
        )


def main() -> None:
    """Run the stage in the current workspace."""
    with stage("prune", PruneParams) as frame:
        frame.report(prune(frame.params, frame.run))
        frame.run.artifact(LADDER_CSV)
        frame.run.artifact(LADDER_HTML)


if __name__ == "__main__":
    main()
