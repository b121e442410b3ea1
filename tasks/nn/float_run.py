"""Running a fake-quant graph in float, to see what its tensors would hold without rounding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tasks.nn.fakequant import ActivationQuantizer, IntegerAvgPool2d, QuantConv2d


class FloatRun(fx.Interpreter):
    """An interpreter of a fake-quant graph in which nothing is rounded."""

    def __init__(
        self, graph_module: fx.GraphModule, see: Callable[[str, torch.Tensor], None] | None = None
    ) -> None:
        """Prepare a run.

        Args:
            graph_module: From `tasks.nn.qgraph.build`.
            see: Called, if given, with each quantiser's module name and the tensor it would quantise.
        """
        super().__init__(graph_module)
        self._see = see

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One module call, without rounding."""
        module = self.fetch_attr(str(target))
        if not isinstance(module, ActivationQuantizer | IntegerAvgPool2d | QuantConv2d):
            return super().call_module(target, args, kwargs)
        values = module.in_float(*args)
        if isinstance(module, ActivationQuantizer) and self._see is not None:
            self._see(str(target), values)
        return values
