"""Which tensors carry a scale in MNN and which operators run in int8 because of it, as a table.

The engine is told the scales of the inputs and outputs of the listed convolutions. From there it decides
for itself (MNN 3.6.1, source/core/Pipeline.cpp, `encode`, and CPUBackend.cpp, `_supportQuant`):

1. Operators that only move or select values pass a scale on: from their one input to an output that has
   none, and from their output to an input that has none.
2. An operator whose inputs and output all carry a scale runs in int8 if the engine has a kernel for it.
3. A float operator reads dequantised values. If its output carries a scale, int8 readers read it quantised
   and float readers read it as it is; the output of an int8 operator is quantised for everyone.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import fx, nn

Kernel = Literal["none", "always", "one scale"]


@dataclass(frozen=True)
class Rule:
    """How the engine treats one kind of operator."""

    int8: Kernel = "none"
    """Whether it has an int8 kernel: never, whenever all its tensors carry scales, or only if that is one
    scale.
    """
    passes_scale: bool = False
    """Whether a scale goes through it to tensors that have none."""
    splits: bool = False
    """A grouped convolution is cut into slices that are joined again: it reads and leaves int8 where there
    is a scale, and computes in float between."""


RULES: dict[str, Rule] = {
    "conv": Rule(int8="always"),  # ungrouped or depthwise, if its weights are int8
    "grouped conv": Rule(splits=True),
    "add": Rule(int8="always"),
    "mul": Rule(int8="always"),
    "relu": Rule(int8="one scale", passes_scale=True),
    "relu6": Rule(passes_scale=True),
    "max pool": Rule(int8="one scale", passes_scale=True),
    "average pool": Rule(int8="one scale", passes_scale=True),
    "reshape": Rule(int8="one scale", passes_scale=True),
    "concat": Rule(int8="one scale", passes_scale=True),
    "float": Rule(),
}

_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.MaxPool2d: "max pool",
    nn.AvgPool2d: "average pool",
    nn.AdaptiveAvgPool2d: "average pool",
    nn.Flatten: "reshape",
    nn.Identity: "reshape",
    nn.Linear: "float",
    nn.Hardswish: "float",
    nn.Hardsigmoid: "float",
    nn.Sigmoid: "float",
    nn.SiLU: "float",
    nn.Softmax: "float",
}

_FUNCTIONS: dict[Callable[..., object] | str, str] = {
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    operator.mul: "mul",
    operator.imul: "mul",
    torch.mul: "mul",
    F.relu: "relu",
    torch.relu: "relu",
    "relu": "relu",
    F.relu6: "relu6",
    torch.flatten: "reshape",
    "flatten": "reshape",
    "view": "reshape",
    "reshape": "reshape",
    torch.cat: "concat",
    F.max_pool2d: "max pool",
    "mean": "float",
    torch.mean: "float",
    F.hardswish: "float",
    F.hardsigmoid: "float",
    F.silu: "float",
    torch.sigmoid: "float",
    "sigmoid": "float",
    F.softmax: "float",
}


def kind_of(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """The row of RULES that an operator falls under; None when the table does not know it."""
    if node.op in {"placeholder", "get_attr", "output"}:
        return "float"
    if node.op != "call_module":
        kind = _FUNCTIONS.get(node.target)
        # A constant operand carries no scale, so the engine computes in float.
        return "float" if kind in {"add", "mul"} and len(tensor_inputs(node)) < 2 else kind
    module = modules[str(node.target)]
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 or module.groups == module.in_channels == module.out_channels
        return "conv" if plain and module.padding_mode == "zeros" else "grouped conv"
    if isinstance(module, nn.AvgPool2d) and (module.padding not in {0, (0, 0)} or module.ceil_mode):
        return None  # how the engine counts the padding is not known
    return _MODULES.get(type(module))


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The operators whose outputs `node` reads."""
    return list(node.all_input_nodes)


class Scales:
    """Which scale each tensor carries: a union of tensors that the engine makes share one."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._listed: set[fx.Node] = set()

    def list(self, tensor: fx.Node) -> None:
        """Give `tensor` a scale of its own: a listed convolution reads or writes it."""
        self._parent.setdefault(tensor, tensor)
        self._listed.add(tensor)

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._parent

    def owner(self, tensor: fx.Node) -> fx.Node:
        """The tensor after which the scale is named."""
        while self._parent[tensor] is not tensor:
            tensor = self._parent[tensor]
        return tensor

    def pass_on(self, source: fx.Node, target: fx.Node) -> bool:
        """Let `target`, if no scale is listed for it, carry that of `source`; whether that was news.

        Where two different scales arrive, the engine takes the one that arrives last. They are made one
        here, so that the order does not matter.
        """
        if source not in self or target in self._listed:
            return False
        self._parent.setdefault(target, target)
        ours, theirs = self.owner(target), self.owner(source)
        self._parent[ours] = theirs
        return ours is not theirs

    def one(self, tensors: Iterable[fx.Node]) -> bool:
        """Whether all `tensors` carry a scale, and the same."""
        tensors = tuple(tensors)
        return all(t in self for t in tensors) and len({self.owner(t) for t in tensors}) == 1


def propagate(operators: Iterable[tuple[fx.Node, Sequence[fx.Node], str]], scales: Scales) -> None:
    """Rule 1, to the fixed point: forward as far as it goes, then backward, and again.

    Args:
        operators: Output tensor, input tensors and kind of each, in order of execution.
        scales: Those of the listed convolutions; completed in place.
    """
    passing = [(node, inputs) for node, inputs, kind in operators if RULES[kind].passes_scale]
    forward = [(inputs[0], node) for node, inputs in passing if len(inputs) == 1]
    backward = [(node, source) for node, inputs in reversed(passing) for source in inputs]
    changed = True
    while changed:
        changed = _pass_all(forward, scales) or _pass_all(backward, scales)


def _pass_all(pairs: Sequence[tuple[fx.Node, fx.Node]], scales: Scales) -> bool:
    news = [scales.pass_on(source, target) for source, target in pairs]
    return any(news)


def runs_in_int8(kind: str, node: fx.Node, inputs: Sequence[fx.Node], scales: Scales) -> bool:
    """Rule 2 for everything but convolutions, which run in int8 exactly when they are listed."""
    kernel = RULES[kind].int8
    if kernel == "one scale":
        return scales.one([node, *inputs])
    return kernel == "always" and node in scales and all(t in scales for t in inputs)
