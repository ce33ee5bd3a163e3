"""Routes every sync of a process with replicas through :meth:`ReplicaState.run`.

Explicit ones (``torch_xla.sync``, ``xm.mark_step``, ``xm.optimizer_step``, ``xm.unlazy``) end in two functions of
the runtime. Implicit ones (``.item()``, ``.cpu()``, printing, operations that fall back to the CPU) end in
three operators. torch_xla runs, for these, only what the tensor depends on, and runs it again with the next
sync; a collective in it would be sent twice, by those replicas only that read a value. Here a tensor that depends
on a pending collective makes all that is pending run, as an explicit sync would.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence

import torch
import torch_xla

from shardkit.types import Tree

from .cpu_replicas import World

_RUNTIME = torch_xla._XLAC
_COLLECTIVE = re.compile(r"xla::(?:cross_replica_sum|all_reduce|all_gather|reduce_scatter|all_to_all)")
_keep: list[torch.library.Library] = []  # registrations live as long as their library object


def install(world: World) -> None:
    """Replaces the sync functions and operators for the rest of this process's life."""
    step_marker = _RUNTIME._xla_step_marker
    sync_multi = _RUNTIME._xla_sync_multi

    def guarded_step_marker(
        device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True
    ) -> None:
        world.here().run(
            lambda: step_marker(device, list(devices), False, reset_scope), wait=wait, where="sync"
        )

    def materialize(tensors: Sequence[object]) -> None:
        state = world.here()
        if not state.calls:
            return
        pending = [t for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "xla"]
        if not pending or not any(_RUNTIME._check_tensor_need_materialization(pending)):
            return
        if needed := len(_COLLECTIVE.findall(_RUNTIME._get_xla_tensors_text(pending))):
            where = f"reading a value (which needs {needed} of them)"
            state.run(lambda: step_marker(state.device, [], False, True), wait=True, where=where)

    def guarded_sync_multi(
        tensors: Sequence[torch.Tensor],
        devices: Sequence[str] = (),
        wait: bool = True,
        sync_xla_data: bool = True,
    ) -> None:
        materialize(tensors)
        sync_multi(list(tensors), list(devices), wait, sync_xla_data)

    _RUNTIME._xla_step_marker = guarded_step_marker
    _RUNTIME._xla_sync_multi = guarded_sync_multi
    _override_reads(materialize)
    _private_checkpoint_flag(world)


def _override_reads(materialize: Callable[[Sequence[object]], None]) -> None:
    library = torch.library.Library("aten", "IMPL", "XLA")
    _keep.append(library)
    kernels = {
        name: torch.library.get_kernel(f"aten::{name}", "XLA") for name in ("_to_copy", "_to_cpu", "copy_")
    }

    def to_copy(keys: torch._C.DispatchKeySet, tensor: torch.Tensor, **kwargs: Tree) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "xla":
            materialize([tensor])
        return kernels["_to_copy"].call_boxed(keys, tensor, **kwargs)

    def to_cpu(keys: torch._C.DispatchKeySet, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        materialize(tensors)
        return kernels["_to_cpu"].call_boxed(keys, tensors)

    def copy_(
        keys: torch._C.DispatchKeySet,
        target: torch.Tensor,
        source: torch.Tensor,
        *args: object,
        **kwargs: Tree,
    ) -> torch.Tensor:
        if target.device.type != "xla":
            materialize([source])
        return kernels["copy_"].call_boxed(keys, target, source, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced, which is the point
        library.impl("_to_copy", to_copy, with_keyset=True)
        library.impl("_to_cpu", to_cpu, with_keyset=True)
        library.impl("copy_", copy_, with_keyset=True)


def _private_checkpoint_flag(world: World) -> None:
    """torch_xla's activation checkpointing keeps one flag a process, which replicas would set for each other."""
    from torch_xla.utils import checkpoint

    flags: dict[int, bool] = {}
    checkpoint.CheckpointStatus.in_chkpt_bwd = property(
        lambda _: flags.get(world.here().rank, False),
        lambda _, value: flags.__setitem__(world.here().rank, value),
    )
