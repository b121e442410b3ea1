"""The budgets of the build line beside what was measured, gathered from the other results.

python tests/bench/budgets.py
"""

import json
from collections.abc import Iterator
from typing import Any

from report import FOLDER, conditions, parser, write

_NOT_MEASURED = {"measured": "-", "met": "not measured"}


def read(name: str) -> Any:
    """One result."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def timed() -> Iterator[dict[str, Any]]:
    """Budgets in seconds and ratios of seconds."""
    parts = {row["part"]: row for row in read("overhead")["rows"]}
    yield _row("build of digits, s", "< 240", (s := parts["whole build"]["s"]), s < 240)
    yield _row(
        "build of digits with nothing to do, s", "< 3", (s := parts["build with nothing to do"]["s"]), s < 3
    )
    yield _row("digits: time that is no stage's, %", "< 25", (p := parts["overhead"]["share %"]), p < 25)
    yield {"what": "time that is no stage's, builds over 30 min, %", "budget": "< 5"} | _NOT_MEASURED
    yield {"what": "whole loop of digits, min", "budget": "< 8"} | _NOT_MEASURED
    for row in read("qat_step")["rows"]:
        ratio = row["qat / float"]
        yield _row(f"QAT step / float step, {row['architecture']}", "<= 2.5", ratio, ratio <= 2.5)
    for row in read("train_vs_plain")["rows"][1:]:
        ratio = row["times edgeloop's CPU time"]
        yield _row(f"CPU time of training, {row['loop']} / edgeloop", ">= 1", ratio, ratio >= 1)


def measured(preset: str, variants: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Budgets of accuracy, parity and size of one preset."""
    by_kind = {"-".join(v["name"].split("-")[1:3]): v for v in variants}
    trained, pruned, int8 = by_kind["p0-fp32"], by_kind["p30-fp32"], by_kind["p30-i8"]
    worst = max(v["parity_max_rel_error"] for v in (trained, pruned))
    yield _row(f"{preset}: fp32 parity, of the output's range", "< 1e-4", worst, worst < 1e-4)
    same = 100 * int8["agreement"]
    yield _row(f"{preset}: int8, same prediction as fake-quant, %", ">= 99.9", same, same >= 99.9)
    yield _row(f"{preset}: int8, cosine with fake-quant", ">= 0.9999", (c := int8["cosine"]), c >= 0.9999)
    lost = 100 * (trained["top1"] - pruned["top1"])
    yield _row(f"{preset}: top-1 lost by pruning, pp", "<= 1", lost, lost <= 1)
    lost = 100 * (pruned["top1"] - int8["top1"])
    yield _row(f"{preset}: top-1 lost by int8 against its parent, pp", "<= 0.5", lost, lost <= 0.5)
    smaller = trained["size_bytes"] / int8["size_bytes"]
    yield _row(f"{preset}: size, fp32 / pruned int8", ">= 7", smaller, smaller >= 7)
    lost = 100 * (trained["top1"] - int8["top1"])
    yield _row(f"{preset}: top-1 lost by both, pp", "<= 1", lost, lost <= 1)


def _row(what: str, target: str, value: float, met: bool) -> dict[str, Any]:
    return {"what": what, "budget": target, "measured": value, "met": "yes" if met else "no"}


def main() -> None:
    """Gather and write."""
    parser(__doc__).parse_args()
    rows = [*timed()]
    for preset, build in sorted(read("builds").items()):
        rows += measured(preset, build["variants"])
    write(
        FOLDER / "budgets.json",
        {
            "title": "Budgets of the build line",
            "command": "python tests/bench/budgets.py",
            "text": "Each number comes from the other pages of this folder, which say how it was measured and"
            " with what n. A negative loss is a gain.",
            "conditions": conditions(),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
