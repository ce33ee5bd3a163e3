"""FSDP: a module whose parameters, gradients and optimizer state are sharded over ranks (ZeRO stage 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..backend import Backend
from ..layout import Align
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..progress import noting_errors
from ..torch_seams.device_mesh import shards_and_replicas_of
from ..types import ProcessGroup, Tree
from .door import Door, built_together
from .flat_values import AlignedLayout, RowsLayout
from .sharded_api import SummonAndClip
from .state import Options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP(SummonAndClip, Door):
    """Shards a module's parameters evenly over ranks; each forward and backward gathers them unit by unit.

    ::

        block = FSDP(block)                 # units: wrap what should be gathered together
        model = FSDP(model)                 # the root holds the rest
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)   # after wrapping

    ``parameters()`` lists this rank's shards: a flat parameter for each unit (and dtype), or with ``flatten=False`` one
    for each parameter. After backward their ``grad`` is this rank's shard of the mean over ranks. Any optimizer that
    works element by element gives the results of plain training. Attributes of the wrapped module are reached through
    the wrapper; its parameters have values only inside forward, backward and :meth:`summon_full_params`. Elsewhere they
    tell their shapes and gradients, and raise :class:`LifecycleError` for all that needs values.
    :func:`~shardkit.fully_shard` does the same to a module in place.

    Source: ZeRO (arXiv 1910.02054); naming and layout are those of fairscale 0.4.13.

    Args:
        module: any module on one device. Parts of it that are FSDP already keep what they hold; weights that they share
            with the rest stay one weight.
        group: ranks among which parameters are sharded; None for all.
        replicas: ranks that hold the same shard as this one (hybrid sharding); gradients are averaged over them too.
        mesh: in place of both: one of one dimension, or of two with replicas along the first.
        precision: dtypes of compute, inputs and buffers.
        reshard: when gathered parameters are given back.
        offload: what lives in host memory.
        reduce: dtype and division of gradients on the wire.
        align: how the flat parameter is cut. "parameters": each parameter lies on one rank as a whole, and shards are
            as large as the fullest; "rows": no cut goes through a row of a parameter; a number: parameters begin at
            multiples of so many elements (8 of bfloat16 are the 16 bytes at which devices compute fastest, which
            counts after a parameter of odd size). The padding that it costs is logged. By default parameters lie end to
            end, as in fairscale: its local state dicts have that layout, and those of other alignments load into the
            same alignment.
        flatten: one flat parameter for the module, not one for each parameter.
        sync_module_states: start from rank 0's values. Otherwise ranks must hold the same ones.
        device: where to compute; by default where the parameters are.
        backend: name or instance of the backend; by default that of the device.

    Raises:
        ConfigurationError: parameters on several devices; options that exclude each other.
        RankMismatchError: parameters of two ranks differ in names, shapes, dtypes (or, without
            ``sync_module_states``, in values).
    """

    built_together = staticmethod(built_together)

    @noting_errors
    def __init__(
        self,
        module: nn.Module,
        *,
        group: ProcessGroup = None,
        replicas: ProcessGroup = None,
        mesh: DeviceMesh | None = None,
        precision: PrecisionPolicy | None = None,
        reshard: ReshardPolicy | None = None,
        offload: OffloadPolicy | None = None,
        reduce: ReducePolicy | None = None,
        align: Align = None,
        flatten: bool = True,
        sync_module_states: bool = True,
        device: torch.device | str | None = None,
        backend: str | Backend | None = None,
    ) -> None:
        group, replicas = shards_and_replicas_of(mesh, group, replicas)
        self._shard(
            module,
            Options.given(
                group=group, replicas=replicas, precision=precision, reshard=reshard, offload=offload, reduce=reduce,
                flatten=flatten, sync_module_states=sync_module_states, device=device, backend=backend,
                layout=AlignedLayout(align) if flatten else RowsLayout(align),
            ),
        )  # fmt: skip

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module._fpw_module

    def state_dict(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Full parameters under the wrapped module's own names, in full precision, on every rank (collective).

        They are copies: writing to one changes nothing here.
        """
        return self._full_state_dict(*args, **kwargs)
