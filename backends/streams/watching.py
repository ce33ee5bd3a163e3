"""Every operation of torch's tells the device which memory it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shardkit.types import Tree

from ..simulated.collectives import spoil
from .device import Device, quiet

# Of these inputs only shape, dtype and device count.
_LIKE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
}
_FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2"}


class _Plan(NamedTuple):
    """What an operation does with its arguments."""

    name: str
    arguments: Sequence[tuple[str, bool]]  # name, whether it is written
    is_silent: bool  # touches no memory
    is_fresh: bool  # its result has no values yet
    waits: bool  # the host waits for it


def _plan_of(func: torch._ops.OpOverload) -> _Plan:
    schema = func._schema
    arguments = [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments]
    name = schema.name.split("::")[-1]
    writes = any(w for _, w in arguments)
    is_view = not writes and any(r.alias_info is not None for r in schema.returns)
    return _Plan(name, arguments, is_view or not arguments or name in _LIKE, name in _FRESH, name in _HOST)


class Watching(TorchDispatchMode):
    """Active in a rank's thread."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._plans: dict[torch._ops.OpOverload, _Plan] = {}

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:  # fmt: skip
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _plan_of(func)
        if not plan.is_silent:
            self._note(plan, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if plan.is_fresh:
            with quiet():
                for tensor in _plain(result):
                    spoil(tensor)
        return result

    def _note(self, plan: _Plan, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
        if plan.waits:
            self._device.host_waits[plan.name] += 1
        for (_, writes), value in zip(plan.arguments, args, strict=False):
            self._touch(value, writes, plan.name)
        if kwargs:
            written = {name for name, writes in plan.arguments if writes}
            for name, value in kwargs.items():
                self._touch(value, name in written, plan.name)

    def _touch(self, value: Tree, writes: bool, what: str) -> None:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                for each in _plain(tensor):
                    self._device.access(each, writes, what)


def _plain(tensor: Tree) -> Iterator[torch.Tensor]:
    """The tensors with memory that one of a wrapping class (a DTensor) is made of; else itself."""
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]:
        if isinstance(part, torch.Tensor):
            yield from _plain(part)
