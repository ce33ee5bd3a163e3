"""Shards that are listed as DTensors of torch's, as FSDP2 lists its own.

[Note: shards as DTensors] With ``fully_shard(module, dtensors=True)`` modules list DTensors, cut by rows: torch's
clipping, its GradScaler, ``torch.distributed.checkpoint`` and functions for state dicts do the right thing with them by
themselves. A DTensor's local rows are a view of the shard [S], which is padded to as many rows as the first rank's;
the shard itself stays what gathers read and reductions write to. Its ``grad`` and ``requires_grad`` are the DTensor's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigurationError
from ..torch_seams.dtensors import mesh_over, rows_here
from ..types import AnyCallable, ProcessGroup, Tree
from .originals import OriginalParameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as Mesh

Hooks = dict[int, AnyCallable]

_listed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by shard


class Cut(NamedTuple):
    """How one parameter is cut.

    Attributes:
        mesh: cut along its last dimension; what is along others are replicas.
        shape: of the whole parameter.
    """

    mesh: Mesh
    shape: torch.Size

    def listed(self, values: torch.Tensor) -> torch.Tensor:
        """The DTensor of a shard's values [S]: a view."""
        return rows_here(values, self.mesh, self.shape)


class ShardBehindDTensor(nn.Parameter):
    """A shard [S] that no module lists; made by :func:`list_as_dtensor`."""

    @property
    def _listing(self) -> Listing:
        found: Listing = _listed[self]
        return found

    @property
    def grad(self) -> torch.Tensor | None:
        """The DTensor's, [S]."""
        return self._listing.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._listing.set_gradient(value)

    @property
    def requires_grad(self) -> bool:
        """The DTensor's."""
        return self._listing.param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._listing.param.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> ShardBehindDTensor:
        """As of any tensor."""
        self._listing.param.requires_grad_(requires_grad)
        return self

    @property
    def _backward_hooks(self) -> Hooks:  # type: ignore[override]
        """The DTensor's, as hooks of this one's gradient."""
        found = self._listing.param._backward_hooks or {}
        return {k: self._listing.as_hook(hook) for k, hook in found.items()}

    @property
    def _post_accumulate_grad_hooks(self) -> Hooks:  # type: ignore[override]
        """The DTensor's, which are called with it."""
        listed = self._listing.param
        found = listed._post_accumulate_grad_hooks or {}
        return {k: partial(_call_with, hook, listed) for k, hook in found.items()}


def _call_with(hook: AnyCallable, listed: nn.Parameter, _: object) -> None:
    hook(listed)


class Listing:
    """What a module lists for one shard.

    Attributes:
        param: the DTensor.
        cut: how it is cut.
    """

    def __init__(self, param: nn.Parameter, cut: Cut) -> None:
        self.param, self.cut = param, cut
        self._gradient: torch.Tensor | None = None  # [S]

    def gradient(self) -> torch.Tensor | None:
        """The gradient [S] of which the DTensor's is a view; made where somebody gave the DTensor another one."""
        listed, own = self.param.grad, self._gradient
        if listed is None:
            self._gradient = None
        elif own is None or not _is_view(listed, own):
            self.set_gradient(_padded(local_rows(listed), self.cut))
        return self._gradient

    def set_gradient(self, value: torch.Tensor | None) -> None:
        self._gradient = value
        self.param.grad = None if value is None else self.cut.listed(value)

    def as_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[torch.Tensor], Tree]:
        """A hook of the DTensor's gradient as one of the shard's."""

        def called(gradient: torch.Tensor) -> torch.Tensor | None:
            changed = hook(self.cut.listed(gradient))
            return None if changed is None else _padded(local_rows(changed), self.cut)

        return called


def local_rows(dtensor: Tree) -> torch.Tensor:
    """This rank's rows of a DTensor: its memory."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def _is_view(listed: Tree, values: torch.Tensor) -> bool:
    local = local_rows(listed)
    return not local.numel() or local.untyped_storage()._cdata == values.untyped_storage()._cdata


def _padded(local: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Rows as a shard [S]."""
    count = -(-cut.shape[0] // cut.mesh.size(cut.mesh.ndim - 1)) * cut.shape[1:].numel()
    made = local.new_zeros(count)
    made[: local.numel()].view(local.shape).copy_(local)
    return made


def list_as_dtensor(
    original: OriginalParameter, shard: torch.Tensor, mesh: Mesh
) -> tuple[nn.Parameter, nn.Parameter]:
    """The shard as a parameter, and the DTensor that modules list for it.

    Raises:
        ConfigurationError: a parameter that is one number, which has no rows.
    """
    if not original.shape:
        raise ConfigurationError(
            "a parameter without dimensions can't be a DTensor that is cut by rows: give it one, as nn.Parameter("
            "torch.ones(1)), or leave dtensors=True out"
        )
    cut = Cut(mesh, original.shape)
    needs_gradient = original.param.requires_grad
    behind = torch.Tensor._make_subclass(ShardBehindDTensor, shard.detach(), False)
    listed = nn.Parameter(cut.listed(shard), requires_grad=needs_gradient)
    _listed[behind] = Listing(listed, cut)
    return behind, listed


def listed_for(shard: nn.Parameter) -> nn.Parameter:
    """What modules list for a shard: the shard itself, or its DTensor."""
    found: Listing | None = _listed.get(shard)
    return shard if found is None else found.param


def follow_move(shard: nn.Parameter) -> nn.Parameter:
    """The shard again, after its DTensor was moved or cast: another one where it has other memory."""
    listing: Listing = _listed[shard]
    local = local_rows(listing.param)
    if local.untyped_storage()._cdata == shard.untyped_storage()._cdata:
        return shard
    values = _padded(local.detach(), listing.cut)
    moved = torch.Tensor._make_subclass(ShardBehindDTensor, values, False)
    listing.param._local_tensor = local_rows(listing.cut.listed(values))  # type: ignore[attr-defined]
    gradient = listing.param.grad
    _listed[moved] = Listing(listing.param, listing.cut)
    moved.grad = None if gradient is None else _padded(local_rows(gradient), listing.cut)
    return moved


def mesh_for(mesh: Mesh | None, group: ProcessGroup, replicas: object, device_type: str) -> Mesh:
    """The mesh of DTensors.

    Raises:
        ConfigurationError: torch.distributed does not know the ranks.
    """
    if mesh is not None:
        return mesh
    if replicas is not None:
        raise ConfigurationError(
            "dtensors=True with replicas needs mesh=, with two dimensions: init_device_mesh(device, (replicas, shards))"
        )
    return mesh_over(group, device_type)
