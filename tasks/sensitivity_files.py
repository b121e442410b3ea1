"""The ranking of layers as a table and as a plot that a page can embed."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import altair as alt

from tasks.nn.sensitivity import LayerCost
from tasks.stage import write_text

FIELDS = (
    "rank",
    "layer",
    "alone_drop_pp",
    "alone_low_pp",
    "alone_high_pp",
    "n",
    "certain",
    "logits_snr_db",
    "snr_db",
    "cosine",
    "given_back_pp",
    "given_back_low_pp",
    "given_back_high_pp",
)
_ROW_PX = 15


def write_csv(costs: Sequence[LayerCost], path: Path) -> None:
    """One row a layer, the most sensitive first."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(cost) for cost in costs)
    write_text(path, stream.getvalue())


def write_svg(costs: Sequence[LayerCost], path: Path) -> None:
    """Loss alone with its interval, and the error in the logits; the same costs give the same bytes."""
    values = [_row(cost) for cost in costs]
    order = [cost.layer for cost in costs]
    title = f"accuracy lost alone (pp, 95 %, n = {costs[0].alone.n})"
    base = alt.Chart(alt.InlineData(values=values), width=260, height=_ROW_PX * len(costs)).encode(
        y=alt.Y("layer:N", sort=order, title=None),
        color=alt.Color(
            "certain:N",
            scale=alt.Scale(domain=[1, 0], range=["#c0392b", "#7f8c8d"]),
            legend=None,
        ),
    )
    zero = alt.Chart(alt.InlineData(values=[{"x": 0}])).mark_rule(color="#bbb").encode(x="x:Q")
    spread = base.mark_rule().encode(x=alt.X("alone_low_pp:Q", title=title), x2=alt.X2("alone_high_pp:Q"))
    loss = zero + spread + base.mark_point(filled=True, size=40).encode(x="alone_drop_pp:Q")
    noise = base.mark_bar(height=8).encode(
        x=alt.X("logits_snr_db:Q", title="signal over error in the logits (dB)"),
        y=alt.Y("layer:N", sort=order, title=None, axis=alt.Axis(labels=False, ticks=False)),
    )
    drawn = io.StringIO()
    (loss | noise).save(drawn, format="svg")
    write_text(path, drawn.getvalue())


def _row(cost: LayerCost) -> dict[str, str | int | float]:
    """Fixed decimals: reprs of floats would carry noise into the report."""
    alone, back = cost.alone, cost.given_back
    return {
        "rank": cost.rank,
        "layer": cost.layer,
        "alone_drop_pp": round(alone.drop_pp, 4),
        "alone_low_pp": round(alone.low_pp, 4),
        "alone_high_pp": round(alone.high_pp, 4),
        "n": alone.n,
        "certain": int(alone.low_pp > 0),
        "logits_snr_db": round(cost.logits_snr_db, 2),
        "snr_db": round(cost.snr_db, 2),
        "cosine": round(cost.cosine, 6),
        "given_back_pp": round(back.drop_pp, 4),
        "given_back_low_pp": round(back.low_pp, 4),
        "given_back_high_pp": round(back.high_pp, 4),
    }
