"""A workspace around the committed digits checkpoints: built in seconds, without training."""

import shutil
from pathlib import Path

from nn.digit_set import write_digits

from tasks.convert import convert_variant
from tasks.export import export_variant
from tasks.nn.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "models/golden"
PARENT = GOLDEN / "digits-mbv3s-p30-fp32-r48.pt"
SPLITS = {"train": 300, "val": 150, "calibration": 100, "test": 200}


def parent() -> Checkpoint:
    """The pruned float model of digits."""
    return Checkpoint.load(PARENT)


def write_workspace(root: Path) -> Path:
    """Params, data, the pruned checkpoint, and its fp32 and i8 variants exported and converted."""
    write_digits(root / "data/prepared", SPLITS, size_px=32)
    (root / "params.yaml").write_text("quantize: {parent: pruned}\n")
    (root / "models/prune").mkdir(parents=True)
    shutil.copy(PARENT, root / "models/prune/checkpoint.pt")
    for precision in ("fp32", "i8"):
        checkpoint = Checkpoint.load(GOLDEN / f"digits-mbv3s-p30-{precision}-r48.pt")
        variant = checkpoint.variant(precision)
        exported = root / "models/export" / variant.name
        export_variant(variant, checkpoint, exported, biz_code="test")
        convert_variant(exported, root / "models/mnn" / variant.name, timeout_s=300)
    return root
