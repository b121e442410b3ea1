"""The mid-training state: what a killed training needs to go on as if nothing had happened."""

import hashlib
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tasks.data.dataset import Split
from tasks.nn import distributed


def fingerprint(settings: Mapping[str, Any], *, models: Sequence[nn.Module], splits: Sequence[Split]) -> str:
    """SHA-256 of all a training starts from, pixels included, so that only the same training is resumed."""
    digest = hashlib.sha256(json.dumps([settings, distributed.world_size()], sort_keys=True).encode())
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            values = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.reshape(-1).view(torch.uint8).numpy())
    for split in splits:
        digest.update(split.labels.tobytes())
        for shard in split.shards:
            digest.update(str(shard.shape).encode())
            digest.update(np.ascontiguousarray(shard).data)  # no copy: shards are maps in C order
    return digest.hexdigest()


def save(path: Path, fingerprint: str, state: Mapping[str, Any]) -> None:
    """Write the state of one finished epoch; a kill leaves the previous file or the new one, not half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    torch.save({"fingerprint": fingerprint, "state": dict(state)}, temporary)
    temporary.replace(path)


def load(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The state of an interrupted training with the same fingerprint, or None with the reason on stderr.

    A file of other parameters, other data or another start is not continued: that would be a wrong result.
    """
    if not path.exists():
        return None
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
        same = record["fingerprint"] == fingerprint
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        print(f"{path}: cannot be read ({error}); training starts from its first epoch", file=sys.stderr)
        return None
    if not same:
        print(
            f"{path}: belongs to other parameters or data; training starts from its first epoch",
            file=sys.stderr,
        )
        return None
    state: dict[str, Any] = record["state"]
    return state
