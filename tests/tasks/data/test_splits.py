"""Splits are disjoint by pixels and by group, in proportion, and independent of names and order."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.device.errors import UserError
from tasks.data.splits import (
    CalibrationParams,
    FieldParams,
    HoldoutParams,
    calibration_count,
    drop_group_overlaps,
    drop_repeats,
    fill_splits,
    take,
)


def _frame(rows: list[tuple[str, int, str, str]]) -> pd.DataFrame:
    """Rows of (sha256, label, split, group); sources are numbered."""
    frame = pd.DataFrame(rows, columns=["sha256", "label", "split", "group"])
    return frame.assign(source=[f"{n:03d}" for n in range(len(frame))])


def _train(classes: dict[int, int], group=lambda label, n: "") -> pd.DataFrame:
    return _frame(
        [
            (f"{label}-{n}", label, "train", group(label, n))
            for label, count in classes.items()
            for n in range(count)
        ]
    )


def _fill(
    frame: pd.DataFrame, *, field: FieldParams | None = None, seed: int = 0, **calibration
) -> pd.DataFrame:
    limits = CalibrationParams(**{"min_images": 5, **calibration})
    return fill_splits(
        frame, holdout=HoldoutParams(), calibration=limits, field=field or FieldParams(), seed=seed
    )


def test_repeats_are_kept_once_in_test_first():
    """The same pixels in train and test stay in test; twice in one split, the first name stays."""
    frame = _frame([("x", 0, "train", ""), ("x", 0, "test", ""), ("y", 1, "val", ""), ("y", 1, "val", "")])
    kept, refusals = drop_repeats(frame)
    assert set(zip(kept["source"], kept["split"], strict=True)) == {("001", "test"), ("002", "val")}
    assert {(r.name, r.kind) for r in refusals} == {("000", "split_overlap"), ("003", "duplicate")}
    assert any("001, kept in test" in refusal.reason for refusal in refusals)


def test_an_image_of_two_classes_is_dropped_whole():
    """Nothing says which class is right, and training on both teaches neither."""
    frame = _frame([("x", 0, "train", ""), ("x", 1, "train", ""), ("y", 1, "train", "")])
    kept, refusals = drop_repeats(frame)
    assert list(kept["source"]) == ["002"]
    assert {(r.name, r.kind) for r in refusals} == {("000", "label_conflict"), ("001", "label_conflict")}


def test_an_unlabelled_copy_is_no_conflict():
    """A field image without label that is also in train is a repeat, and train keeps it."""
    kept, refusals = drop_repeats(_frame([("x", -1, "field", ""), ("x", 3, "train", "")]))
    assert list(kept["split"]) == ["train"]
    assert [r.kind for r in refusals] == ["split_overlap"]


def test_a_group_in_two_splits_stays_in_test():
    """A person in the test set is not also trained on; images without a group are left alone."""
    frame = _frame(
        [("a", 0, "train", "p1"), ("b", 0, "test", "p1"), ("c", 0, "train", ""), ("d", 0, "val", "")]
    )
    kept, refusals = drop_group_overlaps(frame)
    assert set(kept["source"]) == {"001", "002", "003"}
    assert [(r.name, r.kind) for r in refusals] == [("000", "group_overlap")]


def test_missing_splits_come_out_of_train_in_proportion():
    """20 % test, 10 % val of all, 10 % calibration of what train keeps, every class in its share."""
    filled = _fill(_train({0: 600, 1: 300, 2: 100}), min_images=1)
    counts = filled.groupby(["split", "label"]).size()
    assert counts["test"].tolist() == [120, 60, 20]
    assert counts["val"].tolist() == [60, 30, 10]
    assert counts["calibration"].tolist() == [42, 21, 7]
    assert len(filled) == 1000


def test_given_splits_stay():
    """A source's own test and validation images are never moved, and nothing is added to them."""
    given_rows = [(f"t{n}", n % 2, "test", "") for n in range(9)] + [
        (f"v{n}", n % 2, "val", "") for n in range(7)
    ]
    frame = _frame([*given_rows, *((f"x{n}", n % 2, "train", "") for n in range(100))])
    filled = _fill(frame)
    assert filled["split"].value_counts().to_dict() == {"train": 90, "calibration": 10, "test": 9, "val": 7}
    assert set(filled.loc[filled["split"] == "test", "sha256"]) == {f"t{n}" for n in range(9)}


def test_choice_ignores_names_and_order():
    """Renaming and shuffling files moves no image to another split; another seed does."""
    frame = _train({0: 50, 1: 50})
    shuffled = frame.sample(frac=1, random_state=1).assign(source=[f"new{n}" for n in range(100)])
    expected = _fill(frame).set_index("sha256")["split"]
    assert _fill(shuffled).set_index("sha256")["split"].sort_index().equals(expected.sort_index())
    assert not _fill(frame, seed=1).set_index("sha256")["split"].equals(expected)


def test_a_class_of_one_image_stays_in_train():
    """A class cannot be tested if it was never seen, so the last image is for training."""
    filled = _fill(_train({0: 60, 1: 1, 2: 2}))
    assert filled.loc[filled["label"] == 1, "split"].tolist() == ["train"]
    assert "train" in filled.loc[filled["label"] == 2, "split"].tolist()


def test_groups_stay_whole():
    """All images of a person go to one split, and every split still gets people."""
    filled = _fill(_train({0: 200, 1: 200}, group=lambda label, n: f"p{n % 40}"))
    assert filled.groupby("group")["split"].nunique().max() == 1
    counts = filled["split"].value_counts()
    assert abs(counts["test"] - 80) <= 5
    assert abs(counts["val"] - 40) <= 5


def test_groups_too_large_to_split_are_refused():
    """One person is the whole set: there is no honest test set."""
    with pytest.raises(UserError, match="no images in val, calibration, test"):
        _fill(_train({0: 200}, group=lambda label, n: "p1"))


@pytest.mark.parametrize(
    ("train", "expected"), [(200, 100), (400, 100), (1257, 125), (5000, 500), (50_000, 500)]
)
def test_calibration_is_a_tenth_within_100_and_500(train, expected):
    """min(500, 10 %), at least 100, never padded (C5)."""
    assert calibration_count(train, CalibrationParams()) == expected


def test_calibration_takes_at_most_half_of_train():
    """A set too small for honest calibration is refused with the numbers and the way out."""
    with pytest.raises(UserError, match="train has 199 images; 100 of them") as caught:
        calibration_count(199, CalibrationParams())
    assert "prepare.calibration.min_images" in caught.value.next_step
    assert calibration_count(199, CalibrationParams(min_images=20)) == 20


def test_field_images_lose_their_labels_and_half_become_field_test():
    """field stands for what devices see unlabelled; field_test keeps labels to measure there."""
    rows = [(f"f{n}", n, "field", "") for n in range(10)]
    filled = _fill(_frame([*rows, *((f"x{n}", n % 10, "train", "") for n in range(200))]))
    field, field_test = filled[filled["split"] == "field"], filled[filled["split"] == "field_test"]
    assert (len(field), len(field_test)) == (5, 5)
    assert set(field["label"]) == {-1}
    assert (field_test["label"] >= 0).all()


def test_field_share_is_taken_out_of_train():
    """A source without field images can give some of train for shift experiments."""
    filled = _fill(_train({0: 100, 1: 100}), field=FieldParams(share=0.2))
    assert filled["split"].value_counts()[["field", "field_test"]].tolist() == [20, 20]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(0, 100), st.booleans())
def test_take_is_exact_unique_and_spares_the_last(labels, count, keep_one):
    """Whatever the classes, `take` gives what it can, no row twice, and leaves one of each class if asked."""
    frame = pd.DataFrame({"sha256": [f"{n}" for n in range(len(labels))], "label": labels, "group": ""})
    chosen = take(frame, count, key="k", keep_one=keep_one)
    room = len(labels) - (len(set(labels)) if keep_one else 0)
    assert len(np.unique(chosen)) == len(chosen) == min(count, room)
    if keep_one:
        assert set(np.delete(labels, chosen)) == set(labels)
