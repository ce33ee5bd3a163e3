"""An OSS whose step reduces and clips gradients first: for loops without a wrapper that reduces them (ZeRO stage 1)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.backend import Group, ReduceOp
from shardkit.oss.optimizer import OSS
from shardkit.types import ProcessGroup, T, Tree

from .row_states import RowSegment


class ReducingOSS(OSS):
    """See :class:`shardkit.OSS`. After a step, parameters show the gradients of this rank that they had before.

    Args:
        grad_clipping, max_norm: whether gradients are clipped, and by which norm of all of them.
        also_over: ranks that have other parts of the model, whose gradients count for the norm too.
        update_dtype: parameters of other dtypes are updated in this one, in copies that are sharded.
        accumulates: gradients are added up in ``update_dtype`` as soon as they are there, and parameters show none.
        reduces_wide: gradients travel in ``update_dtype``.

    Attributes:
        grad_norm: of the last step, before clipping; 0-dim.

    Raises:
        ConfigurationError: ``update_dtype`` with an optimizer that is not known to be element-wise.
    """

    grad_norm: torch.Tensor | None = None
    _kind_of_segments = RowSegment

    def __init__(
        self, params: ParamsT, optim: Callable[..., Optimizer], group: ProcessGroup = None, *,
        grad_clipping: bool = True, max_norm: float = 1.0, also_over: Group | None = None,
        update_dtype: torch.dtype | None = None, accumulates: bool = False, reduces_wide: bool = False,
        **defaults: Tree,
    ) -> None:  # fmt: skip
        entries: list[Tree] = list(params)
        given = [p for entry in entries for p in _parameters_of(entry)]
        is_own = update_dtype is None or all(p.dtype == update_dtype for p in given)
        self._update_dtype = None if is_own else update_dtype
        super().__init__(entries, optim, group, **defaults)
        self.grad_clipping, self.max_norm, self._also_over = grad_clipping, max_norm, also_over
        self._wire = update_dtype if reduces_wide else None
        self._sum_dtype = update_dtype
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        if accumulates:
            trainable = [p for p in self._parameters() if p.requires_grad]
            _adding.update(dict.fromkeys(trainable, weakref.ref(self)))
            hook = functools.partial(
                _add, weakref.ref(self)
            )  # a loop that makes a new optimizer forgets the old one
            self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in trainable]

    @torch.no_grad()
    def add_gradient(self, param: nn.Parameter) -> None:
        """Takes the gradient that a parameter shows into its sum."""
        if param.grad is None:
            return
        gradient = param.grad.to(self._sum_dtype or param.dtype, copy=True)
        self._sums[param] = self._sums[param] + gradient if param in self._sums else gradient
        param.grad = None

    def remove_hooks(self) -> None:
        """From now on, gradients stay where autograd puts them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch does, and sums of gradients too."""
        super().zero_grad(set_to_none)
        self._sums = {}

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
        local = {p: p.grad for p in self._parameters()}
        try:
            self._reduce()
            if self.grad_clipping:
                self.grad_norm = self.clip_grad_norm(self.max_norm, also_over=self._also_over)
            super().step(**kwargs)
        finally:
            for segment in self.segments():
                segment.stand_down()
            for p, gradient in local.items():
                p.grad = gradient
        return loss

    def _reduce(self) -> None:
        if segments := self.segments():
            channel = self._group.channel("gradients")
            for segment in segments:
                segment.reduce_gradients(channel, self._wire, self._sums if self._hooks else None)
            return
        params = [p for p in self._parameters() if p.requires_grad]
        for p in params:
            if p in self._sums:
                p.grad = self._sums[p].to(p.dtype)
            if (
                self.world_size == 1 and p.grad is not None
            ):  # else the mean is a new tensor; it may be clipped
                p.grad = p.grad.clone()
        average_gradients(params, self._group)


# The optimizer that adds up gradients of a parameter: the last one that was made for it.
_adding: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _add(optimizer: weakref.ref[ReducingOSS], param: torch.Tensor) -> None:
    found = optimizer()
    if found is not None and isinstance(param, nn.Parameter) and _adding.get(param) == optimizer:
        found.add_gradient(param)


def _parameters_of(entry: Tree) -> list[torch.Tensor]:
    """Lists those of one entry of what an optimizer takes: a parameter, a pair with its name, or a group of these."""
    if isinstance(entry, dict):
        inside = entry["params"]
        return (
            [inside] if isinstance(inside, torch.Tensor) else [p for e in inside for p in _parameters_of(e)]
        )
    return [entry[1] if isinstance(entry, tuple) else entry]


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
