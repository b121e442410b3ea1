"""What each section of the report shows, drawn and counted; the template only lays it out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from fleet.lab.flags import FLAGS, WARNINGS
from tasks.judge.check import Check
from tasks.report import matrix, plots
from tasks.report.bars import Bar, bars, class_deltas
from tasks.report.changes import Changes, changes
from tasks.report.evidence import Device, Evidence
from tasks.report.pairing import ClassRow, Confused, Pairing, class_rows, most_confused, pair
from tasks.report.pictures import Picture, changed_pictures
from tasks.report.rows import Row, headline, rows
from tasks.report.text import shorten
from tasks.report.verdict import Head, head, rank

_BARS = 15
_CONFUSED = 12
_SLOWEST = 10
_LAYER_COLUMNS = 28  # names of layers differ in the middle
_MIN_CLASSES_TO_CUT = 24


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Latencies of one device."""

    device: str
    figure: Markup | None
    config: str
    """Threads, precision and memory mode the histogram is of."""
    configs: tuple[tuple[str, str, int, float, float], ...]
    """Variant, configuration, n, P50 and P95 in ms, where there is more than one configuration."""


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """Layers of one device."""

    device: str
    variant: str
    figure: Markup
    table: tuple[Mapping[str, Any], ...]
    outliers: tuple[Mapping[str, Any], ...]
    """Of every variant."""


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Confusion and changes by class."""

    rows: tuple[ClassRow, ...]
    deltas: Markup | None
    deltas_count: int
    """Bars in that figure."""
    changed_count: int
    """Classes that gained or lost."""
    confused: tuple[Confused, ...]
    matrix: Markup
    matrix_count: int
    """Classes in the matrix."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All of the report."""

    evidence: Evidence
    head: Head
    rows: tuple[Row, ...]
    headline: Row | None
    flags: tuple[tuple[str, str], ...]
    fronts: tuple[tuple[str, Markup], ...]
    ladder: Markup | None
    layer_errors: Markup | None
    layer_error_rows: tuple[Mapping[str, Any], ...]
    changes: Changes | None
    pairing: Pairing | None
    classes: Classes | None
    pictures: tuple[Picture, ...]
    distributions: tuple[Distribution, ...]
    slowest: tuple[Slowest, ...]
    checks: tuple[Check, ...]
    """What did not pass first."""

    @property
    def compared(self) -> bool:
        """Whether the gate compared any variant with a champion."""
        return any(row.comparison for row in self.rows)

    @property
    def invalid(self) -> list[str]:
        """Letters of the variants whose latency is not valid on the first device."""
        return [row.key for row in self.rows if row.latency and row.latency.flags]

    @property
    def engines(self) -> list[str]:
        """Versions of the engine the models were converted for."""
        versions = {card.text("engine_version") for card in self.evidence.cards.values()}
        return sorted(versions - {""})

    @property
    def rungs(self) -> tuple[Mapping[str, Any], ...]:
        """The pruning ladder's table."""
        return _records(self.evidence.ladder)


def page(evidence: Evidence) -> Page:
    """Draw and count everything.

    Raises:
        UserError: a piece of evidence contradicts itself.
    """
    table = rows(evidence)
    chosen = headline(table)
    pairing = pair(evidence, table)
    checks = evidence.gate.checks if evidence.gate else ()
    return Page(
        evidence=evidence,
        head=head(evidence),
        changes=changes(evidence),
        rows=table,
        headline=chosen,
        flags=_marks(table),
        fronts=_fronts(table, evidence),
        ladder=None if evidence.ladder is None else plots.ladder(evidence.ladder),
        layer_errors=_layer_errors(evidence.layer_errors),
        layer_error_rows=_records(evidence.layer_errors),
        pairing=pairing,
        classes=None if pairing is None else _classes(pairing),
        pictures=changed_pictures(pairing, evidence.dataset) if pairing and evidence.dataset else (),
        distributions=tuple(filter(None, (_distribution(device, table) for device in evidence.devices))),
        slowest=tuple(filter(None, (_slowest(device, chosen) for device in evidence.devices))),
        checks=tuple(sorted(checks, key=rank)),
    )


def _marks(table: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Every flag and warning of the table with its meaning."""
    latencies = [latency for row in table for latency in row.latencies]
    flags = sorted({flag for latency in latencies for flag in latency.flags})
    warnings = sorted({warning for latency in latencies for warning in latency.warnings})
    return (
        *((flag, f"Not valid: {FLAGS.get(flag, 'this flag is not known here')}.") for flag in flags),
        *((word, f"Warning: {WARNINGS.get(word, 'this warning is not known here')}.") for word in warnings),
    )


def _fronts(table: Sequence[Row], evidence: Evidence) -> tuple[tuple[str, Markup], ...]:
    """Top-1 over size and over latency, of the variants where both are known."""
    found = []
    sized = [row for row in table if row.top1 and row.size_mb is not None]
    if sized:
        sizes = [row.size_mb or 0.0 for row in sized]
        figure = plots.front(sized, sizes, axis="model file (MB)", champion=evidence.champion, of_size=True)
        found.append(("Accuracy over size", figure))
    timed = [row for row in table if row.top1 and row.latency and row.latency.values_ms["p50"] is not None]
    if timed:
        p50 = [row.latency.values_ms["p50"] or 0.0 for row in timed if row.latency]
        axis = f"P50 on {shorten(timed[0].latency.device, 24)} (ms)" if timed[0].latency else ""
        figure = plots.front(timed, p50, axis=axis, champion=evidence.champion, of_size=False)
        found.append(("Accuracy over latency", figure))
    return tuple(found)


def _records(table: pd.DataFrame | None) -> tuple[Mapping[str, Any], ...]:
    return (
        ()
        if table is None
        else tuple({str(k): v for k, v in row.items()} for row in table.to_dict("records"))
    )


def _layer_errors(table: pd.DataFrame | None) -> Markup | None:
    """The worst layers: bars of the layer alone, rings of the layer in place."""
    if table is None:
        return None
    worst = (
        table.dropna(subset=["snr_db", "snr_in_place_db"]).sort_values("snr_db", kind="stable").head(_BARS)
    )
    if worst.empty:
        return None
    items = [
        Bar(label=str(layer), value=float(snr), words=f"{snr:.1f} dB", hue="i8", ring=float(in_place))
        for layer, snr, in_place in zip(
            worst["layer"], worst["snr_db"], worst["snr_in_place_db"], strict=True
        )
    ]
    said = "; ".join(f"{shorten(item.label, 40)} {item.words}" for item in items[:5])
    return bars(items, alt_text=f"Layers with most quantisation error: {said}")


def _classes(pairing: Pairing) -> Classes | None:
    if not len(pairing.truth):
        return None
    table = class_rows(pairing)
    changed = [row for row in table if row.delta_pp]
    shown = changed if len(changed) <= _MIN_CLASSES_TO_CUT else [*changed[:_BARS], *changed[-5:]]
    return Classes(
        rows=table,
        deltas=class_deltas(shown) if shown else None,
        deltas_count=len(shown),
        changed_count=len(changed),
        confused=most_confused(pairing, _CONFUSED),
        matrix=matrix.matrix(pairing),
        matrix_count=min(len(pairing.labels), matrix.MAX_CLASSES),
    )


def _distribution(device: Device, table: Sequence[Row]) -> Distribution | None:
    """Steady latencies of each variant, in the configuration the numbers of the report are of: the first."""
    if device.samples is None:
        return None
    steady = device.samples[device.samples["phase"] == "steady"]
    steady = steady[np.isfinite(steady["latency_ms"]) & (steady["latency_ms"] > 0)]
    if steady.empty:
        return None
    config = str(steady["config"].iloc[0])
    chosen = steady[steady["config"] == config]
    samples = {
        f"{row.key}  {row.name}": values
        for row in table
        if len(values := chosen.loc[chosen["variant"] == row.name, "latency_ms"].to_numpy(np.float64))
    }
    configs = [
        (str(variant), str(name), len(group), float(group.quantile(0.5)), float(group.quantile(0.95)))
        for (variant, name), group in steady.groupby(["variant", "config"], sort=True)["latency_ms"]
    ]
    several = len(set(steady["config"])) > 1
    figure = plots.latency_histograms(samples) if samples else None
    return Distribution(
        device=device.name, figure=figure, config=config, configs=tuple(configs) if several else ()
    )


def _slowest(device: Device, chosen: Row | None) -> Slowest | None:
    """The slowest layers of the headline variant, and the outliers of all."""
    if device.layers is None or chosen is None:
        return None
    own = device.layers[device.layers["variant"] == chosen.name]
    if own.empty:
        return None
    worst = own.sort_values("p50_ms", ascending=False, kind="stable").head(_SLOWEST)
    items = [
        Bar(
            label=str(layer),
            value=float(share),
            words=f"{100 * share:.1f} %",
            hue="fail" if outlier else "plain",
        )
        for layer, share, outlier in zip(worst["layer"], worst["share"], worst["outlier"], strict=True)
    ]
    said = "; ".join(f"{shorten(item.label, 40)} {item.words}" for item in items[:5])
    return Slowest(
        device=device.name,
        variant=chosen.name,
        figure=bars(
            items, label_columns=_LAYER_COLUMNS, alt_text=f"Slowest layers by share of the inference: {said}"
        ),
        table=_records(worst),
        outliers=_records(device.layers[device.layers["outlier"] == 1]),
    )
