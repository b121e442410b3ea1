"""The pruning ladder as a table and as a plot: what each step removed and what it cost."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path

import altair as alt

from tasks.prune_latency import RungLatency


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder; the first is the unpruned parent."""

    ratio: float
    """Share of channels asked to be removed from each group, 0..1."""
    channels_removed_ratio: float
    """Share of all channels removed, after rounding and protection."""
    macs_count: int
    """Multiply-accumulates for one image."""
    params_count: int
    val_top1_pruned: float
    """Validation accuracy right after the channels were removed, 0..1."""
    val_top1: float
    """Validation accuracy after fine-tuning, 0..1."""

    @property
    def name(self) -> str:
        """In metrics and measurements; MLflow refuses a per cent sign."""
        return f"p{100 * self.ratio:g}" if self.ratio else "parent"


def write_csv(rungs: Sequence[Rung], path: Path) -> None:
    """One row a rung, the parent first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Rung)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(_rounded(rung) for rung in rungs)


def write_html(
    rungs: Sequence[Rung], title: str, path: Path, measured: Mapping[str, RungLatency] | None = None
) -> None:
    """Accuracy over multiply-accumulates, the parent marked, and the table; one file, no script.

    The plot is drawn to SVG here: the same rungs give the same bytes.

    Args:
        rungs: The parent first.
        title: Of the page.
        path: Of the page.
        measured: Engine latency by the rungs' names; adds a plot of accuracy over latency and the columns.
    """
    table: list[dict[str, int | str]] = [
        {**_rounded(rung), **(_latency_cells(measured[rung.name]) if measured else {})} for rung in rungs
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in table[0])
    rows = "".join(f"<tr>{''.join(f'<td>{v}</td>' for v in row.values())}</tr>\n" for row in table)
    macs_m = [rung.macs_count / 1e6 for rung in rungs]
    plots = _svg(macs_m, "multiply-accumulates for one image (millions)", rungs)
    if measured:
        p50_ms = [measured[rung.name].p50_ms for rung in rungs]
        plots += _svg(p50_ms, "engine latency, P50 (ms)", rungs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}</style>\n"
        f"</head><body><h1>{escape(title)}</h1>\n{plots}\n<table>\n<tr>{head}</tr>\n{rows}</table></body></html>\n",
        encoding="utf-8",
    )


def _rounded(rung: Rung) -> dict[str, int | str]:
    """Fixed decimals: reprs of floats would carry noise into the report."""
    return {k: v if isinstance(v, int) else f"{v:.4f}" for k, v in asdict(rung).items()}


def _latency_cells(measurement: RungLatency) -> dict[str, str]:
    return {
        "p50_ms": f"{measurement.p50_ms:.4f}",
        "p95_ms": f"{measurement.p95_ms:.4f}",
        "latency_flags": ", ".join(measurement.flags),
    }


def _svg(costs: Sequence[float], axis: str, rungs: Sequence[Rung]) -> str:
    """Accuracy over what a rung costs."""
    values = [
        {"cost": cost, "top1": 100 * top1, "model": model, "label": f"{rung.ratio:.0%}"}
        for index, (cost, rung) in enumerate(zip(costs, rungs, strict=True))
        for model, top1 in (
            [("parent", rung.val_top1)]
            if index == 0
            else [("pruned", rung.val_top1_pruned), ("fine-tuned", rung.val_top1)]
        )
    ]
    order, scale = ["parent", "fine-tuned", "pruned"], alt.Scale(zero=False, padding=24)
    base = alt.Chart(alt.InlineData(values=values), width=560, height=360).encode(
        x=alt.X("cost:Q", title=axis, scale=scale),
        y=alt.Y("top1:Q", title="validation top-1 (%)", scale=scale),
        color=alt.Color("model:N", sort=order, title=None),
    )
    points = base.mark_point(filled=True, size=90).encode(shape=alt.Shape("model:N", sort=order, legend=None))
    chart = points + base.mark_text(dx=8, dy=-8, align="left").encode(text="label:N")
    svg = io.StringIO()
    chart.save(svg, format="svg")
    return svg.getvalue()
