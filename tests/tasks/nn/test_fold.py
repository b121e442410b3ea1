"""Folding batch norms: the same function, the same names, and nothing folded that must not be."""

import pytest
import torch
import torchvision
from torch import nn

from fleet.device.errors import UserError
from tasks.nn.fold import fold_batch_norms, trace


def with_statistics(model: nn.Module) -> nn.Module:
    """Give every batch norm statistics and affine values that matter."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
    return model.eval()


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "resnet18", "efficientnet_b0"])
def test_the_folded_model_computes_the_same(name):
    """No batch norm, dropout or stochastic depth is left, and logits agree to float precision."""
    model = with_statistics(torchvision.models.get_model(name, weights=None, num_classes=7))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    folded = fold_batch_norms(model)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    kinds = {type(module) for module in folded.modules()}
    assert not kinds & {nn.BatchNorm2d, nn.Dropout}
    assert not [node for node in folded.graph.nodes if "stochastic" in node.name]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_weights_keep_their_module_names():
    """A folded weight is found under the name it had, which is how scales find their layers."""
    model = with_statistics(torchvision.models.mobilenet_v3_small(num_classes=7))
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    folded = fold_batch_norms(model).state_dict()
    assert {f"{name}.weight" for name in convolutions} <= set(folded)
    assert {f"{name}.bias" for name in convolutions} <= set(folded)


class ReadTwice(nn.Module):
    """The convolution's output is read by the norm and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class Shared(nn.Module):
    """One convolution with a norm of its own for each use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.two(self.conv(self.one(self.conv(x))))


@pytest.mark.parametrize("make", [ReadTwice, Shared])
def test_what_cannot_be_folded_stays(make):
    """A norm whose convolution is read elsewhere, or is used twice, stays a norm of its own."""
    model = with_statistics(make())
    folded = fold_batch_norms(model)
    x = torch.randn(2, 3, 8, 8)
    assert [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.testing.assert_close(folded(x), model(x))


class Branching(nn.Module):
    """Its control flow depends on the values of its input."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "said"),
    [(torchvision.models.resnet18(num_classes=2).train(), "training mode"), (Branching().eval(), "traced")],
)
def test_what_has_no_folded_form_is_refused(model, said):
    """A model in training mode and one that cannot be traced are the user's errors."""
    with pytest.raises(UserError, match=said):
        trace(model)
