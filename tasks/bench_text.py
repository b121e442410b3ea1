"""What `edgeloop bench` tells people: a table, what is slow in the models, and what to make of it."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fleet.lab.flags import FLAGS, WARNINGS
from tasks.bench import SLOWEST, BenchResult, Comparison, Measured
from tasks.terminal import plain

_LOG_WIDTH = 170
_MARK = "*"


def print_result(result: BenchResult) -> None:
    """Print a result on stdout."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _LOG_WIDTH, highlight=False)
    names = short_names([one.model for one in result.measured])
    console.print(
        f"{result.device}: {result.soc}, {result.cores_count} cores, "
        f"MNN {result.measured[0].cost.engine_version}"
    )
    console.print(_costs(result, names))
    for line in [
        *_bound(result.measured[0]),
        *(_compared(comparison, names) for comparison in result.comparisons),
        *_doubts(result.measured, names, FLAGS, lambda one: one.cost.flags, _MARK),
        *_doubts(result.measured, names, WARNINGS, lambda one: one.warnings, "!"),
    ]:
        console.print(line, markup=False, soft_wrap=True)
    for one in result.measured:
        if one.layers:
            console.print(_slowest(one, names[one.model]))
        for layer in one.layers:
            if layer.outlier:
                console.print(f"  ! {plain(layer.layer)} takes {layer.why}", markup=False, soft_wrap=True)


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Paths without the folders that all of them share."""
    parents = [Path(model).parent for model in models]
    if len({parent.is_absolute() for parent in parents}) > 1:
        return {model: model for model in models}
    shared = Path(os.path.commonpath(parents))
    return {model: str(Path(model).relative_to(shared)) for model in models}


def _costs(result: BenchResult, names: Mapping[str, str]) -> Table:
    heads = ("model", "config", "P50", "P90", "P95", "P99", "P99 at most", "first", "load", "memory", "1/s")
    table = Table(*heads, "camera to class", "package", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for one in result.measured:
        m = one.cost
        mark = _MARK if m.flags else ""
        times = [_ms(value) + mark for value in (m.p50_ms, m.p90_ms, m.p95_ms, m.p99_ms)]
        memory = "-" if m.peak_memory_mb is None else f"{m.peak_memory_mb:.1f} MiB"
        rest = [_ms(m.p99_bound.value), _ms(m.first_ms), _ms(m.load_ms), memory, f"{m.throughput_per_s:.0f}"]
        package = f"{one.package_bytes / 1e6:.1f} MB"
        table.add_row(names[one.model], one.config, *times, *rest, _ms(m.end_to_end_p50_ms), package)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


def _bound(one: Measured) -> Iterator[str]:
    if (bound := one.cost.p99_bound).rank is not None:
        yield f"P99 at most: 99 % sure, rank {bound.rank} of {bound.n} samples"


def _compared(comparison: Comparison, names: Mapping[str, str]) -> str:
    low, high = comparison.ratio_min, comparison.ratio_max
    verdict = "slower" if low > 1 else "faster" if high < 1 else "no difference shown"
    return (
        f"{names[comparison.model]} {comparison.config}: {verdict}, P50 {comparison.ratio:.2f} of the first's"
        f" ({low:.2f} to {high:.2f} by rounds)"
    )


def _doubts(
    measured: Sequence[Measured],
    names: Mapping[str, str],
    meanings: Mapping[str, str],
    of: Callable[[Measured], Sequence[str]],
    mark: str,
) -> Iterator[str]:
    """One line for each flag or warning that was raised: of whom, and what it means."""
    for flag, meaning in meanings.items():
        raised = [f"{names[one.model]} {one.config}" for one in measured if flag in of(one)]
        if raised:
            who = "all" if len(raised) == len(measured) > 1 else ", ".join(raised)
            yield f"{mark} {flag} ({who}): {meaning}"


def _slowest(one: Measured, name: str) -> Table:
    table = Table(f"slowest layers of {name}", "operator", "P50", "share", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for layer in sorted(one.layers, key=lambda layer: -layer.p50_ms)[:SLOWEST]:
        operator = layer.op_type + (" int8" if layer.int8 else "")
        table.add_row(plain(layer.layer), operator, _ms(layer.p50_ms), f"{layer.share:.0%}")
    return table
