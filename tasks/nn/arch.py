"""Model architectures as data: a torchvision name plus the layer widths that pruning left.

A pruned model cannot be rebuilt from its name, and a pickled module executes code when it is loaded. So a
checkpoint holds this record and a state dict, nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torchvision
from torch import nn

from fleet.device.errors import UserError

Activation = Literal["default", "relu6"]

# Auxiliary classifiers serve training only and would be dead weight on a device; the truncated-normal start
# of these two takes seconds, and torchvision is about to drop it.
BUILD_OPTIONS: dict[str, dict[str, bool]] = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A rebuildable description of a classifier."""

    name: str
    """torchvision model name, e.g. mobilenet_v3_small."""
    num_classes: int
    activation: Activation = "default"
    """relu6 replaces every Hardswish: cheaper on engines without a native one."""
    widths: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Module name -> (input channels, output channels, groups) of each convolution, batch norm and linear
    layer whose size differs from torchvision's; empty for an unpruned model. Batch norms use (n, n, 1)."""

    def build(self) -> nn.Module:
        """A freshly initialised float model [N, 3, H, W] -> logits [N, num_classes].

        Raises:
            UserError: torchvision has no such classification model.
        """
        known = torchvision.models.list_models(module=torchvision.models)
        if self.name not in known:
            raise UserError(
                f"architecture {self.name!r}",
                allowed=f"a torchvision classification model: {', '.join(known)}",
                next_step="correct train.architecture in params.yaml",
            )
        model: nn.Module = torchvision.models.get_model(
            self.name, weights=None, num_classes=self.num_classes, **BUILD_OPTIONS.get(self.name, {})
        )
        if self.activation == "relu6":
            _replace(model, nn.Hardswish, lambda: nn.ReLU6(inplace=True))
        for module_name, (n_in, n_out, groups) in self.widths.items():
            _set_width(model.get_submodule(module_name), n_in, n_out, groups)
        return model

    def with_widths_of(self, model: nn.Module) -> "Architecture":
        """This architecture with the widths `model` has now, e.g. after pruning."""
        plain = Architecture(name=self.name, num_classes=self.num_classes, activation=self.activation)
        before, after = layer_widths(plain.build()), layer_widths(model)
        return Architecture(
            name=self.name,
            num_classes=self.num_classes,
            activation=self.activation,
            widths={k: v for k, v in after.items() if before.get(k) != v},
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        widths = {k: list(v) for k, v in sorted(self.widths.items())}
        return {
            "name": self.name,
            "num_classes": self.num_classes,
            "activation": self.activation,
            "widths": widths,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Architecture":
        """The inverse of `to_dict`."""
        widths = {k: (int(v[0]), int(v[1]), int(v[2])) for k, v in record["widths"].items()}
        return cls(
            name=record["name"],
            num_classes=record["num_classes"],
            activation=record["activation"],
            widths=widths,
        )


def layer_widths(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Module name -> (input channels, output channels, groups) of each layer that has channels."""
    widths = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            widths[name] = (module.in_channels, module.out_channels, module.groups)
        elif isinstance(module, nn.Linear):
            widths[name] = (module.in_features, module.out_features, 1)
        elif isinstance(module, nn.BatchNorm2d):
            widths[name] = (module.num_features, module.num_features, 1)
    return widths


def _set_width(module: nn.Module, n_in: int, n_out: int, groups: int) -> None:
    if isinstance(module, nn.Conv2d):
        module.in_channels, module.out_channels, module.groups = n_in, n_out, groups
        module.weight = nn.Parameter(torch.empty(n_out, n_in // groups, *module.kernel_size))
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
        if module.bias is not None:
            module.bias = nn.Parameter(torch.zeros(n_out))
    elif isinstance(module, nn.Linear):
        module.in_features, module.out_features = n_in, n_out
        module.weight = nn.Parameter(torch.empty(n_out, n_in))
        nn.init.normal_(module.weight, 0, 0.01)
        if module.bias is not None:
            module.bias = nn.Parameter(torch.zeros(n_out))
    else:
        assert isinstance(module, nn.BatchNorm2d), type(module)
        module.num_features = n_out
        module.weight, module.bias = nn.Parameter(torch.ones(n_out)), nn.Parameter(torch.zeros(n_out))
        module.running_mean, module.running_var = torch.zeros(n_out), torch.ones(n_out)


def _replace(model: nn.Module, kind: type[nn.Module], make: Any) -> None:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, kind):
                setattr(parent, name, make())
