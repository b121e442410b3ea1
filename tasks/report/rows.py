"""The table of variants: what each is, how sure its accuracy is, what it costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from scipy.special import betaincinv  # scipy.stats takes seconds to import

from tasks.report.evidence import Comparison, Device, Evidence
from tasks.variants import Precision, Variant

CONFIDENCE = 0.95
_PRECISIONS = get_args(Precision)  # from the most bits to the fewest


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A share 0..1 with its confidence interval."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Latency:
    """One variant on one device; None where it was not measured."""

    device: str
    n: int | None
    values_ms: Mapping[str, float | None]
    """p50, p90, p95, p99, max, load, first, end_to_end_p50 and the upper bounds p95_bound, p99_bound."""
    ranks: Mapping[str, int | None]
    """Which order statistic each bound is."""
    load_memory_mib: float | None
    peak_memory_mib: float | None
    flags: tuple[str, ...]
    """Why the latency is not valid."""
    warnings: tuple[str, ...]
    """What leaves it valid and ought to be known."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant."""

    key: str
    """The letter that stands for it in the plots."""
    name: str
    variant: Variant
    top1: Interval | None
    size_mb: float | None
    """10^6 bytes."""
    macs_m: float | None
    parity_error: float | None
    """Largest error of a logit as a share of the output range."""
    agreement: float | None
    """Share of test images on which engine and torch predict the same class."""
    int8_ops: int | None
    latencies: tuple[Latency, ...]
    """One a device, the first is the one shown."""
    comparison: Comparison | None
    """Against the champion."""
    mnn_sha256: str

    @property
    def described(self) -> str:
        """The name in words."""
        pruned = f"{self.variant.pruned_percent} % pruned" if self.variant.pruned_percent else "unpruned"
        return f"{pruned}, {self.variant.precision}, {self.variant.size_px} px"

    @property
    def latency(self) -> Latency | None:
        """On the first device."""
        return self.latencies[0] if self.latencies else None


def binomial_interval(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """The exact interval of a share after Clopper and Pearson: it covers at least as often as it says."""
    alpha = 1 - confidence
    low = 0.0 if successes == 0 else float(betaincinv(successes, n - successes + 1, alpha / 2))
    high = 1.0 if successes == n else float(betaincinv(successes + 1, n - successes, 1 - alpha / 2))
    return Interval(value=successes / n, low=low, high=high, n=n)


def rows(evidence: Evidence) -> tuple[Row, ...]:
    """One row a variant, the unpruned first, by precision from fp32 to int8.

    Raises:
        UserError: a variant's name does not decode, or a report holds text where a number belongs.
    """
    names = sorted({*evidence.convert.variants, *evidence.parity.variants, *evidence.cards})
    parsed = sorted((Variant.parse(name) for name in names), key=_order)
    return tuple(_row(evidence, variant, _letter(index)) for index, variant in enumerate(parsed))


def _order(variant: Variant) -> tuple[Any, ...]:
    bits = _PRECISIONS.index(variant.precision)
    return variant.architecture, -variant.size_px, variant.pruned_percent, bits


def _letter(index: int) -> str:
    """A..Z, then A1, B1 and so on."""
    turn, letter = divmod(index, 26)
    return chr(ord("A") + letter) + (str(turn) if turn else "")


def _row(evidence: Evidence, variant: Variant, key: str) -> Row:
    name, parity = variant.name, evidence.parity
    top1, n = parity.share(f"{name}/top1"), parity.number(f"{name}/n")
    size = evidence.convert.number(f"{name}/size_bytes")
    macs = (evidence.prune if variant.pruned_percent else evidence.train).number("macs_count")
    ops = parity.number(f"{name}/int8_ops_count")
    card = evidence.cards.get(name)
    return Row(
        key=key,
        name=name,
        variant=variant,
        top1=binomial_interval(round(top1 * n), int(n)) if top1 is not None and n else None,
        size_mb=None if size is None else size / 1e6,
        macs_m=None if macs is None else macs / 1e6,
        parity_error=parity.number(f"{name}/max_rel_error"),
        agreement=parity.share(f"{name}/agreement"),
        int8_ops=None if ops is None else int(ops),
        latencies=tuple(
            _latency(device, name) for device in evidence.devices if name in device.bench.variants
        ),
        comparison=evidence.gate.comparison.get(name) if evidence.gate else None,
        mnn_sha256=card.text("mnn_sha256") if card else "",
    )


def _latency(device: Device, name: str) -> Latency:
    bench = device.bench
    percentiles = (
        "p50",
        "p90",
        "p95",
        "p99",
        "max",
        "p95_bound",
        "p99_bound",
        "load",
        "first",
        "end_to_end_p50",
    )
    n = bench.number(f"{name}/n")
    ranks = {p: bench.number(f"{name}/{p}_bound_rank") for p in ("p95", "p99")}
    return Latency(
        device=device.name,
        n=None if n is None else int(n),
        values_ms={p: bench.number(f"{name}/{p}_ms") for p in percentiles},
        ranks={p: None if rank is None else int(rank) for p, rank in ranks.items()},
        load_memory_mib=bench.number(f"{name}/load_memory_mb"),
        peak_memory_mib=bench.number(f"{name}/peak_memory_mb"),
        flags=tuple(bench.text(f"{name}/flags").split()),
        warnings=tuple(bench.text(f"{name}/warnings").split()),
    )


def headline(table: tuple[Row, ...]) -> Row | None:
    """The variant a release stands or falls with: the most compressed one, int8 before others."""
    return max(
        (row for row in table if row.top1),
        key=lambda row: (
            _PRECISIONS.index(row.variant.precision),
            row.variant.pruned_percent,
            -row.variant.size_px,
        ),
        default=None,
    )
