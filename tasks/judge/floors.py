"""What every variant has to keep by itself: accuracy, parity, size, and on each device latency and memory."""

import math
from dataclasses import replace

import numpy as np

from fleet.lab.flags import WARNINGS
from fleet.lab.statistics import upper_bound
from tasks.judge.check import About, Check, judged
from tasks.judge.params import GateParams
from tasks.judge.regression import MIN_N
from tasks.paired import Paired
from tasks.variants import Variant

_ROUNDED = 1.005
"""parity.json gives errors to three digits, so up to half a percent above what was held to the tolerance."""


def accuracy_checks(parity: About, paired: Paired | None, params: GateParams) -> list[Check]:
    """The floor, and what was lost against the variant this one was made from.

    Args:
        parity: What parity.json says of the variant.
        paired: The variant and its parent on the same images; None where that is not known.
        params: The thresholds.
    """
    name = parity.variant
    top1, n = parity.number("top1"), parity.count("n")
    checks = [
        judged(
            f"{name}: accuracy floor",
            top1,
            params.min_top1,
            unit="share of the test set",
            n=n,
            evidence=f"parity.json {name}/top1",
            bound="at least",
        )
    ]
    parent = parent_of(name)
    if parent is not None:
        parent_top1 = replace(parity, variant=parent).number("top1")
        drop_pp = None if top1 is None or parent_top1 is None else round(100 * (parent_top1 - top1), 4)
        pruned = Variant.parse(name).precision == "fp32"
        check = judged(
            f"{name}: accuracy lost against {parent}",
            drop_pp,
            params.max_prune_drop_pp if pruned else params.max_precision_drop_pp,
            unit="pp",
            n=n,
            evidence=f"parity.json {parent}/top1 - {name}/top1{_interval(paired)}",
        )
        checks.append(_within_noise(check, paired))
    return checks


def parent_of(name: str) -> str | None:
    """The variant that one was made from; None for the trained fp32 one."""
    variant = Variant.parse(name)
    if variant.precision != "fp32":
        return replace(variant, precision="fp32").name
    return replace(variant, pruned_percent=0).name if variant.pruned_percent else None


def _interval(paired: Paired | None) -> str:
    return f", 95 % interval {paired.low_pp:.2f} to {paired.high_pp:.2f} pp" if paired else ""


def _within_noise(check: Check, paired: Paired | None) -> Check:
    """A loss that few images cannot tell from none decides nothing, as against the champion."""
    beyond = check.verdict == "fail" and isinstance(check.threshold, float)
    if not beyond or paired is None or paired.n >= MIN_N or paired.low_pp > float(check.threshold or 0):
        return check
    note = f"fewer than {MIN_N} images and the interval reaches below the limit: the accuracy floor decides"
    return replace(check, verdict="inconclusive", note=note)


def parity_checks(parity: About, params: GateParams) -> list[Check]:
    """The converted model computes what was trained; an int8 one does so in int8."""
    name, n = parity.variant, parity.count("n")
    agreement, ok = parity.number("agreement"), parity.number("parity_ok")
    reasons = [reason] if (reason := parity.text("reason")) else []
    if Variant.parse(name).precision == "i8" and ok is not None:
        int8_ops_count = parity.count("int8_ops_count")
        if int8_ops_count == 0 and not reasons:
            reasons = ["no operator ran in int8"]
        ok = None if int8_ops_count is None else int(bool(ok) and int8_ops_count > 0)
    error, tolerance = parity.number("max_rel_error"), parity.number("tolerance_rel")
    if error is None or tolerance is None or parity.count("elementwise_n") is None:
        ok = None
    elif ok and error > tolerance * _ROUNDED:
        ok, reasons = 0, [*reasons, "the error is beyond the tolerance"]
    layer = parity.text("first_diverging_layer") or "none"
    allowed = None if n is None else max(1, math.ceil((1 - params.min_agreement) * n - 1e-9))
    return [
        Check(
            name=f"{name}: parity with torch and ONNX Runtime",
            measured=error,
            threshold=tolerance,
            unit="of the output range",
            n=parity.count("elementwise_n"),
            verdict="not measured" if ok is None else "pass" if ok else "fail",
            evidence="; ".join(
                (f"parity.json {name}/parity_ok", *reasons, f"first diverging layer: {layer}")
            ),
        ),
        judged(
            f"{name}: predictions that differ from torch",
            None if n is None or agreement is None else round((1 - agreement) * n),
            allowed,
            unit="images",
            n=n,
            evidence=f"parity.json {name}/agreement",
        ),
    ]


def size_check(convert: About, params: GateParams) -> Check:
    """The model file's size."""
    size_bytes = convert.number("size_bytes")
    return judged(
        f"{convert.variant}: model size",
        None if size_bytes is None else size_bytes / 1e6,
        params.max_size_mb,
        unit="MB",
        n=None,
        evidence=f"convert.json {convert.variant}/size_bytes",
    )


def device_checks(device: str, bench: About, params: GateParams) -> list[Check]:
    """Latency and memory on one device; of a noisy host latency is inconclusive, fast or slow."""
    name, n, flags = bench.variant, bench.count("n"), bench.text("flags")
    checks = []
    for percentile, quantile, limit_ms in (
        ("p95", 0.95, params.max_p95_ms),
        ("p99", 0.99, params.max_p99_ms),
    ):
        # Without flags it is unknown whether the host was quiet: that is no measurement.
        bound_ms = bench.number(f"{percentile}_bound_ms") if flags is not None else None
        rank = bench.count(f"{percentile}_bound_rank")
        if bound_ms is not None and n is not None and rank != (right := _bound_rank(n, quantile)):
            allowed = (
                f"rank {right} of {n} samples" if right else f"none: {n} samples bound no such percentile"
            )
            raise bench.impossible(f"{percentile}_bound_rank", allowed)
        check = judged(
            f"{name} on {device}: {percentile.upper()} latency, 99 % bound",
            bound_ms if n is not None else None,  # of no samples there is no bound
            limit_ms,
            unit="ms",
            n=n,
            evidence=f"benchmark/{device}.json, order statistic {rank} of {n}",
        )
        if flags and bound_ms is not None:  # an interrupted process measured the host, not the model
            check = replace(check, verdict="inconclusive", evidence=f"latency invalid: {flags}")
        checks.append(check)
    return [*checks, _memory_check(device, bench, params)]


def _bound_rank(n: int, quantile: float) -> int | None:
    """Which of n samples in order bounds a quantile at 99 % confidence; None where none does."""
    return upper_bound(np.arange(n, dtype=np.float64), quantile).rank


def _memory_check(device: str, bench: About, params: GateParams) -> Check:
    peak_mb = bench.number("peak_memory_mb")
    warned = "memory" in (bench.text("warnings") or "").split()
    note = f"warning: {WARNINGS['memory']}" if warned else ""
    return judged(
        f"{bench.variant} on {device}: peak memory",
        peak_mb,
        params.max_peak_memory_mb,
        unit="MiB",
        n=None,
        evidence=f"benchmark/{device}.json {bench.variant}/peak_memory_mb",
        required=False,  # not every system exposes it
        note=note,
    )
