"""Values that a module starts with: of what is on the meta device, or on another one, and rank 0's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.backend import Group
from shardkit.checks import check_same_everywhere, shape_fact
from shardkit.errors import ConfigurationError
from shardkit.fsdp.originals import managing
from shardkit.fsdp.state import Ignored, modules_outside_units

# Parameters that took the place of others on the meta device, which units still to come may share.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def materialize(module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    """Gives a module's own parameters their initial values if they are on the meta device.

    Args:
        init: initialises the module; default: its ``reset_parameters()``.

    Raises:
        ConfigurationError: there is no ``reset_parameters()`` either.
    """
    own = [m for _, m in modules_outside_units(module)]
    if not any(p is not None and p.is_meta for m in own for p in m._parameters.values()):
        return
    if init is not None:
        init(module)
    else:
        _reset(module, torch.device("cpu"))


def materialize_each(
    module: nn.Module, init: Callable[[nn.Module], object] | None, device: torch.device, ignored: Ignored
) -> None:
    """The same module by module, as torch's FSDP does it; weights that were shared are shared afterwards, also with
    modules of which other units were made.

    Args:
        init: called with every module that is not in another unit, parents first; default: those with parameters or
            buffers are emptied onto ``device``, and their ``reset_parameters()`` is called.
        ignored: stays as it is; parameters that take the place of ignored ones are added.

    Raises:
        ConfigurationError: a module has no ``reset_parameters()``; one is still on the meta device after ``init``.
    """
    own = [m for _, m in modules_outside_units(module, without=ignored.modules)]
    listed = [(m, n, p) for m in own for n, p in m._parameters.items() if p is not None]
    before = [(m, n, _replaced.get(p, p)) for m, n, p in listed]
    others = [(m, n, p) for m, n, p in before if managing(p) is not None]  # of other units
    before = [(m, n, p) for m, n, p in before if managing(p) is None]
    if any(p.is_meta for _, _, p in before if p not in ignored.parameters):
        for m, name, p in others:  # what is to be initialized is no shard
            m._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
        _initialize(own, init, device)
        _put_back(before, ignored)
    for m, name, p in others:
        m._parameters[name] = p


def _initialize(
    modules: Iterable[nn.Module], init: Callable[[nn.Module], object] | None, device: torch.device
) -> None:
    for m in modules:
        if init is not None:
            init(m)
        elif any(True for _ in (*m.parameters(recurse=False), *m.buffers(recurse=False))):
            _reset(m, device, recurse=False)


def _put_back(before: Iterable[tuple[nn.Module, str, nn.Parameter]], ignored: Ignored) -> None:
    """Weights that were shared are shared again."""
    first: dict[nn.Parameter, nn.Parameter | None] = {}
    for m, name, old in before:
        now = first.setdefault(old, m._parameters[name])
        m._parameters[name] = now
        if now is not None and now is not old:
            _replaced[old] = now
        if old in ignored.parameters and now is not None:
            ignored.parameters.add(now)
        elif now is not None and now.is_meta:
            raise ConfigurationError(
                f"parameter {name!r} of a {type(m).__name__} is still on the meta device after param_init_fn, which "
                "is called with each module: it has to give the module's own parameters values, on any rank whose "
                "values count, or memory (module.to_empty(device=..., recurse=False))"
            )


@torch.no_grad()
def _reset(module: nn.Module, device: torch.device, recurse: bool = True) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigurationError(
            f"parameters or buffers of {type(module).__name__} are on the meta device and it has no reset_parameters() "
            "to initialise them; pass param_init_fn"
        )
    module.to_empty(device=device, recurse=recurse)
    reset()


def move_from_host(modules: Iterable[nn.Module], device: torch.device, kept: set[nn.Parameter]) -> None:
    """Parameters and buffers of these modules themselves that are on the CPU move to a device, in place."""
    for m in modules:
        for p in m._parameters.values():
            if p is not None and managing(p) is None and p.device.type == "cpu" and p not in kept:
                p.data = p.data.to(device)
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                m._buffers[name] = buffer.to(device)


def broadcast_buffers(modules: Iterable[tuple[str, nn.Module]], groups: Sequence[Group]) -> None:
    """Buffers of these modules themselves become those of each group's first rank, in turn (collective).

    Raises:
        RankMismatchError: ranks have others, or of other shapes.
    """
    found = {
        f"{path}.{n}" if path else n: b for path, m in modules for n, b in m._buffers.items() if b is not None
    }
    for group in groups:
        facts = [(name, (shape_fact(b), str(b.dtype))) for name, b in found.items()]
        check_same_everywhere(group, facts, "buffers of the wrapped module")
        if group.world_size > 1:
            for name, buffer in found.items():
                group.channel("buffers").broadcast(buffer, 0, label=f"buffer {name} of rank 0")


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers of a module and those below it move to a device, in place."""
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device != device:
                m._buffers[name] = buffer.to(device)
