"""Parameters that are updated where they lie: pieces of element-wise optimizers, and whole ones at their owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..fsdp.flat_param import FlatParam
from ..torch_seams.marked_tensors import as_plain
from .listed import Part


class _InShard:
    """What of one shard is updated in place.

    Attributes:
        sizes: cuts the shard [S] into pieces, and what lies between them.
    """

    def __init__(self, flat: FlatParam) -> None:
        self.flat = flat
        self.parts: list[tuple[Part, nn.Parameter, torch.Size]] = []
        self.sizes: list[int] = []
        self.places: list[int] = []
        self._seen: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def lay_out(self) -> None:
        """All parts are known."""
        self.parts.sort(key=lambda found: found[0].here.offset if found[0].here else 0)
        end = 0
        for part, _, _ in self.parts:
            if part.here is None:
                continue
            if part.here.offset > end:
                self.sizes.append(part.here.offset - end)
            self.places.append(len(self.sizes))
            self.sizes.append(part.here.numel)
            end = part.here.offset + part.here.numel
        if end < self.flat.param.numel():
            self.sizes.append(self.flat.param.numel() - end)
        self.show_values()

    def show_values(self) -> None:
        """Parameters are views of the shard, which may have got other memory."""
        shard = self.flat.param.detach()
        seen = self._seen
        if seen is None or seen.data_ptr() != shard.data_ptr() or seen.dtype != shard.dtype:
            self._seen = shard
            cut = shard.view(-1).split_with_sizes(self.sizes)
            self._views = [cut[k] for k in self.places]
            for (_, param, shape), view in zip(self.parts, self._views, strict=True):
                param.data = view.view(shape)

    def show_gradients(self) -> None:
        """Parameters have the gradients that a step reads."""
        gradient = self.flat.param.grad
        for _, param, _ in self.parts:
            param.grad = None  # a step that raised may have left one
        if gradient is None:
            return
        with as_plain():
            cut = gradient.view(-1).split_with_sizes(self.sizes)
        unused = self.flat.unused.originals
        for (part, param, shape), place in zip(self.parts, self.places, strict=True):
            if not unused[part.number]:
                param.grad = cut[place].view(shape)

    def keep(self) -> None:
        """After a step: some optimizers put other tensors in place of ``param.data``."""
        for (_, param, shape), view in zip(self.parts, self._views, strict=True):
            param.grad = None
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.data.reshape(-1))
                param.data = view.view(shape)


class InPlace:
    """Parameters of this rank's optimizers that are views of shards."""

    def __init__(self) -> None:
        self._shards: dict[int, _InShard] = {}

    def add(self, part: Part, flat: FlatParam, shape: torch.Size) -> nn.Parameter:
        """A parameter of an optimizer, in this shape; it has its values after :meth:`lay_out`."""
        empty = torch.empty(0, dtype=flat.param.dtype, device=flat.param.device)
        param = nn.Parameter(empty, requires_grad=empty.is_floating_point() or empty.is_complex())
        self._shards.setdefault(id(flat), _InShard(flat)).parts.append((part, param, shape))
        return param

    def lay_out(self) -> None:
        """All have been added."""
        for shard in self._shards.values():
            shard.lay_out()

    def show(self) -> None:
        """A step comes next."""
        for shard in self._shards.values():
            shard.show_values()
            shard.show_gradients()

    def show_values(self) -> None:
        """Something reads and writes values."""
        for shard in self._shards.values():
            shard.show_values()

    def keep(self) -> None:
        """The step is through."""
        for shard in self._shards.values():
            shard.keep()


def shards_of(parts: Sequence[Part]) -> list[FlatParam]:
    """The flat parameters that parts lie in, each once."""
    return list({id(p.flat): p.flat for p in parts if p.flat is not None}.values())
