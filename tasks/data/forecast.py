"""What the stages `prepare` and `validate` will make of a source, told before anything is decoded.

Repeated and unusable files are still counted in: the splits that come out can only be smaller.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from fleet.device.errors import UserError
from tasks.data.listing import Listing
from tasks.data.rules import ValidateParams
from tasks.data.splits import CalibrationParams, FieldParams, HoldoutParams, fill_splits

_SHOWN = ("train", "val", "calibration", "test")
_USUAL_TOP1 = 0.9
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The splits of a source."""

    splits: Mapping[str, int]
    """Images by split."""
    min_calibration_images: int | None
    """What prepare.calibration.min_images has to be; None where its default will do."""
    scarce_classes: tuple[str, ...]
    """Classes with fewer training images than `validate` wants."""

    def notes(self) -> list[str]:
        """What this many images do not allow, and which parameter or step changes it."""
        said = []
        calibration, wanted = self.splits["calibration"], CalibrationParams().min_images
        if calibration < wanted:
            said.append(
                f"{calibration} calibration images where {wanted} to 500 are usual: int8 ranges rest on"
                " few scenes"
            )
        if self.min_calibration_images is not None:
            said.append(
                f"prepare.calibration.min_images is set to {self.min_calibration_images}: the default,"
                f" {wanted}, needs {2 * wanted} images in train"
            )
        test = self.splits["test"]
        if test < ValidateParams().min_test_images:
            known_pp = 196 * math.sqrt(_USUAL_TOP1 * (1 - _USUAL_TOP1) / test)
            said.append(f"{test} test images: a top-1 of {_USUAL_TOP1:.0%} is known to {known_pp:.1f} pp")
        if self.scarce_classes:
            names, few = ", ".join(self.scarce_classes[:_NAMED]), ValidateParams().min_train_images_per_class
            more = ", ..." if len(self.scarce_classes) > _NAMED else ""
            said.append(
                f"{len(self.scarce_classes)} classes with fewer than {few} training images: {names}{more}"
            )
        return said

    def __str__(self) -> str:
        return ", ".join(f"{name} {self.splits[name]}" for name in _SHOWN)


def forecast(listing: Listing) -> Forecast:
    """Divide what a source offers, with fewer calibration images where it has too few for the default.

    Raises:
        UserError: no image is left for one of train, val, calibration and test.
    """
    places = {name: number for number, name in enumerate(listing.class_names)}
    frame = pd.DataFrame(
        {
            "sha256": [entry.name for entry in listing.entries],
            "label": [places.get(entry.label or "", -1) for entry in listing.entries],
            "split": [entry.split or "train" for entry in listing.entries],
            "source": [entry.name for entry in listing.entries],
            "group": [entry.group for entry in listing.entries],
        }
    )
    least = None
    try:
        filled = _filled(frame, CalibrationParams())
    except UserError:
        divided = _filled(frame, CalibrationParams(min_images=1))["split"]
        least = max(1, int(divided.isin(("train", "calibration")).sum()) // 3)
        filled = _filled(frame, CalibrationParams(min_images=least))
    train = filled[filled["split"] == "train"]["label"].value_counts()
    few = ValidateParams().min_train_images_per_class
    return Forecast(
        splits={name: int((filled["split"] == name).sum()) for name in _SHOWN},
        min_calibration_images=least,
        scarce_classes=tuple(name for name, label in places.items() if train.get(label, 0) < few),
    )


def _filled(frame: pd.DataFrame, calibration: CalibrationParams) -> pd.DataFrame:
    return fill_splits(frame, holdout=HoldoutParams(), calibration=calibration, field=FieldParams(), seed=0)
