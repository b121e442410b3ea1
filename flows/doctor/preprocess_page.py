"""What `edgeloop doctor --preprocess` found, to read."""

import json
import sys
from pathlib import Path

from flows.doctor.preprocess import USUAL_PICTURES, Examined, as_record, examine_preprocess
from flows.doctor.table import print_findings, print_rows
from tasks.mnn.preprocess_diagnosis import MIN_PICTURES, MUST_BE_SURE, Diagnosis
from tasks.workspace import Workspace


def run(
    workspace: Workspace,
    folder: Path,
    *,
    model: str | None,
    record: Path | None,
    images: int | None,
    as_json: bool,
) -> int:
    """Print what was found; returns the exit code: 0 when nothing is a problem, else 2."""
    count = USUAL_PICTURES if images is None else images
    examined = examine_preprocess(workspace, folder, model=model, record=record, images=count)
    if as_json:
        print(json.dumps(examined.to_dict(), indent=1))
    else:
        _print(examined)
    return 0 if examined.ok else 2


def _print(examined: Examined) -> None:
    print_findings(examined.findings)
    d = examined.diagnosis
    record = as_record(d.home)
    if d.verdict == "mismatch" and record:
        print(f"\nA record that suits the model{_but(d)}:\n{json.dumps(record.to_dict())}")
    if d.pictures >= MIN_PICTURES:
        _print_costs(d)
    sys.stdout.flush()


def _but(d: Diagnosis) -> str:
    unsure = [s.step for s in d.steps if s.verdict == "cannot tell" and s.step in MUST_BE_SURE]
    return f" (these images do not decide: {', '.join(unsure)})" if unsure else ""


def _print_costs(d: Diagnosis) -> None:
    right = f", {d.home_top1:.1%} right" if d.home_top1 is not None else ""
    way = "as suits the model best" if d.labelled else "as trained" if d.claimed != d.home else "as claimed"
    print(
        f"\nWhat a single difference costs, from {d.pictures} images prepared {way}{right}."
        "\nLook for what your app does, or for an accuracy like your app's:\n"
    )
    before = 100 * d.home_top1 if d.home_top1 is not None else 100.0
    print_rows(
        ("step", "this instead", "top-1" if d.labelled else "same class", "change, 95 % interval"),
        [(t.step, t.choice, f"{before + t.change.points:.1f} %", str(t.change)) for t in d.trials],
    )
