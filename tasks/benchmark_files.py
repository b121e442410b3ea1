"""Raw samples and layer profiles of a benchmark as files that other programs read."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fleet.device.bench import RawRun
from fleet.lab.layers import Layer
from tasks.stage import write_text

_SAMPLES = pa.schema(
    [
        ("variant", pa.string()),
        ("config", pa.string()),  # threads-precision-memory
        ("round", pa.int16()),
        ("phase", pa.string()),  # load, first, steady, end_to_end
        ("index", pa.int32()),  # in the order they were taken
        ("latency_ms", pa.float64()),
    ]
)


def write_samples(runs: Mapping[tuple[str, str], Sequence[RawRun]], path: Path) -> None:
    """Every latency measured, one row each, as Parquet.

    Args:
        runs: (variant, config) to its runs in the order of the rounds.
        path: Written as a whole or not at all.
    """
    rows = [
        {"variant": v, "config": c, "round": r, "phase": phase, "index": i, "latency_ms": ms}
        for (v, c), of_job in runs.items()
        for r, run in enumerate(of_job)
        for phase, samples_ms in _phases(run)
        for i, ms in enumerate(samples_ms)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        pq.write_table(pa.Table.from_pylist(rows, _SAMPLES), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _phases(run: RawRun) -> Iterator[tuple[str, Sequence[float]]]:
    yield "load", [run.load_ms]
    yield "first", [run.first_ms]
    yield "steady", run.latency_ms
    yield "end_to_end", run.end_to_end_ms


def write_layers(layers: Mapping[str, Sequence[Layer]], path: Path) -> None:
    """One row a layer that ran, in the order they ran: what it took, and whether its peers are far faster."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "layer", "op_type", "int8", "p50_ms", "share", "outlier", "why"])
    for variant, of_variant in layers.items():
        for row in of_variant:
            times = f"{row.p50_ms:.4f}", f"{row.share:.4f}"
            flags = int(row.outlier), row.why
            writer.writerow([variant, row.layer, row.op_type, int(row.int8), *times, *flags])
    write_text(path, text.getvalue())
