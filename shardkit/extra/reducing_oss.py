"""An OSS whose step reduces and clips gradients first: for loops without a wrapper that reduces them (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..backend import Group, ReduceOp
from ..oss.optimizer import OSS
from ..types import ProcessGroup, T, Tree


class ReducingOSS(OSS):
    """See :class:`shardkit.OSS`.

    Args:
        grad_clipping, max_norm: whether gradients are clipped, and by which norm of all of them.
        also_over: ranks that have other parts of the model, whose gradients count for the norm too.

    Attributes:
        grad_norm: of the last step, before clipping; 0-dim.
    """

    grad_norm: torch.Tensor | None = None

    def __init__(
        self, params: ParamsT, optim: Callable[..., Optimizer], group: ProcessGroup = None, *,
        grad_clipping: bool = True, max_norm: float = 1.0, also_over: Group | None = None, **defaults: Tree,
    ) -> None:  # fmt: skip
        super().__init__(params, optim, group, **defaults)
        self.grad_clipping, self.max_norm, self._also_over = grad_clipping, max_norm, also_over

    def step(self, closure: Callable[[], T] | None = None, **kwargs: Tree) -> T | None:  # type: ignore[override]
        """Averages the gradients over ranks, clips them, updates this rank's part and publishes it.

        Args:
            closure: computes the loss and the gradients first.
            **kwargs: passed to the inner optimizer's ``step``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.refresh_trainable()
        if segments := self.segments():
            channel = self._group.channel("gradients")
            for segment in segments:
                segment.reduce_gradients(channel, None)
        else:
            average_gradients([p for p in self._parameters() if p.requires_grad], self._group)
        if self.grad_clipping:
            self.grad_norm = self.clip_grad_norm(self.max_norm, also_over=self._also_over)
        super().step(**kwargs)
        return loss


@torch.no_grad()
def average_gradients(params: Iterable[nn.Parameter], group: Group) -> None:
    """Replaces gradients by their means over ranks, in one collective.

    Those that some ranks have not count as zeros there; those that no rank has stay None.
    """
    params = list(params)
    if not params or group.world_size == 1:
        return
    rows = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params]
    used = torch.tensor([float(p.grad is not None) for p in params]).to(rows[0])
    flat = torch.cat([*rows, used])
    group.channel("gradients").all_reduce(flat, op=ReduceOp.AVG, label="gradients")
    *parts, used = flat.split([*(p.numel() for p in params), len(params)])
    for p, reduced, share in zip(params, parts, used.tolist(), strict=True):
        if share > 0:  # some rank has a gradient
            p.grad = reduced.view_as(p).to(p.dtype)
