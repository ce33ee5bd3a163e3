"""Replaces syncs, collectives and process groups of torch_xla in a process whose threads are replicas.

[Note: syncs] Every sync goes through :meth:`ReplicaState.run`. Explicit ones (``torch_xla.sync``, ``xm.mark_step``,
``xm.optimizer_step``, ``xm.unlazy``) end in two functions of the runtime. Implicit ones (``.item()``, ``.cpu()``,
printing, operations that fall back to the CPU) end in three operators. torch_xla runs, for these, only what the tensor
depends on, and runs it again with the next sync; a collective in it would be sent twice, by those replicas only that
read a value. Here a tensor that depends on a pending collective makes all that is pending run, as an explicit sync
would.

A program written for TPUs calls ``xm.all_reduce``, ``xm.rendezvous`` or ``dist.init_process_group("xla")``, and so do
torch_xla's FSDP and torch's DDP. In a process with replicas these go through the replica's
:class:`~shardkit.backends.xla.runtime.ChannelCollectives`, and are recorded for the check that replicas are
in step. Signatures are torch_xla's.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d
import torch_xla
import torch_xla.core.xla_model as xm
from torch._C._distributed_c10d import HashStore

from shardkit.backend import not_compiled
from shardkit.errors import ConfigurationError
from shardkit.types import AnyCallable, StateDict, Tree

from ..eager import worlds_of_ranks
from .meeting import ReplicaCall
from .runtime import Groups, Replica, World

_RUNTIME = torch_xla._XLAC
_COLLECTIVE = re.compile(r"xla::(?:cross_replica_sum|all_reduce|all_gather|reduce_scatter|all_to_all)")
_keep: list[torch.library.Library] = []  # registrations live as long as their library object


def _install_syncs(world: World) -> None:
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


Tensors = torch.Tensor | Sequence[torch.Tensor]
_c10d = torch.distributed.distributed_c10d
_BITWISE = {xm.REDUCE_AND: torch.bitwise_and, xm.REDUCE_OR: torch.bitwise_or}
_F = TypeVar("_F", bound=AnyCallable)


def _outside_of_graphs(function: _F) -> _F:
    """Makes ``torch.compile`` end its graph before a call and begin another after it: replicas meet in between."""
    mark: Any = not_compiled(function)
    mark._torchdynamo_disable_msg = (
        "on a CPU, replicas run collectives between graphs; leave out fullgraph=True"
    )
    return function


def install(world: World) -> None:
    """Replaces torch_xla's functions for the rest of this process's life."""
    from torch_xla.utils import checkpoint

    _install_syncs(world)
    # torch_xla's activation checkpointing keeps one flag for a process: a flag for each replica
    flags: dict[int, bool] = {}
    checkpoint.CheckpointStatus.in_chkpt_bwd = property(
        lambda _: flags.get(world.here().rank, False),
        lambda _, value: flags.__setitem__(world.here().rank, value),
    )
    api = _ReplacedFunctions(world)
    names = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "rendezvous"
    vars(xm).update({name: getattr(api, name) for name in names})
    xm.xla_rendezvous = lambda payload=b"", ordinals=None, tag=None: api.rendezvous(
        tag or "", payload, ordinals or []
    )
    _private_process_groups(world)


class _ReplacedFunctions:
    def __init__(self, world: World) -> None:
        self._world = world

    @_outside_of_graphs
    def all_reduce(
        self,
        reduce_type: str,
        inputs: Tensors,
        scale: float = 1.0,
        groups: Groups | None = None,
        pin_layout: bool = True,
    ) -> Tensors:
        if not isinstance(inputs, torch.Tensor):
            with torch.no_grad():
                for tensor in inputs:
                    # a copy, not XLA's in-place operation: views of the tensor would not see that
                    tensor.copy_(self._all_reduced(reduce_type, tensor, scale, groups))
            return inputs
        return self._all_reduced(reduce_type, inputs, scale, groups)

    @_outside_of_graphs
    def all_gather(
        self,
        value: Tensors,
        dim: int = 0,
        groups: Groups | None = None,
        output: Tensors | None = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> Tensors:
        if not isinstance(value, torch.Tensor) and pin_layout:
            raise RuntimeError("torch_xla gathers lists with pin_layout=False only")
        return _each("all_gather", value, output, groups, lambda v: self._all_gathered(v, dim, groups))

    @_outside_of_graphs
    def reduce_scatter(
        self,
        reduce_type: str,
        input: Tensors,
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: Groups | None = None,
        output: Tensors | None = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> Tensors:

        def reduce(value: torch.Tensor) -> torch.Tensor:
            replica, full, mine = self._issue(
                f"reduce_scatter {reduce_type} dim={scatter_dim}", value, groups
            )
            parts = torch.stack(value.chunk(len(mine), scatter_dim))  # [W, ...]
            part = replica.collectives.reduce_scatter(parts.flatten(), reduce_type, full, len(mine))
            part = part.view(parts.shape[1:])
            return part if scale == 1.0 else part * scale

        return _each("reduce_scatter", input, output, groups, reduce)

    @_outside_of_graphs
    def all_to_all(
        self,
        value: torch.Tensor,
        split_dimension: int,
        concat_dimension: int,
        split_count: int,
        groups: Groups | None = None,
        pin_layout: bool = True,
    ) -> torch.Tensor:
        replica, groups, mine = self._issue("all_to_all", value, groups)
        parts = torch.stack(value.chunk(split_count, split_dimension))
        rank = torch.tensor([mine.index(replica.rank)]).to(value.device)
        received = replica.collectives.all_to_all(parts.flatten(), groups, len(mine), rank)
        return torch.cat(list(received.view(parts.shape).unbind()), concat_dimension)

    @_outside_of_graphs
    def collective_permute(self, value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
        replica, groups, mine = self._issue(f"collective_permute {list(pairs)}", value, None)
        gathered = replica.collectives.all_gather(value.flatten(), groups, len(mine))
        source = next((a for a, b in pairs if b == replica.rank), None)
        if source is None:
            return torch.zeros_like(value)
        return gathered.view(len(mine), *value.shape)[source]

    @_outside_of_graphs
    def rendezvous(self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
        state, size = self._world.here(), self._world.size
        if self._world.rules.pod and replicas and len(replicas) != size:
            raise ConfigurationError(
                f"xm.rendezvous({tag!r}) among ranks {list(replicas)}: only global rendezvous is supported on a TPU; "
                f"call it on all {size} ranks, without ordinals, and take what you need"
            )
        return state.exchange(
            list(replicas) or list(range(size)), f"xm.rendezvous({tag!r})", "", bytes(payload)
        )

    def _all_reduced(
        self, reduce_type: str, value: torch.Tensor, scale: float, groups: Groups | None
    ) -> torch.Tensor:
        if reduce_type in _BITWISE:  # which XLA reduces on TPUs alone
            parts = self._all_gathered(value.unsqueeze(0), 0, groups).unbind()
            return functools.reduce(_BITWISE[reduce_type], parts)
        replica, groups, _ = self._issue(f"all_reduce {reduce_type}", value, groups)
        result = replica.collectives.all_reduce(value.flatten(), reduce_type, groups).view(value.shape)
        return result if scale == 1.0 else result * scale

    def _all_gathered(self, value: torch.Tensor, dim: int, groups: Groups | None) -> torch.Tensor:
        replica, groups, mine = self._issue(f"all_gather dim={dim}", value, groups)
        sent = value.to(torch.uint8) if value.dtype is torch.bool else value
        gathered = replica.collectives.all_gather(sent.flatten(), groups, len(mine)).to(value.dtype)
        return torch.cat(list(gathered.view(len(mine), *value.shape).unbind()), dim)

    def _issue(
        self, what: str, value: torch.Tensor, groups: Groups | None
    ) -> tuple[Replica, Groups, list[int]]:
        """Records the call; also returns the partition of all replicas and this replica's part of it."""
        state = self._world.here()
        full = [list(group) for group in groups] if groups else [list(range(self._world.size))]
        mine = next((group for group in full if state.rank in group), None)
        if mine is None:
            raise ConfigurationError(
                f"xm.{what}: rank {state.rank} is in none of the groups {full}; each has to be in one"
            )
        others = _others(full, len(mine), self._world.size)
        if others and self._world.rules.pod:
            raise ConfigurationError(
                f"xm.{what}: groups {full} leave out ranks, whose program would be another one on a TPU; name all "
                "groups, in one order on all ranks (pg_options={'xla_pg_options': {'mesh': [...]}} of new_group)"
            )
        full += others
        dtype = str(value.dtype).removeprefix("torch.")
        state.issued(ReplicaCall(tuple(mine), f"xm.{what} {dtype}{list(value.shape)}", partition=full))
        if state.replica is None or not math.prod(value.shape):
            raise ValueError(f"rank {state.rank}: xm.{what} of a tensor of shape {list(value.shape)}")
        return state.replica, full, mine


def _each(
    what: str,
    given: Tensors,
    output: Tensors | None,
    groups: Groups | None,
    function: Callable[[torch.Tensor], torch.Tensor],
) -> Tensors:
    """Calls it with a tensor or each of a list; refuses what torch_xla refuses, with its types of errors."""
    if groups and len({len(group) for group in groups}) > 1:
        raise AssertionError(f"groups have to be of one size, got {[list(g) for g in groups]}")
    if isinstance(given, torch.Tensor):
        return _stored(output, function(given))
    if not _is_list(given):
        raise TypeError(f"xm.{what} takes a tensor or a list of tensors, got a {type(given).__name__}")
    if output is not None and not _is_list(output):
        raise TypeError(f"xm.{what} of a list has a list of tensors as output, got a {type(output).__name__}")
    if isinstance(given, list) and isinstance(output, list) and len(output) != len(given):
        raise ValueError(f"xm.{what}: {len(given)} tensors have an output of length {len(output)}")
    return _stored(output, [function(value) for value in given])


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, torch.Tensor) for v in value)


def _others(groups: list[list[int]], size: int, world_size: int) -> list[list[int]]:
    """Groups of the ranks that were not named, as ``torch.distributed.new_group`` leaves out those of other groups."""
    named = {rank for group in groups for rank in group}
    rest = [rank for rank in range(world_size) if rank not in named]
    if len(rest) % size:
        raise ConfigurationError(
            f"groups {groups} leave out {len(rest)} of {world_size} ranks, and XLA wants all in groups of one size; "
            "name those too (pg_options={'xla_pg_options': {'mesh': [...]}} of new_group)"
        )
    return [rest[start : start + size] for start in range(0, len(rest), size)]


def _stored(output: Tensors | None, result: Tensors) -> Tensors:
    """Returns the result, or the output with its value: as torch_xla does it, whatever shape that had."""
    if output is None:
        return result
    if isinstance(output, torch.Tensor) and isinstance(result, torch.Tensor):
        torch_xla._XLAC._replace_xla_tensor(output, result.to(output.dtype))
        return output
    for target, value in zip(output, result, strict=True):
        _stored(target, value)
    return output


def _private_process_groups(world: World) -> None:
    """Gives each replica its own default process group; torch.distributed keeps one a process.

    By replica, not by thread: hooks ask for the group from autograd's device threads.
    """
    from torch_xla._internal import rendezvous

    # a job may leave its group behind: each starts anew
    states: defaultdict[tuple[int, int], StateDict] = defaultdict(dict)
    _c10d._world = worlds_of_ranks(lambda: states[world.job, world.here().rank])
    group_name = _c10d._process_group_name

    def unique_name(*args: Any, **kwargs: Any) -> str:
        # C++ keeps one registry of names a process.
        return f"{group_name(*args, **kwargs)}_job{world.job}_replica{world.here().rank}"

    _c10d._process_group_name = unique_name  # type: ignore[assignment]
    # In place of a TCP store, whose port other pools of this machine may hold.
    rendezvous._store = HashStore()
    # ``init_process_group("xla", rank=..., ...)`` would wait for others in a TCP store, holding the turn.
    init = dist.init_process_group

    def init_process_group(
        backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        alone = init_method in (None, "env://") and kwargs.get("store") is None and not args
        if backend == "xla" and alone:
            init_method = "xla://"  # which knows rank and world size
            kwargs = {k: v for k, v in kwargs.items() if k not in ("rank", "world_size")}
        init(backend, init_method, *args, **kwargs)

    dist.init_process_group = init_process_group
