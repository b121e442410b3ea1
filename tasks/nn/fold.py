"""Folding batch norms into the convolutions before them: what a deployed graph looks like.

The quantiser must see the folded graph, because the engine's scales belong to the folded weights.
"""

import copy

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torchvision.ops import stochastic_depth

from fleet.device.errors import UserError


def trace(model: nn.Module) -> fx.GraphModule:
    """The model as a graph over its own submodules, in eval mode, without dropout and stochastic depth.

    Args:
        model: A float model in eval mode; it is not changed.

    Returns:
        A graph over copies of the layers; submodules keep their names, so `features.0.0.weight` stays that.

    Raises:
        UserError: the model is in training mode, or its forward depends on the values of tensors.
    """
    if model.training:
        raise UserError(
            f"{type(model).__name__} in training mode",
            allowed="a model in eval mode: batch norms use their running statistics",
            next_step="call .eval() first",
        )
    try:
        graph_module = fx.symbolic_trace(copy.deepcopy(model))
    except (fx.proxy.TraceError, TypeError) as error:
        raise UserError(
            f"{type(model).__name__} cannot be traced: {error}",
            allowed="a model whose control flow does not depend on tensor values",
            next_step="choose another architecture, or quantise its ONNX with `edgeloop convert --int8`",
        ) from error
    for node in list(graph_module.graph.nodes):
        # In eval mode both are the identity; the trace has fixed that for stochastic depth already.
        if isinstance(_module(node, graph_module), nn.Dropout) or node.target is stochastic_depth:
            _bypass(node)
    return _finished(graph_module)


def fold_batch_norms(model: nn.Module) -> fx.GraphModule:
    """The traced model with every batch norm folded into the convolution or linear layer before it.

    One that cannot be folded (its input is read elsewhere too, or comes from another kind of layer)
    stays. Arguments and errors as for `trace`.
    """
    graph_module = trace(model)
    for node in list(graph_module.graph.nodes):
        pair = _foldable(node, graph_module)
        if pair is None:
            continue
        producer, folded = pair
        set_submodule(graph_module, str(producer.target), folded)
        _bypass(node)
    return _finished(graph_module)


def _foldable(node: fx.Node, graph_module: fx.GraphModule) -> tuple[fx.Node, nn.Module] | None:
    """The layer before the batch norm `node` and its folded form, or None."""
    norm = _module(node, graph_module)
    if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) or norm.running_mean is None:
        return None
    producer = node.args[0]
    if not isinstance(producer, fx.Node) or len(producer.users) != 1:
        return None
    calls = [n for n in graph_module.graph.nodes if n.op == "call_module" and n.target == producer.target]
    layer = _module(producer, graph_module)
    if len(calls) != 1:  # a shared layer has one weight and several norms
        return None
    if isinstance(layer, nn.Conv2d):
        return producer, fuse_conv_bn_eval(layer, norm)
    if isinstance(layer, nn.Linear) and isinstance(norm, nn.BatchNorm1d):
        return producer, fuse_linear_bn_eval(layer, norm)
    return None


def _module(node: fx.Node, graph_module: fx.GraphModule) -> nn.Module | None:
    return graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _bypass(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node), node
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def set_submodule(graph_module: fx.GraphModule, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule called `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(graph_module.get_submodule(parent), leaf, module)


def _finished(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module.eval()
