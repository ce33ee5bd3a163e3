"""LocalSGD and slow momentum: ranks train on their own for some steps, and then agree.

Sources: Stich, "Local SGD Converges Fast and Communicates Little" (2019); Wang et al., "SlowMo: Improving
Communication-Efficient Distributed SGD with Slow Momentum" (2020), Algorithm 1: after the inner steps with rate γ,

    u <- β u + (x_0 - mean(x)) / γ,    x_0 <- x_0 - α γ u,    x <- x_0 on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardkit.backend import Group, ReduceOp
from shardkit.errors import ConfigurationError
from shardkit.types import ParamGroup, StateDict


class _Piece(NamedTuple):
    values: torch.Tensor  # [n], a view
    lr: float


class SlowMomentum:
    """The outer step: slow momentum on what the inner optimizers of all ranks have reached.

    Parameters of the optimizer, seen as one vector, are cut into equal shards. The rank that owns a shard averages it
    over all ranks, applies the momentum, and sends it to all.

    Args:
        momentum: β.
        lr: α.
        num_shards: how many ranks, from the first on, share the state (twice the parameters); 0: every rank has all of
            it, and parameters are averaged by somebody else, before.
    """

    def __init__(self, group: Group, momentum: float, lr: float, num_shards: int) -> None:
        self.momentum = momentum
        self.lr = lr
        self._group = group
        self._num_shards = min(num_shards, group.world_size)
        self._outer: torch.Tensor | None = None  # x_0, of the own shard
        self._velocity: torch.Tensor | None = None  # u
        self.started = False

    @torch.no_grad()
    def start(self, optimizer: torch.optim.Optimizer, values: dict[torch.Tensor, torch.Tensor]) -> None:
        """Begins anew from these values of parameters (default: what they are now), without momentum.

        Raises:
            ConfigurationError: the parameters have several dtypes or devices.
        """
        params = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = {(p.dtype, p.device) for p in params}
        if len(kinds) != 1:
            raise ConfigurationError(
                f"slow momentum needs parameters of one dtype on one device; the optimizer has {kinds}"
            )
        self.started = True
        self._outer = self._velocity = None
        for shard, start, stop in self._shards(sum(p.numel() for p in params)):
            if self._owns(shard):
                now: list[StateDict] = [
                    {"params": [_laid_out_as(p, values.get(p, p)) for p in params], "lr": 0.0}
                ]
                self._outer = torch.cat([piece.values for piece in _pieces(now, start, stop)]).to(params[0])
                self._velocity = torch.zeros_like(self._outer)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes a slow step; every rank calls it, after the same number of inner steps."""
        total = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        for shard, start, stop in self._shards(total):
            pieces = list(_pieces(optimizer.param_groups, start, stop))
            if self._num_shards == 0:
                self._apply(pieces)
                continue
            flat = torch.cat([piece.values for piece in pieces])
            self._group.reduce(flat, shard, op=ReduceOp.AVG, label="slow momentum")
            parts = flat.split([piece.values.numel() for piece in pieces])
            if self._owns(shard):
                self._apply([_Piece(part, piece.lr) for part, piece in zip(parts, pieces, strict=True)])
            self._group.broadcast(flat, shard, label="slow momentum")
            for part, piece in zip(parts, pieces, strict=True):
                piece.values.copy_(part)

    def _shards(self, total: int) -> Iterator[tuple[int, int, int]]:
        """Lists number, first element and end of each shard that has elements."""
        length = -(-total // max(self._num_shards, 1))
        for shard, start in enumerate(range(0, total, length)):
            yield shard, start, min(start + length, total)

    def _owns(self, shard: int) -> bool:
        return self._num_shards == 0 or shard == self._group.rank

    def _apply(self, pieces: Sequence[_Piece]) -> None:
        """Applies Algorithm 1 to the own shard, in place."""
        if self._outer is None or self._velocity is None:
            raise ConfigurationError("slow momentum was not started: call start(optimizer, {}) before step()")
        sizes = [piece.values.numel() for piece in pieces]
        for piece, outer, velocity in zip(
            pieces, self._outer.split(sizes), self._velocity.split(sizes), strict=True
        ):
            if (
                piece.lr == 0
            ):  # nothing can be said about u; where the optimizer moved nothing, x_0 stays as well
                outer.copy_(piece.values)
                continue
            velocity.mul_(self.momentum).add_((outer - piece.values) / piece.lr)
            outer.sub_(velocity * (self.lr * piece.lr))
            piece.values.copy_(outer)


def _pieces(groups: Iterable[ParamGroup], start: int, stop: int) -> Iterator[_Piece]:
    """Elements ``start`` up to ``stop`` of all parameters, as views of them."""
    offset = 0
    for group in groups:
        for p in group["params"]:
            first, last = max(start - offset, 0), min(stop - offset, p.numel())
            if first < last:
                yield _Piece(_in_memory_order(p)[first:last], group["lr"])
            offset += p.numel()


def _in_memory_order(p: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor of any layout (channels last) as a vector, without a copy."""
    return p.detach().as_strided((p.numel(),), (1,))


def _laid_out_as(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value with the strides of a parameter."""
    if value.stride() == p.stride():
        return value
    return torch.empty_strided(p.shape, p.stride(), dtype=value.dtype).copy_(value.view(p.shape))
