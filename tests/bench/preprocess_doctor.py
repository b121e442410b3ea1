"""Does `edgeloop doctor --preprocess` name a mismatch that was planted, on real photographs?

    python tests/bench/preprocess_doctor.py

Needs the models of the presets cifar10, clothing and grocery (`edgeloop build --preset NAME`).
"""

import hashlib
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from report import FOLDER, conditions, parser, write

from fleet.device.engine import ENGINE_VERSION, Session
from fleet.device.preprocess import Preprocess
from tasks.mnn.picture_folder import PictureFolder, read_folder
from tasks.mnn.preprocess_alternatives import DECODERS, STEPS, Pipeline, claimed_pipeline
from tasks.mnn.preprocess_behaviour import Predict
from tasks.mnn.preprocess_diagnosis import Diagnosis, diagnose, engine_predict

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ("cifar10", "clothing", "grocery")
IMAGES = 200


def planted(right: Preprocess) -> Iterator[tuple[str, Preprocess, dict[str, str]]]:
    """(name, record, steps of the app that no record can say) of what an app may do to a model's images."""
    none, one, per_255 = (0.0,) * 3, (1.0,) * 3, (1 / 255,) * 3
    yield "nothing", right, {}
    yield "BGR", replace(right, color_order="BGR"), {}
    yield "0..1, no mean and std", replace(right, mean=none, std=one), {}
    yield "0..255, no scaling", replace(right, mean=none, std=per_255), {}
    yield "-1..1", replace(right, mean=(0.5,) * 3, std=(0.5,) * 3), {}
    yield "BGR and 0..255", replace(right, color_order="BGR", mean=none, std=per_255), {}
    yield "NHWC values", right, {"layout": "NHWC values in an NCHW tensor"}
    yield "rows and columns swapped", right, {"layout": "NCWH (rows and columns swapped)"}
    yield "stretched", right, {"crop": "none, stretched to a square"}
    yield "letterboxed", right, {"crop": "none, letterboxed"}
    yield "nearest resize", right, {"resize": "nearest"}


def outcome(found: Diagnosis, right: Pipeline) -> str:
    """`named`, `cannot tell`, or what was named wrongly."""
    wanted = {
        STEPS[f.name] for f in fields(Pipeline) if getattr(found.claimed, f.name) != getattr(right, f.name)
    }
    steps = {step.step: step for step in found.steps if step.verdict == "mismatch"}
    truth = {STEPS[f.name]: getattr(right, f.name) for f in fields(Pipeline)}
    wrong = [
        step.mismatch
        for name, step in steps.items()
        if name not in wanted
        or str(getattr(truth[name], "name", truth[name])) not in {step.home, *step.rivals}
    ]
    if wrong:
        return f"wrong: {'; '.join(wrong)}"
    if not wanted:
        return "none named" if found.verdict == "fits" else "none named, not all proven"
    if missed := wanted - set(steps):
        return "cannot tell" if not steps else f"named, but for {', '.join(sorted(missed))}"
    return "named"


def remembering(predict: Predict) -> Predict:
    """The same tensor need not be asked twice."""
    known: dict[bytes, npt.NDArray[np.float32]] = {}

    def ask(tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        key = hashlib.sha1(tensor.tobytes(), usedforsecurity=False).digest()
        if key not in known:
            known[key] = predict(tensor)
        return known[key]

    return ask


def pictures_as_taken(preset: str, folder: Path, labels: list[str]) -> PictureFolder:
    """The preset's test images as they were taken, of its source's archive."""
    params = yaml.safe_load((ROOT / "presets" / preset / "params.yaml").read_text(encoding="utf-8"))
    with tarfile.open(ROOT / "presets" / preset / params["prepare"]["source"]["path"]) as tar:
        members = [
            m for m in tar.getmembers() if m.isfile() and m.name.removeprefix("./").startswith("test/")
        ]
        tar.extractall(folder, members=members, filter="data")
    return read_folder(folder, labels, len(labels), IMAGES)


def measure(preset: str, folder: Path) -> Iterator[dict[str, Any]]:
    """One row for each mismatch planted."""
    (place,) = (ROOT / "presets" / preset / "models" / "mnn").glob("*-i8-*")
    card = json.loads((place / "card.json").read_text(encoding="utf-8"))
    right = Preprocess.from_dict(card["preprocess"])
    images = pictures_as_taken(preset, folder, card["labels"])
    with Session(place / "model.mnn") as session:
        ask = remembering(engine_predict(session))
        # Decoded once: decoders are not among what is planted.
        pictures = [DECODERS["Pillow"](data) for data in images.pictures]
        for name, claimed, steps in planted(right):
            fed = replace(claimed_pipeline(claimed), **steps)
            alone, known = (
                diagnose(ask, pictures, images.labels, claimed, as_fed=fed, trained=trained)
                for trained in (None, right)
            )
            print(preset, name, alone.mismatches, known.mismatches, file=sys.stderr, flush=True)
            yield {
                "preset": preset,
                "planted": name,
                "n": known.pictures,
                "top-1 so": f"{known.claimed_top1:.1%}",
                "top-1 as trained": f"{known.home_top1:.1%}",
                "change": str(known.change),
                "with the card": outcome(known, claimed_pipeline(right)),
                "from behaviour alone": outcome(alone, claimed_pipeline(right)),
            }


def main() -> None:
    """Plant every mismatch in every preset and write the result."""
    parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for preset in PRESETS:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(preset, Path(folder))
    write(
        FOLDER / "preprocess_doctor.json",
        {
            "title": "Mismatches planted, and what the doctor names",
            "command": "python tests/bench/preprocess_doctor.py",
            "text": "The int8 model of each preset gets test images prepared wrongly on purpose; does"
            " `edgeloop doctor --preprocess DIR` name exactly that? With the card the difference of a"
            " record is told in any case; these are the verdicts from the images. `cannot tell` is right"
            " where the change is not significant: naming needs a gain in likelihood of 3.5 standard errors,"
            " and an interval at 95 % of the change in accuracy above zero. CIFAR-10's images are square, so"
            " no crop differs.",
            "conditions": conditions(engine=ENGINE_VERSION, variant="mbv3s-p30-i8", images=IMAGES),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
