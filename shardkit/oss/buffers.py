"""Keeps what is not trained the same on all ranks: start values, buffers, batch statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..backend import Group
from ..errors import ConfigurationError
from ..torch_seams.tensor_facts import alike
from ..tracing.ranges import ModuleRanges
from ..types import ProcessGroup


@torch.no_grad()
def broadcast_together(tensors: Sequence[torch.Tensor], group: Group, label: str) -> None:
    """Replaces the others' values by rank 0's, one collective for each dtype.

    Written through ``.data``: a forward may have saved a buffer for its backward, and what it saved stays valid.
    """
    for same in alike(t.data for t in tensors):
        flat = torch.cat([t.reshape(-1) for t in same])
        wire = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
        group.broadcast(wire, 0, label=label)
        pieces = wire.split([t.numel() for t in same])
        for t, piece in zip(same, pieces, strict=True):
            t.copy_(piece.view(t.shape))


def broadcast_module(module: nn.Module, group: Group) -> None:
    """Replaces the others' parameters and buffers by rank 0's."""
    if group.world_size == 1:
        return
    for p in module.parameters():  # one at a time: no second copy of the model
        broadcast_together([p], group, "parameters of rank 0")
    broadcast_together(list(module.buffers()), group, "buffers of rank 0")


class BufferSync:
    """Replaces buffers by rank 0's after training forwards.

    fairscale does this at every forward, in eval too, and hangs when only one rank evaluates. Here it is done
    where all ranks are anyway (end of backward, step, next training forward), so that whoever evaluates finds
    rank 0's buffers without talking.

    Attributes:
        changed: a training forward ran since the last time.
    """

    def __init__(self, module: nn.Module, group: Group, enabled: bool) -> None:
        self._group = group
        # looked up anew each time (``module.to`` replaces them), but without walking the whole module
        self._places = [
            (m, name) for m in module.modules() for name, b in m._buffers.items() if b is not None
        ]
        self._enabled = enabled and group.world_size > 1 and bool(self._places)
        self.changed = False
        self.ranges = ModuleRanges("buffers", group.ranks)

    def sync(self) -> None:
        """Replaces them now (every rank calls)."""
        self.changed = False
        found = (m._buffers.get(name) for m, name in self._places)
        buffers = {id(b): b for b in found if b is not None}
        if buffers and self._group.world_size > 1:
            with self.ranges.buffers():
                broadcast_together(list(buffers.values()), self._group, "buffers of rank 0")

    def sync_if_changed(self) -> None:
        if self._enabled and self.changed:
            self.sync()
        self.changed = False


def connect_sync_batch_norm(module: nn.Module, process_group: ProcessGroup, group: Group) -> None:
    """Gives SyncBatchNorm layers without a group of their own the wrapper's.

    Args:
        process_group: what the user passed: torch's process group, a shardkit group, or None for all ranks.
        group: what became of it.
    """
    own = getattr(process_group, "process_group", process_group)  # a shardkit group on top of torch's
    connects = isinstance(own, torch.distributed.ProcessGroup)
    has_torchs_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.SyncBatchNorm):
            continue
        if connects and layer.process_group is None:
            layer.process_group = own
        if group.world_size > 1 and not has_torchs_ranks:
            # torch's layer would let each rank normalize by itself, unnoticed
            message = (
                f"SyncBatchNorm {name!r} trains with a process group of torch.distributed only, and ranks of backend "
                f"{group.backend.name!r} have none; use BatchNorm, or keep this layer in eval mode"
            )
            layer.register_forward_pre_hook(partial(_refuse_training, message))


def _refuse_training(message: str, layer: nn.Module, inputs: object) -> None:
    if layer.training:
        raise ConfigurationError(message)
