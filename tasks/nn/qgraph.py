"""From a folded float graph to the fake-quant graph that follows the engine's rules.

`plan` decides which tensors carry a scale and what runs in int8 (`tasks.nn.engine_rules`), `build` rewrites
the graph
accordingly: every tensor that carries a scale gets one quantiser, and every reader is given the view of the
    tensor that the engine would give it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import fx, nn

from fleet.device.errors import UserError
from tasks.nn.engine_rules import RULES, Rule, Scales, kind_of, propagate, runs_in_int8, tensor_inputs
from tasks.nn.fakequant import ActivationQuantizer, IntegerAvgPool2d, QuantConv2d
from tasks.nn.fold import fold_batch_norms, set_submodule

QUANTIZERS = "quantizers"
"""Submodule that holds the activation quantisers, named after their tensors."""
_RELU6_LIMIT = 6.0
_RELUS = {"relu", "relu6"}
_NON_NEGATIVE = (nn.ReLU, nn.ReLU6, nn.Hardsigmoid, nn.Sigmoid, nn.Softmax)


@dataclass(frozen=True)
class Operator:
    """One operator of the engine: a node with the activation that the converter fuses into it."""

    node: fx.Node
    """The node whose output is the operator's output tensor: the activation where one is fused."""
    core: fx.Node
    """The node that computes: a convolution, an addition, ...; equal to `node` without a fused activation."""
    kind: str
    inputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Plan:
    """What runs in int8, and which scale each tensor carries."""

    operators: tuple[Operator, ...]
    scales: Scales
    int8: frozenset[fx.Node]
    """Output tensors of the operators that run in int8."""
    layers: tuple[str, ...]
    """Module names of the int8 convolutions, in order of execution."""
    left_float: dict[str, str]
    """Module name of each convolution and linear layer that stays float -> why."""

    @property
    def weight_only_safe(self) -> bool:
        """Whether the float layers may have int8 weights.

        The engine takes a convolution with int8 weights between two tensors with scales for an int8 one,
        and then computes depthwise ones wrongly (seen in 3.6.1: error 118 % of the output range).
        """
        return not any(
            op.kind in {"conv", "grouped conv"}
            and op.node not in self.int8
            and op.node in self.scales
            and any(t in self.scales for t in op.inputs)
            for op in self.operators
        )


def lower(model: nn.Module) -> fx.GraphModule:
    """The folded graph as it is deployed in int8: global average pools become means over height and width.

    The engine passes scales through a pool: the pooled values of an int8 tensor would be rounded down to
    its steps, and a pooled float tensor would be clamped at the pooled range. A mean is computed in float
    from dequantised values and can have a scale of its own.
    """
    graph_module = fold_batch_norms(model)
    modules = dict(graph_module.named_modules())
    for node in list(graph_module.graph.nodes):
        if not _is_global_pool(node, modules):
            continue
        with graph_module.graph.inserting_before(node):
            mean = graph_module.graph.call_method("mean", (node.args[0], (2, 3)), {"keepdim": True})
        node.replace_all_uses_with(mean)
        graph_module.graph.erase_node(node)
    graph_module.graph.lint()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


def plan(graph_module: fx.GraphModule, skip: Sequence[str] = ()) -> Plan:
    """Decide what runs in int8.

    Args:
        graph_module: From `lower`.
        skip: Layers that stay float: `first` and `last` (the first convolution; the last convolution or
            linear layer), and patterns for module names such as `features.1.*`.

    Raises:
        UserError: a pattern names no layer, or no layer is left to run in int8.
    """
    operators = _operators(graph_module)
    left_float = _skipped(operators, graph_module, skip)
    while True:
        result = _attempt(operators, left_float)
        conflicts = _conflicts(result)
        if not conflicts:
            break
        left_float |= conflicts
    if not result.layers:
        raise UserError(
            f"no layer is left to run in int8: {_counted(left_float)}",
            allowed="a model with at least one ungrouped or depthwise convolution that is not skipped",
            next_step="shorten quantize.skip, or export this model as w8 instead of i8",
        )
    return result


def build(graph_module: fx.GraphModule, chosen: Plan) -> fx.GraphModule:
    """Rewrite `graph_module`, from `lower`, in place into the fake-quant graph, in eval mode, steps unset."""
    builder = _Builder(graph_module, chosen)
    for op in chosen.operators:
        builder.add(op)
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module.eval()


def _is_global_pool(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module = modules[str(node.target)]
        return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))
    if node.target is F.adaptive_avg_pool2d:
        size = node.args[1] if len(node.args) > 1 else node.kwargs["output_size"]
        return size in (1, (1, 1))
    return False


def _operators(graph_module: fx.GraphModule) -> tuple[Operator, ...]:
    """The graph as the engine sees it, activations fused as its converter does."""
    modules = dict(graph_module.named_modules())
    kinds = {node: kind_of(node, modules) for node in graph_module.graph.nodes}
    fused: set[fx.Node] = set()
    operators = []
    for node in graph_module.graph.nodes:
        if node in fused:
            continue
        kind, out = kinds[node], node
        only = next(iter(node.users)) if len(node.users) == 1 else None
        fuses = {"conv": _RELUS, "grouped conv": _RELUS, "add": {"relu"}}.get(kind or "", set())
        if only is not None and kinds[only] in fuses:
            out = only
            fused.add(only)
        operators.append(Operator(out, node, kind or _described(node, modules), tuple(tensor_inputs(node))))
    return tuple(operators)


def _described(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """What an operator that no rule covers is called."""
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__
    return getattr(node.target, "__name__", str(node.target))


def _skipped(
    operators: Sequence[Operator], graph_module: fx.GraphModule, skip: Sequence[str]
) -> dict[str, str]:
    """Module name -> reason of every convolution and linear layer that is not to run in int8."""
    layers = [
        (str(op.core.target), op)
        for op in operators
        if op.core.op == "call_module"
        and isinstance(graph_module.get_submodule(str(op.core.target)), nn.Conv2d | nn.Linear)
    ]
    names = [name for name, _ in layers]
    reasons: dict[str, str] = {}
    reasons |= dict.fromkeys((n for n in names if names.count(n) > 1), "it is used more than once")
    for name, op in layers:
        if name in reasons:
            continue
        if op.kind == "float":
            reasons[name] = "the engine has no int8 linear layer here"
        elif op.kind == "grouped conv":
            reasons[name] = "the engine computes grouped convolutions in float"
        elif _ends_graph(op.node):
            reasons[name] = "its output is the graph's output"
        elif len(op.core.users) != 1 and op.core is not op.node:
            reasons[name] = "its output is read beside its activation"
    for pattern in skip:
        wanted = {"first": names[:1], "last": names[-1:]}.get(pattern) or [
            name for name in names if fnmatchcase(name, pattern)
        ]
        if not wanted:
            raise UserError(
                f"quantize.skip: {pattern!r} names no layer",
                allowed=f"first, last, or a pattern for one of {', '.join(names)}",
                next_step="correct quantize.skip in params.yaml",
            )
        for name in wanted:
            reasons.setdefault(name, f"skipped by rule {pattern!r}")
    return reasons


def _ends_graph(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _attempt(operators: tuple[Operator, ...], left_float: dict[str, str]) -> Plan:
    scales = Scales()
    listed = [op for op in operators if op.kind == "conv" and str(op.core.target) not in left_float]
    for op in listed:
        scales.list(op.inputs[0])
        scales.list(op.node)
    known = [op for op in operators if op.kind in RULES]
    propagate([(op.node, op.inputs, op.kind) for op in known], scales)
    int8 = {op.node for op in listed}
    int8 |= {
        op.node for op in known if op.kind != "conv" and runs_in_int8(op.kind, op.node, op.inputs, scales)
    }
    layers = tuple(str(op.core.target) for op in listed)
    return Plan(operators, scales, frozenset(int8), layers, dict(left_float))


def _conflicts(chosen: Plan) -> dict[str, str]:
    """Module name -> reason of the int8 layers whose scales reach an operator that must not get one."""
    reasons: dict[str, str] = {}
    non_negative: set[fx.Node] = set()
    for op in chosen.operators:
        if _is_non_negative(op, non_negative):
            non_negative.add(op.node)
        scaled = [t for t in (op.node, *op.inputs) if t in chosen.scales]
        if op.kind not in RULES and scaled:
            reason = f"its tensor meets an operator the engine's rules are not known for: {op.kind}"
        elif op.kind == "max pool" and op.node in chosen.int8 and op.inputs[0] not in non_negative:
            reason = "its tensor meets an int8 max pool of signed values, which is wrong on x86"
        else:
            continue
        owners = {chosen.scales.owner(t) for t in scaled}
        for layer in chosen.operators:
            if layer.kind == "conv" and layer.node in chosen.int8:
                own = {chosen.scales.owner(layer.node), chosen.scales.owner(layer.inputs[0])}
                if own & owners:
                    reasons.setdefault(str(layer.core.target), reason)
    return reasons


def _counted(reasons: dict[str, str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in Counter(reasons.values()).most_common())


def _is_non_negative(op: Operator, non_negative: set[fx.Node]) -> bool:
    module = op.node.graph.owning_module
    if op.node.op == "call_module" and module is not None:
        if isinstance(module.get_submodule(str(op.node.target)), _NON_NEGATIVE):
            return True
    elif op.node.target in (F.relu, torch.relu, "relu", F.relu6, F.hardsigmoid, torch.sigmoid, F.softmax):
        return True
    passes = op.kind in {"max pool", "average pool", "reshape", "concat", "add", "mul"}
    return passes and all(t in non_negative for t in op.inputs)


class _Builder:
    """Rewrites the graph operator by operator, giving each reader its view of each tensor."""

    def __init__(self, graph_module: fx.GraphModule, chosen: Plan) -> None:
        self.module, self.plan = graph_module, chosen
        self.quantizers = nn.ModuleDict()
        graph_module.add_module(QUANTIZERS, self.quantizers)
        self.quantised: dict[fx.Node, fx.Node] = {}
        """Tensor -> the node that holds its quantised values."""

    def add(self, op: Operator) -> None:
        """Rewrite one operator; quantise its output if it leaves int8."""
        rule, in_int8 = RULES.get(op.kind, Rule()), op.node in self.plan.int8
        for tensor in op.inputs:
            if in_int8 or (rule.splits and tensor in self.plan.scales):
                op.core.replace_input_with(tensor, self._quantised_view(tensor))
        if in_int8 and op.kind == "conv":
            conv = self.module.get_submodule(str(op.core.target))
            assert isinstance(conv, nn.Conv2d), op
            set_submodule(self.module, str(op.core.target), QuantConv2d(conv, self._quantizer(op.inputs[0])))
        if in_int8 and rule.passes_scale:
            self._stay_on_grid(op)
        elif in_int8 or (rule.splits and op.node in self.plan.scales):
            self._quantise_for_all(op)

    def _stay_on_grid(self, op: Operator) -> None:
        """An operator that selects or averages int8 values: its output needs no quantiser."""
        self.quantised[op.node] = op.node
        if op.kind != "average pool":
            return
        pool = self.module.get_submodule(str(op.core.target))
        assert isinstance(pool, nn.AvgPool2d | nn.AdaptiveAvgPool2d), op
        # Under a name of its own: one pool module may serve several tensors.
        op.core.target = f"{QUANTIZERS}_pool_{op.node.name}"
        self.module.add_module(op.core.target, IntegerAvgPool2d(pool, self._quantizer(op.node)))

    def _quantise_for_all(self, op: Operator) -> None:
        """Every reader sees the output quantised; a fused ReLU becomes the quantiser's lower clamp."""
        quantised = self._quantised_view(
            op.node, of=op.core if self._quantizer(op.node).q_min == 0 else op.node
        )
        op.node.replace_all_uses_with(quantised, delete_user_cb=lambda user: user is not quantised)

    def _quantised_view(self, tensor: fx.Node, of: fx.Node | None = None) -> fx.Node:
        """The node that holds the quantised values of `tensor`, computed from the values of `of`."""
        if tensor not in self.quantised:
            self._quantizer(tensor)
            source = of or tensor
            name = f"{QUANTIZERS}.{self.plan.scales.owner(tensor).name}"
            with self.module.graph.inserting_after(source):
                self.quantised[tensor] = self.module.graph.call_module(name, (source,))
        return self.quantised[tensor]

    def _quantizer(self, tensor: fx.Node) -> ActivationQuantizer:
        """The quantiser of the scale that `tensor` carries."""
        owner = self.plan.scales.owner(tensor)
        if owner.name not in self.quantizers:
            self.quantizers[owner.name] = self._new_quantizer(owner)
        quantizer = self.quantizers[owner.name]
        assert isinstance(quantizer, ActivationQuantizer), owner
        return quantizer

    def _new_quantizer(self, owner: fx.Node) -> ActivationQuantizer:
        sharing = [op for op in self.plan.operators if op.node in self.plan.scales]
        sharing = [op for op in sharing if self.plan.scales.owner(op.node) is owner]
        rounded = [op for op in sharing if not (op.node in self.plan.int8 and RULES[op.kind].passes_scale)]
        fused = [op for op in rounded if op.node in self.plan.int8 and op.core is not op.node]
        modules = dict(self.module.named_modules())
        limited = any(kind_of(op.node, modules) == "relu6" for op in fused)
        return ActivationQuantizer(
            non_negative=len(fused) == len(rounded), upper=_RELU6_LIMIT if limited else math.inf
        )
