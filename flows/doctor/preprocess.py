"""`edgeloop doctor --preprocess`: whether a model gets pictures as it was trained to, and what differs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from flows.doctor.finding import Finding
from flows.doctor.model import Model, find_model, open_model
from tasks.mnn.calibration import read_preprocess
from tasks.mnn.picture_folder import PictureFolder, read_folder
from tasks.mnn.preprocess_alternatives import LAYOUTS, Pipeline, claimed_pipeline
from tasks.mnn.preprocess_diagnosis import MUST_BE_SURE, Diagnosis, diagnose, engine_predict
from tasks.workspace import Workspace

USUAL_PICTURES = 200
_MOST_RIVALS = 3


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A model, how it is claimed to get its pictures, and what it says of that."""

    model: Model
    record: Path | None
    """The file that was given; None: the model's card, or ImageNet's usual values, are the claim."""
    folder: Path
    images: PictureFolder
    diagnosis: Diagnosis
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is a problem."""
        return all(finding.status != "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        d = self.diagnosis
        return {
            "ok": self.ok,
            "verdict": d.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "preprocess": {
                "model": str(self.model.path),
                "images": d.pictures,
                "labelled": d.labelled,
                "doubt": d.doubt,
                "claimed": asdict(d.claimed),
                "suits": asdict(d.home),
                "suits_record": record.to_dict() if (record := as_record(d.home)) else None,
                "claimed_top1": d.claimed_top1,
                "suits_top1": d.home_top1,
                "change_pp": asdict(d.change),
                "mismatches": list(d.mismatches),
                "steps": [asdict(step) for step in d.steps],
                "alternatives": [asdict(trial) for trial in d.trials],
            },
        }


def examine_preprocess(
    workspace: Workspace, folder: Path, *, model: str | None, record: Path | None, images: int
) -> Examined:
    """Hold a preprocessing against a model, on real pictures.

    Args:
        workspace: Whose best variant is taken when no model is named.
        folder: Pictures, best as CLASS/IMAGE.
        model: An .mnn file or a variant of the workspace.
        record: How an app prepares pictures, as JSON; None: as the model's card says.
        images: How many pictures to use at most.

    Raises:
        UserError: the model, the record or the folder cannot be used.
        EngineError: the engine does not open or run the model.
    """
    if images < 1:
        raise UserError(
            f"--images {images}", allowed="1 or more", next_step=f"leave it away for {USUAL_PICTURES}"
        )
    given = read_preprocess(record) if record else None
    opened = open_model(find_model(workspace, model), given)
    card = opened.card
    sample = read_folder(folder, _labels(opened), opened.classes_count, images)
    claimed = given or (card.preprocess if card else None) or _usual(opened)
    with Session(opened.path) as session:
        diagnosis = diagnose(
            engine_predict(session),
            sample.pictures,
            sample.labels,
            claimed,
            as_fed=_as_fed(claimed, opened),
            trained=opened.trained,
            encoded=sample.opencv_decodes,
        )
    findings = [
        _model_finding(opened),
        _images_finding(folder, sample),
        *_record_findings(opened, given, record),
        _verdict(opened, record, sample, diagnosis),
    ]
    return Examined(
        model=opened,
        record=record,
        folder=folder,
        images=sample,
        diagnosis=diagnosis,
        findings=tuple(findings),
    )


def _labels(model: Model) -> Sequence[str] | None:
    labels = model.card.labels if model.card else None
    return labels if labels and len(labels) == model.classes_count else None


def _usual(model: Model) -> Preprocess:
    """What is claimed when nobody claims anything."""
    return Preprocess(size_px=model.size_px, layout=model.layout)


def _as_fed(claimed: Preprocess, model: Model) -> Pipeline:
    """The claimed steps, as they end in the model's input: at its size, in a tensor of its shape."""
    pipeline = replace(claimed_pipeline(claimed), size_px=model.size_px)
    if claimed.layout == model.layout:
        return pipeline
    inside = f"{claimed.layout} values in an {model.layout} tensor"
    assert inside in LAYOUTS
    return replace(pipeline, layout=inside)


def in_words(preprocess: Preprocess) -> str:
    """A record as one line."""
    p = claimed_pipeline(preprocess)
    return f"{p.crop}, {p.resize} to {p.size_px} px, {p.color_order}, {p.normalization.name}, {p.layout}"


def as_record(pipeline: Pipeline) -> Preprocess | None:
    """The contract's record of a pipeline; None where the contract has no such step."""
    scale, offset = np.asarray(pipeline.normalization.scale), np.asarray(pipeline.normalization.offset)
    std = 1 / (255 * scale)
    try:
        record = Preprocess.from_dict(
            {
                "size_px": pipeline.size_px,
                "interpolation": pipeline.resize,
                "color_order": pipeline.color_order,
                "mean": [round(float(value), 6) for value in -offset * std],
                "std": [round(float(value), 6) for value in std],
                "layout": pipeline.layout,
            }
        )
    except UserError:
        return None
    return record if pipeline.crop == "centre square" else None


def _model_finding(model: Model) -> Finding:
    what = f"{model.path}, {model.classes_count} classes, input {model.size_px} px {model.layout}"
    card = model.card
    if card is None:
        return Finding(
            check="model", status="ok", found=f"{what}; no card.json beside it says how it was trained"
        )
    if card.doubt:
        return Finding(
            check="model",
            status="warning",
            found=f"{what}; {card.path} is not believed: {card.doubt}",
            next_step="put the card.json beside the model that was written with it, or take it away",
        )
    assert card.preprocess is not None
    return Finding(check="model", status="ok", found=f"{what}; trained with {in_words(card.preprocess)}")


def _images_finding(folder: Path, images: PictureFolder) -> Finding:
    count = len(images.pictures)
    said = [f"{count} of {images.found} in {folder}"]
    if images.labels is not None:
        said.append(f"classes: {images.classes_count}")
    said += [images.note] if images.note else []
    said += [f"left out: {n} {reason}" for reason, n in sorted(images.skipped.items())]
    if images.unlabelled_because:
        return Finding(
            check="images",
            status="warning",
            found="; ".join([*said, images.unlabelled_because]),
            next_step="sort the images into CLASS/IMAGE folders with the model's class names,"
            " or its class indices 0, 1, 2, ... as names",
        )
    return Finding(check="images", status="ok", found="; ".join(said))


def _record_findings(model: Model, given: Preprocess | None, record: Path | None) -> Iterator[Finding]:
    """What can be said of the record without running the model."""
    if given is None:
        return
    if max(map(abs, given.mean)) > 1.5 or max(given.std) > 1.5:
        yield Finding(
            check="units",
            status="problem",
            found=f"mean {list(given.mean)} and std {list(given.std)} look like those of pixels of 0..255",
            next_step=f"write them on the 0..1 scale in {record}: divide by 255",
        )
    if given.size_px != model.size_px or given.layout != model.layout:
        yield Finding(
            check="input",
            status="problem",
            found=f"{record} says {given.size_px} px {given.layout},"
            f" but the model takes {model.size_px} px {model.layout}",
            next_step=f"resize to {model.size_px} px and fill the input as {_LAYOUT_ADVICE[model.layout]}",
        )
    trained = model.trained
    if trained is None or model.card is None:
        return
    different = claimed_pipeline(given).differences(claimed_pipeline(trained))
    yield Finding(
        check="record",
        status="problem" if different else "ok",
        found=f"{record} is not what the model was trained with: {'; '.join(different)}"
        if different
        else f"{record} is what the model was trained with",
        next_step=f"prepare images as `preprocess` in {model.card.path} says" if different else "",
    )


_LAYOUT_ADVICE = {
    "NCHW": "[1, 3, S, S]: all red values, then all green, then all blue",
    "NHWC": "[1, S, S, 3]: red, green and blue of one pixel, then of the next",
}
_ADVICE = {
    "colour order": "hand the channels over in that order: OpenCV and many camera frames come as BGR",
    "layout": "fill the input in that order of axes",
    "crop": "crop so before resizing",
    "resize filter": "resize with that filter",
    "decoder": "decode so, and turn pictures as their EXIF says",
    "input size": "resize to that size",
}


def _verdict(model: Model, record: Path | None, images: PictureFolder, diagnosis: Diagnosis) -> Finding:
    claim = str(record) if record else "the card's record" if model.card else "ImageNet's usual record"
    if diagnosis.verdict == "mismatch":
        wrong = [step for step in diagnosis.steps if step.verdict == "mismatch"]
        formula = f"compute {diagnosis.home.normalization.formula}, per channel"
        names = "; ".join(_named(step.mismatch, step.rivals) for step in wrong)
        return Finding(
            check="preprocessing",
            status="problem",
            found=f"mismatch: the model wants {names}. {_accuracy(claim, diagnosis)}",
            next_step="; ".join(
                f"{step.step} {step.home}: {_ADVICE.get(step.step) or formula}" for step in wrong
            ),
        )
    if diagnosis.verdict == "fits":
        return Finding(
            check="preprocessing",
            status="ok",
            found=f"{claim} suits the model: {diagnosis.home_top1:.1%} of {diagnosis.pictures} images right,"
            " and nothing else does certainly better",
        )
    return Finding(
        check="preprocessing",
        status="warning",
        found=f"cannot tell whether {claim} suits the model: {_why_not(claim, diagnosis)}",
        next_step=_more(images, diagnosis),
    )


def _named(mismatch: str, rivals: Sequence[str]) -> str:
    some = ", ".join(rivals[:_MOST_RIVALS]) + (" ..." if len(rivals) > _MOST_RIVALS else "")
    return f"{mismatch} (or {some}: these images do not tell them apart)" if some else mismatch


def _accuracy(claim: str, diagnosis: Diagnosis) -> str:
    return (
        f"{claim}: {diagnosis.claimed_top1:.1%} of {diagnosis.pictures} images right;"
        f" with these steps mended: {diagnosis.home_top1:.1%}, {diagnosis.change}, at 95 %"
    )


def _why_not(claim: str, diagnosis: Diagnosis) -> str:
    if not diagnosis.labelled:
        moved = f"; {-diagnosis.change.points:.1f} % of the images get another class than as trained"
        return diagnosis.doubt + (moved if diagnosis.claimed != diagnosis.home else "")
    if diagnosis.doubt:
        return diagnosis.doubt
    if diagnosis.claimed != diagnosis.home:
        different = "; ".join(diagnosis.home.differences(diagnosis.claimed))
        return f"as trained is {different}, but that changes too little here. {_accuracy(claim, diagnosis)}"
    open_steps = [s for s in diagnosis.steps if s.verdict == "cannot tell" and s.step in MUST_BE_SURE]
    undecided = "; ".join(f"{step.step} {step.home} or {' or '.join(step.rivals)}" for step in open_steps)
    return (
        f"{diagnosis.home_top1:.1%} of {diagnosis.pictures} images right, but they do not decide {undecided}"
    )


def _more(images: PictureFolder, diagnosis: Diagnosis) -> str:
    if not diagnosis.labelled:
        return "give labelled images: CLASS/IMAGE folders"
    used, left = len(images.pictures), images.found - len(images.pictures)
    if diagnosis.doubt and used >= USUAL_PICTURES:
        return "check that the folders are the model's classes, in its order, and that it is the right model"
    if left > 0:
        return f"use more of the images: `--images {min(images.found, 4 * used)}`"
    return f"give more labelled images than these {used}: a few hundred, of all classes"
