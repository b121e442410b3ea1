"""Which layers to leave float so that int8 stays within an accuracy budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.device.errors import UserError
from tasks.nn.sensitivity import LayerCost, Trials
from tasks.paired import Paired
from tasks.progress import track

_MOST_SHARE = 0.5
"""Of the layers: past that, little of the model is int8, and w8 or QAT is the better answer."""


@dataclass(frozen=True, kw_only=True)
class SkipList:
    """Layers to leave float, and what that brings on the images the search saw."""

    layers: tuple[str, ...]
    """In order of execution; empty where the whole model is within the budget."""
    before: Paired
    """Lost against float with every layer in int8."""
    after: Paired
    """Lost with these layers left out."""


def search(trials: Trials, ranked: Sequence[LayerCost], budget_pp: float) -> SkipList:
    """Leave out layers, the most sensitive first, until the loss is within the budget; then take back those
    that were not needed.

    The budget is held against the observed loss: its interval is as wide as the images are few.

    Args:
        trials: Of the model.
        ranked: From `layer_costs`.
        budget_pp: Accuracy that int8 may cost against float, in percentage points.

    Raises:
        UserError: half of the layers left out are not enough; says how near that came.
    """

    def loss(left_out: Sequence[str]) -> Paired:
        return trials.drop(trials.floating, trials.ask(trials.deployed(left_out).graph))

    before = after = nearest = loss(())
    chosen: list[str] = []
    near_count = 0
    most = int(_MOST_SHARE * len(ranked))
    for cost in track(ranked[:most], f"sensitivity: skip until {budget_pp:g} pp", most):
        if after.drop_pp <= budget_pp:
            break
        chosen.append(cost.layer)
        after = loss(chosen)
        if after.drop_pp < nearest.drop_pp:
            nearest, near_count = after, len(chosen)
    if after.drop_pp > budget_pp:
        near = (
            f"nearest was {nearest.drop_pp:.2f} pp (95 %: {nearest.low_pp:+.2f} to {nearest.high_pp:+.2f},"
            f" n = {nearest.n}) with {near_count} left out; with none {before.drop_pp:.2f} pp"
        )
        raise UserError(
            f"a budget of {budget_pp:g} pp: {most} of {len(ranked)} layers left out still lose"
            f" {after.drop_pp:.2f} pp; {near}",
            allowed="a budget that leaving out at most half of the layers can meet",
            next_step="raise --budget-pp, try --observer, or train with quantize.epochs > 0 (QAT)",
        )
    for layer in list(chosen[:-1]):  # without the last one the budget was missed
        fewer = [name for name in chosen if name != layer]
        if (kept := loss(fewer)).drop_pp <= budget_pp:
            chosen, after = fewer, kept
    order = [name for name in trials.layers if name in chosen]
    return SkipList(layers=tuple(order), before=before, after=after)
