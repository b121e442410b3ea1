"""The exported ONNX: folded, named after modules, the same bytes twice, the same function."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.onnx_export import export_onnx
from tasks.nn.arch import Architecture


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Architecture(name="mobilenet_v3_small", num_classes=5).build().eval()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "sub" / "model.onnx"
    export_onnx(model, Preprocess(size_px=32), path, input_name="pixels", output_name="scores")
    return path


def test_onnx_runtime_gives_torchs_logits(model, exported):
    """The exported graph computes what the module computes."""
    x = torch.randn(1, 3, 32, 32)
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    (scores,) = session.run(["scores"], {"pixels": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(scores, model(x).numpy(), rtol=1e-4, atol=1e-6)


def test_the_graph_is_folded_and_named_after_modules(model, exported):
    """No batch norm is left, and every convolution's weight has its module's name."""
    graph = onnx.load(str(exported)).graph
    assert "BatchNormalization" not in {node.op_type for node in graph.node}
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert names == {node.input[1] for node in graph.node if node.op_type == "Conv"}
    assert [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim] == [1, 3, 32, 32]


def test_two_exports_are_the_same_bytes(model, exported, tmp_path):
    """Nothing random or dated gets into the file, and no other file is left beside it."""
    again = tmp_path / "model.onnx"
    export_onnx(model, Preprocess(size_px=32), again, input_name="pixels", output_name="scores")
    assert again.read_bytes() == exported.read_bytes()
    assert list(tmp_path.iterdir()) == [again]


def test_the_model_is_not_changed(model, tmp_path):
    """Exporting folds a copy."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    export_onnx(model, Preprocess(size_px=32), tmp_path / "model.onnx")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "preprocess", "said"),
    [
        (lambda: nn.Conv2d(3, 4, 1).train(), Preprocess(size_px=8), "training mode"),
        (lambda: nn.Conv2d(3, 4, 1).eval(), Preprocess(size_px=8, layout="NHWC"), "layout"),
        (lambda: nn.Linear(2**15, 2**15, device="meta").eval(), Preprocess(size_px=8), "GB of weights"),
    ],
    ids=["training mode", "layout", "size"],
)
def test_what_cannot_be_exported_is_refused(make, preprocess, said, tmp_path):
    """Training mode, a foreign layout and weights beyond protobuf's limit: refused, and no file is left."""
    with pytest.raises(UserError, match=said):
        export_onnx(make(), preprocess, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
