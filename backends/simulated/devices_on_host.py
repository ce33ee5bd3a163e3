"""For scripts that say "cuda" where there is none, or not one for each simulated rank: it means the CPU.

Tensors and modules that go to the device stay where they are; what the script asks of the device's library (its
memory, its streams' end) has the answer of a device that does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from shardkit.types import Args, Kwargs, Tree

_CPU = torch.device("cpu")
_STAY = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})
_NOTHING = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
_ZERO = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "current_device",
)


def on_host(device: Tree) -> Tree:
    """Returns the CPU for a CUDA device, in whichever way it is written; everything else as it is."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


class DevicesOnHost(TorchFunctionMode):
    """Active in a rank's thread."""

    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if func in _STAY:
            return args[0]
        if func is torch.Tensor.to:
            args = args[0], *map(on_host, args[1:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": on_host(kwargs["device"])}
        return func(*args, **kwargs)


@contextlib.contextmanager
def host_for_devices() -> Iterator[None]:
    """Makes what no function mode sees take the CPU, too, inside."""
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.nn.Module, "to", _to),
            (DistributedDataParallel, "__init__", _without("device_ids", "output_device")),
            (dist.distributed_c10d, "init_process_group", _without("device_id")),
            (dist, "init_process_group", _without("device_id")),
            (dist.distributed_c10d, "barrier", _without("device_ids")),
            (dist, "barrier", _without("device_ids")),
            (device_mesh, "init_device_mesh", _mesh),
            (dist, "init_device_mesh", _mesh),
            (device_mesh.DeviceMesh, "__init__", _mesh_object),
        ):
            replaced = functools.wraps(before := getattr(owner, name))(replacement(before))
            stack.enter_context(mock.patch.object(owner, name, replaced))
        answers = dict.fromkeys(_NOTHING) | dict.fromkeys(_ZERO, 0) | {"is_available": False}
        for name, value in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _answering(value)))
        stack.callback(_forget_rules)
        yield


def _answering(value: object) -> Callable[..., object]:
    """Returns a new function each time: torch.compile tells functions of torch's apart by what they are."""
    return lambda *_, **__: value


def _forget_rules() -> None:
    """Makes torch.compile look again which functions are torch's, as init_process_group does."""
    if "torch._dynamo" in sys.modules:
        rules: Tree = sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None:
            rules.clear_lru_cache()


def _to(before: Callable[..., Tree]) -> Callable[..., Tree]:
    def to(module: torch.nn.Module, /, *args: Tree, **kwargs: Tree) -> Tree:
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        return before(module, *map(on_host, args), **kwargs)

    return to


def _without(*names: str) -> Callable[[Callable[..., Tree]], Callable[..., Tree]]:
    """Leaves out these arguments, which name devices."""

    def replacement(before: Callable[..., Tree]) -> Callable[..., Tree]:
        def without(*args: Tree, **kwargs: Tree) -> Tree:
            for name in names:
                kwargs.pop(name, None)
            return before(*args, **kwargs)

        return without

    return replacement


def _mesh(before: Callable[..., Tree]) -> Callable[..., Tree]:
    """Takes ``device_type``, first or by name."""

    def init_device_mesh(*args: Tree, **kwargs: Tree) -> Tree:
        if "device_type" in kwargs:
            kwargs["device_type"] = str(on_host(kwargs["device_type"]))
            return before(*args, **kwargs)
        return before(str(on_host(args[0])), *args[1:], **kwargs)

    return init_device_mesh


def _mesh_object(before: Callable[..., Tree]) -> Callable[..., Tree]:
    def init(own: object, /, *args: Tree, **kwargs: Tree) -> None:
        _mesh(functools.partial(before, own))(*args, **kwargs)

    return init
