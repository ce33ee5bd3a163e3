"""Whole parameters on every rank, where all ranks run one compiled program: each updates everything.

No rank can have an owner's work there. So values and gradients are gathered, every rank runs the optimizer on all
parameters with the same numbers, and keeps its shard of the result. State is not sharded.

Legend: W world size, S shard numel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import LifecycleError
from ..fsdp.flat_param import FlatParam
from ..fsdp.flat_values import own_part, put_together, taken_apart
from .bringing import Bringing, Owned, shard_of
from .listed import Part


class Gathered(Bringing):
    """Parameters of whole flat parameters, each updated by one optimizer.

    Args:
        parts: all parameters in these flat parameters.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.owned = [Owned(p, shard_of(p)) for p in parts]
        self._of_flat: dict[int, list[Owned]] = {}
        self._flats: dict[int, FlatParam] = {}
        for owned in self.owned:
            flat = owned.part.flat
            if flat is not None:
                self._flats[id(flat)] = flat
                self._of_flat.setdefault(id(flat), []).append(owned)
        for of_flat in self._of_flat.values():
            of_flat.sort(key=lambda owned: owned.part.number)

    def start(self, gradients: bool) -> None:
        for key, flat in self._flats.items():
            for owned, value in zip(self._of_flat[key], self._items(flat, flat.param.detach()), strict=True):
                owned.param.grad = None
                owned.param.data = value.view(owned.part.shape)
            gradient = flat.param.grad if gradients else None
            if gradient is None:
                continue
            if flat.unused.used is not None:
                raise LifecycleError(
                    f"some parameters of {flat.names[0]!r} and the others of its flat parameter had no gradient, and "
                    f"which is known to the device alone on {flat.group.backend.name}: an optimizer that updates "
                    "whole parameters can't skip them. Use fully_shard, or wrap with flatten=False"
                )
            for owned, value in zip(self._of_flat[key], self._items(flat, gradient), strict=True):
                owned.param.grad = value.view(owned.part.shape)

    def _items(self, flat: FlatParam, shard: torch.Tensor) -> list[torch.Tensor]:
        shard = shard.contiguous().view(-1).to(flat.compute_device)
        full = shard
        if flat.group.world_size > 1:
            full = shard.new_empty(flat.layout.padded_numel)
            flat.group.channel("parameters").all_gather_into(
                full, shard, label=f"whole parameters of {flat.label}"
            )
        # values of their own, as parameters are: views would be updated together, and be one graph's
        return [item.clone() for item in taken_apart(full, flat.layout)]

    def finish(self) -> None:
        """Everything is there."""

    def send_back(self) -> None:
        """Nothing has to be sent."""

    @torch.no_grad()
    def take_back(self) -> None:
        for key, flat in self._flats.items():
            rows = [owned.param.detach().reshape(-1) for owned in self._of_flat[key]]
            values = own_part(put_together(rows, flat.layout), flat.group)
            flat.param.data.copy_(values.view(flat.param.shape))
