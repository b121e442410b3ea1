"""More than one training process, started by torchrun; a single process does nothing here."""

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import distributed as dist
from torch import nn

K = TypeVar("K")
V = TypeVar("V")


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Join the process group torchrun announced in the environment; nothing happens without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """This process's number, 0 when it is the only one; rank 0 alone writes files."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def merge_over_ranks(parts: dict[K, V]) -> dict[K, V]:
    """The union of every rank's part, the same on all of them."""
    if not dist.is_initialized():
        return parts
    gathered: list[dict[K, V]] = [{} for _ in range(world_size())]
    dist.all_gather_object(gathered, parts)
    return {key: value for part in gathered for key, value in part.items()}


def from_first_rank(value: V) -> V:
    """Rank 0's value, on every rank: what was measured must be decided once."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def copy_from_first_rank(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0: batch-norm statistics drift apart."""
    if dist.is_initialized():
        with torch.no_grad():
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)
