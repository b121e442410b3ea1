"""The mid-training state: what a killed training needs to go on as if nothing had happened."""

import hashlib
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def state_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the names, shapes and bytes of a state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(path: Path, fingerprint: str, state: Mapping[str, Any]) -> None:
    """Write the state of one finished epoch; a kill leaves the previous file or the new one, never half of one."""
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
