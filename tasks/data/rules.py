"""What is expected of a prepared dataset, as data: a rule is one expectation on one column of `Facts`."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, get_args

from pydantic import Field

from tasks.data.dataset import SplitName
from tasks.stage import Params


class ValidateParams(Params):
    """Section `validate` of params.yaml: from which values on a warning is due."""

    min_train_images_per_class: int = Field(default=20, ge=1)
    min_test_images_per_class: int = Field(default=5, ge=0)
    max_class_imbalance: float = Field(default=20, ge=1)
    """Training images of the largest class over those of any other."""
    min_test_images: int = Field(default=2000, ge=1)
    """Below it the gate cannot tell a drop of half a percentage point from chance."""
    min_calibration_images: int = Field(default=100, ge=1)
    """Below it the activation ranges of int8 rest on few scenes."""
    min_mean_brightness: float = Field(default=4, ge=0, le=255)
    max_mean_brightness: float = Field(default=251, ge=0, le=255)
    min_contrast: float = Field(default=2, ge=0)
    """Standard deviation over the pixels of an image, 0 to 255; a blank picture has none."""
    max_aspect_ratio: float = Field(default=3, ge=1)
    """Beyond it the centre square shows less than a third of the picture."""
    max_enlargement: float = Field(default=2, ge=1)
    """Stored side over the picture's own shorter side."""


# Great Expectations skips nulls in every other expectation.
_NEVER_NULL = ("sha256", "label", "split", "source", "width", "height", "group", "origin")


@dataclass(frozen=True)
class Rule:
    """One expectation on one column of one table of facts."""

    name: str
    column: str
    meaning: str
    """What is wrong when it fails, continuing `N images/classes/splits ...`."""
    _: KW_ONLY
    table: Literal["images", "classes", "splits"]
    expect: Literal["between", "in_set", "not_null", "unique"]
    severity: Literal["critical", "warning"] = "critical"
    low: float | None = None
    """Least value of a `between`, itself allowed; None: no limit."""
    high: float | None = None
    """Largest value of a `between`, itself allowed; None: no limit."""
    allowed: tuple[Any, ...] = ()
    where: tuple[str, str] | None = None
    """Judge only the rows with this value in this column."""


def rules(params: ValidateParams, num_classes: int) -> tuple[Rule, ...]:
    """Everything that is expected of a dataset with `num_classes` classes."""
    critical = (*_sound_images(num_classes), *_sound_tables())
    return (*critical, *_doubtful_images(params), *_doubtful_tables(params))


def _sound_images(num_classes: int) -> tuple[Rule, ...]:
    rule = partial(Rule, table="images")
    one_of, between, yes = partial(rule, expect="in_set"), partial(rule, expect="between"), (True,)
    splits, origins, highest = get_args(SplitName), ("base", "fleet"), num_classes - 1
    return (
        *(rule(f"no_{column}", column, f"have no {column}", expect="not_null") for column in _NEVER_NULL),
        rule("repeated", "sha256", "are there twice, in one split or two", expect="unique"),
        one_of("split", "split", "are in a split nobody reads", allowed=splits),
        one_of("origin", "origin", "are of neither base nor fleet", allowed=origins),
        one_of("label_split", "label_fits_split", "lack a label, or have one in field", allowed=yes),
        one_of("bad_shard", "shard_state", "have no readable pixels", allowed=("ok",)),
        one_of("changed_pixels", "pixels_match", "are not what their sha256 says", allowed=yes),
        between("label_range", "label", "have a label no class has", low=-1, high=highest),
        between("torn_group", "group_splits", "belong to a group in several splits", high=1),
        between("width", "width", "are under a pixel wide", low=1),
        between("height", "height", "are under a pixel high", low=1),
    )  # fmt: skip


def _sound_tables() -> tuple[Rule, ...]:
    between = partial(Rule, expect="between", low=1)
    return (
        between("untrained_class", "train_images", "have no training image", table="classes"),
        between("empty_split", "images", "are empty", table="splits"),
    )


def _doubtful_images(params: ValidateParams) -> tuple[Rule, ...]:
    dark, bright, flat = params.min_mean_brightness, params.max_mean_brightness, params.min_contrast
    long, large = params.max_aspect_ratio, params.max_enlargement
    rule = partial(Rule, table="images", expect="between", severity="warning")
    return (
        rule("dark", "mean_brightness", f"are nearly black (mean < {dark:g})", low=dark),
        rule("bright", "mean_brightness", f"are nearly white (mean > {bright:g})", high=bright),
        rule("blank", "contrast", f"are nearly one colour (deviation < {flat:g})", low=flat),
        rule("elongated", "aspect_ratio", f"lose all but 1/{long:g} to the square crop", high=long),
        rule("enlarged", "enlargement", f"are enlarged over {large:g} times", high=large),
    )  # fmt: skip


def _doubtful_tables(params: ValidateParams) -> tuple[Rule, ...]:
    train, test = params.min_train_images_per_class, params.min_test_images_per_class
    ratio = params.max_class_imbalance
    tests, scenes = params.min_test_images, params.min_calibration_images
    of_class = partial(Rule, table="classes", expect="between", severity="warning")
    of_split = partial(Rule, table="splits", expect="between", severity="warning")
    chance = f"have < {tests} images: half a percentage point cannot be told from chance"
    ranges = f"have < {scenes} images: int8 ranges rest on few scenes"
    return (
        of_class("class_few_train", "train_images", f"have < {train} train images", low=train),
        of_class("class_few_test", "test_images", f"have < {test} test images", low=test),
        of_class("class_imbalance", "imbalance", f"have < 1/{ratio:g} of the largest", high=ratio),
        of_split("small_test", "images", chance, where=("split", "test"), low=tests),
        of_split("small_calibration", "images", ranges, where=("split", "calibration"), low=scenes),
    )  # fmt: skip
