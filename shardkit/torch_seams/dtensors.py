"""DTensors of torch's that are cut along one dimension, by themselves or within another cut, and meshes."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, TypeGuard, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ..errors import ConfigurationError
from ..layout import Box
from ..types import AnyCallable, Args, Kwargs, Memo, ProcessGroup, Tree
from .tensors import narrowed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def group_of(mesh: DeviceMesh | None, group: ProcessGroup = None) -> ProcessGroup:
    """Returns all ranks of a mesh, of any number of dimensions; the group that was passed where there is no mesh."""
    if mesh is None:
        return group
    _check_mesh(mesh, group)
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def shards_and_replicas_of(
    mesh: DeviceMesh, group: ProcessGroup = None, replicas: ProcessGroup = None
) -> tuple[ProcessGroup, ProcessGroup]:
    """Returns the ranks that share one copy of the model, and ranks that hold the same shard of it.

    A mesh of one dimension has the former; of one with two they are the last dimension, and replicas the first.
    """
    _check_mesh(mesh, group if replicas is None else replicas)
    if mesh.ndim > 2:
        raise ConfigurationError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: parameters are sharded over one dimension, or "
            "over the last of two with replicas along the first. Pass the dimensions that are for data, as in "
            'mesh["dp"] or mesh["dp_replicate", "dp_shard"]'
        )
    if mesh.ndim == 1:
        return mesh.get_group(), None
    return mesh.get_group(1), mesh.get_group(0)


def _check_mesh(mesh: object, group: ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh  # costs those who use none nothing

    if not isinstance(mesh, DeviceMesh):
        raise ConfigurationError(
            f"mesh is a {type(mesh).__name__}; pass a torch.distributed.device_mesh.DeviceMesh, or a process group as "
            "group="
        )
    if group is not None:
        raise ConfigurationError("both mesh and a group were passed, which say the same thing; leave one out")


def mesh_over(ranks: ProcessGroup | DeviceMesh, device_type: str) -> DeviceMesh:
    """Returns the mesh of a process group of torch's; a mesh itself.

    Args:
        ranks: a mesh, a process group, or (ranks to shard over, replicas); None for all.
        device_type: of the tensors that are to be cut.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(ranks, DeviceMesh):
        return ranks
    dist = torch.distributed
    group = ranks[0] if isinstance(ranks, tuple) else ranks
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            "a sharded state dict holds DTensors, which need ranks that torch.distributed knows: pass device_mesh= or "
            "process_group= where the module is wrapped, or take FULL_STATE_DICT, which is the same on every backend"
        )
    return DeviceMesh.from_group(group, device_type)


def cut_rows(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Returns this rank's rows of a tensor that all ranks have, as a DTensor; one number stays as it is.

    Args:
        mesh: cut along the last dimension; what is along others are replicas.
    """
    return full if full.dim() == 0 else cut(full, mesh, _rows(mesh, full.shape))


def cut(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns this rank's part of a tensor that all ranks have, as a DTensor with these placements."""
    local = full
    for at, placement in sorted(enumerate(placements), key=lambda one: hasattr(one[1], "split_factor")):
        if isinstance(dim := getattr(placement, "dim", None), int):
            rank, chunks = mesh.get_local_rank(at), local.chunk(mesh.size(at), dim)
            local = chunks[rank] if rank < len(chunks) else local.narrow(dim, 0, 0)
    return laid_out(local.clone(), mesh, placements, full.shape)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Says whether it is a DTensor; imports nothing: where there is one, somebody has."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """Returns the memory on this rank: of a DTensor its local tensor."""
    return value._local_tensor if is_dtensor(value) else value


def is_cut(value: object) -> bool:
    """Says whether it is a DTensor, or a ShardedTensor."""
    return hasattr(value, "full_tensor") or hasattr(value, "local_shards")


def whole(value: Tree) -> torch.Tensor:
    """Returns the full tensor of a DTensor or of a ShardedTensor (collective)."""
    if not hasattr(value, "full_tensor"):
        return _put_together(value)
    here = value.device_mesh.device_type
    full: torch.Tensor = (value if value.device.type == here else value.to(here)).full_tensor()
    return full


def part_here(
    like: torch.Tensor, mesh: DeviceMesh, shape: torch.Size, within: DTensorSpec | None = None, dim: int = 0
) -> DTensor:
    """Returns a DTensor over no values, for what it says: its ``_spec``, and the shape of the part on this rank.

    Args:
        like: has the dtype and the device.
        mesh: cut along the last dimension; what is along others are replicas.
        shape: of what is cut; every rank has all of one without dimensions.
        within: of the DTensor whose local tensor that is, if it is one.
        dim: of the shape, along which it is cut.
    """
    placements, sizes = _rows(mesh, shape, dim), list(shape)
    if shape:
        rank, parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        most = -(-shape[dim] // parts)
        sizes[dim] = max(0, min(most, shape[dim] - rank * most))
    local = like.new_empty(()).expand(sizes)
    if within is None:
        return laid_out(local, mesh, placements, shape)
    from torch.distributed.tensor.placement_types import _StridedShard

    if shape and within.num_shards_map[dim] > 1:
        placements[-1] = _StridedShard(dim, split_factor=within.num_shards_map[dim])
    return laid_out(local, joined(mesh, within.mesh), [*placements, *within.placements], within.shape)


def joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Returns the mesh with the dimensions of both.

    Raises:
        ConfigurationError: they are not parts of one mesh.
    """
    from torch.distributed.device_mesh import DeviceMesh

    try:
        if hasattr(DeviceMesh, "_concatenate"):  # torch 2.10
            return DeviceMesh._concatenate([outer, inner])
        from torch.distributed.device_mesh import _mesh_resources  # type: ignore[attr-defined]

        names = (*(outer.mesh_dim_names or ()), *(inner.mesh_dim_names or ()))
        both: DeviceMesh = _mesh_resources.get_root_mesh(outer)[names]
    except Exception as error:
        raise ConfigurationError(
            f"parameters are DTensors over {inner}, and mesh is {outer}: both have to be named dimensions of one mesh, "
            f'as in fully_shard(model, mesh=mesh["dp"]) after parallelize_module(model, mesh["tp"], ...) ({error})'
        ) from error
    return both


def dimension_of(chosen: object, name: str, param: nn.Parameter, mesh: DeviceMesh | None) -> int:
    """Returns the dimension along which a parameter is cut, by what torch's ``shard_placement_fn`` says of it.

    Raises:
        ConfigurationError: it says something else, or names another mesh than the call's.
    """
    from torch.distributed.tensor import Shard

    info = getattr(chosen, "mesh_info", None)  # ShardPlacementResult of torch 2.13
    said, chosen = chosen, chosen if info is None else getattr(chosen, "placement", None)
    if chosen is None or isinstance(chosen, Shard):
        dim = 0 if chosen is None else chosen.dim + (param.dim() if chosen.dim < 0 else 0)
        if (dim == 0 or 0 <= dim < param.dim()) and (info is None or info.mesh == mesh):
            return dim
        wrong = f"Shard dim {dim} is invalid for {param.dim()}D tensor" if dim else "it has another mesh"
    else:
        wrong = "Expected Shard"
    raise ConfigurationError(
        f"shard_placement_fn says {said} for {name!r} of shape {tuple(param.shape)}: {wrong}. Parameters are cut along "
        "one of their dimensions, all of a call over the mesh that it is given; call fully_shard for a module whose "
        "parameters are to have another one"
    )


def check_within(name: str, within: DTensorSpec, mesh: DeviceMesh, dim: int = 0) -> None:
    """Raises ConfigurationError for a DTensor whose rows can't be divided over a mesh.

    Args:
        name: of the parameter.
        within: how it is cut.
        mesh: divides the local tensor along its last dimension.
        dim: of the local tensor, that is divided.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    joined(mesh, within.mesh)
    placements, rows = within.placements, within.shape[dim] if within.shape else 1
    parts = within.num_shards_map[dim] if within.shape else 1
    is_uneven = parts > 1 and rows % (parts * mesh.size(mesh.ndim - 1)) > 0  # older torch mixes rows of these
    is_mixed = is_uneven and issubclass(_StridedShard, Shard)
    if is_mixed or any(p.is_partial() or isinstance(p, _StridedShard) for p in placements):
        raise ConfigurationError(
            f"parameter {name!r} is a DTensor of {rows} rows with {placements}, and torch {torch.__version__} can't "
            f"put its parts together once {mesh} divides them. Cut it by Shard or replicate it; where torch is older "
            "than 2.10, all ranks have to divide its rows"
        )


class Annotation(NamedTuple):
    """Says how a plain tensor is a part of a whole one, along the dimensions of a mesh that are not for data."""

    within: DTensorSpec
    owed: tuple[Placement, ...]  # of its gradient, as autograd makes it


class WholeMesh(NamedTuple):
    """A mesh over which parameters are laid out, data included; torch's ``dp_mesh_dims`` names its dimensions for data.

    Parameters are DTensors over it, replicated along those; or plain tensors, of which the package spmd_types has noted
    what they are along the others.
    """

    mesh: DeviceMesh
    data: tuple[str, ...]

    def annotation(self, name: str, param: torch.Tensor) -> Annotation | None:
        """Returns what is noted of a plain parameter; None where nothing is, or where all dimensions are for data.

        Raises:
            ConfigurationError: it is not the same along those for data, or a dimension is missing.
        """
        spmd: Tree = sys.modules.get("spmd_types")
        names = enumerate(self.mesh.mesh_dim_names or ())
        rest = tuple(n for dim, n in names if n not in self.data and self.mesh.size(dim) > 1)
        noted = {} if spmd is None or not rest else dict(spmd.get_local_type(param))
        if not noted:
            return None
        if (cut := spmd.get_partition_spec(param)) is not None:
            noted.update(spmd.types.partition_spec_to_shard_types(cut))
        types = [noted.pop(spmd.MeshAxis.of(self.mesh.get_group(n)), None) for n in rest]
        if None in types or any(kind is not spmd.R for kind in noted.values()):
            raise ConfigurationError(
                f"what spmd_types notes of parameter {name!r} is {spmd.get_local_type(param)}: of each of the "
                f"dimensions {rest} of {self.mesh}, which are not for data, it has to note something; of others R"
            )
        placements = [spmd.spmd_type_to_dtensor_placement(kind) for kind in types]
        owed = tuple(spmd.spmd_type_to_dtensor_placement(kind.backward_type()) for kind in types)
        from torch.distributed.tensor import DTensor

        whole = DTensor.from_local(param.detach(), self.mesh[rest], placements, run_check=False)
        return Annotation(whole._spec, owed)


def without_data(param: DTensor, data: Sequence[int]) -> DTensorSpec | None:
    """Returns how a DTensor is cut along the dimensions of its mesh that are not among these; None: along none.

    Raises:
        ConfigurationError: it is cut along one of these.
    """
    mesh, placements = param.device_mesh, param.placements
    if not data:
        return param._spec
    if not all(placements[dim].is_replicate() for dim in data):
        raise ConfigurationError(
            f"a parameter is a DTensor over {mesh} with {placements}; along dimensions for data it has to be replicated"
        )
    rest = [dim for dim in range(mesh.ndim) if dim not in data]
    if not rest:
        return None
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    part = mesh[tuple((mesh.mesh_dim_names or ())[dim] for dim in rest)]
    return DTensorSpec(part, tuple(placements[dim] for dim in rest), tensor_meta=param._spec.tensor_meta)


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor over this memory; quicker than ``DTensor.from_local``, which looks at everything anew."""
    kind: type[DTensor] = sys.modules["torch.distributed.tensor"].DTensor  # whoever made the spec has it
    # its constructor would ask torch.compile
    return kind.__new__(kind, at_offset_0(local), spec, requires_grad=False)


def at_offset_0(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the memory of a view, which it keeps alive, in whose storage it is alone.

    A DTensor repeats its local tensor's offset in memory as if it had memory itself. torch copies and pickles only
    those with offset 0, and torch.compile takes only those with the offset of their local tensor: so that has to be 0.
    """
    if hasattr(view, "fsdp_pre_all_gather") or is_traceable_wrapper_subclass(view):
        return view  # its memory is its class's
    if view.is_meta:
        return torch.empty_like(view)
    dtype = view.dtype
    if dtype.itemsize == 1:  # torch 2.9 has no float8 in DLPack
        view = view.view(torch.uint8)
    made: torch.Tensor = from_dlpack(to_dlpack(view))
    return made if made.dtype == dtype else made.view(dtype)


def as_parameter(value: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Returns a DTensor that nothing else has, as a parameter; ``nn.Parameter`` would make another one."""
    value.requires_grad_(requires_grad)._is_param = True
    return cast("nn.Parameter", value)


@functools.cache
def of_dtensors(kind: type, dtensor: type[torch.Tensor]) -> type[torch.Tensor]:
    """Makes a class of DTensors that have the methods of another class, too; copies are plain DTensors."""

    def as_plain(each: Sequence[torch.Tensor], call: Callable[[], Tree]) -> Tree:
        for t in each:
            t.__class__ = dtensor
        try:
            return call()
        finally:
            for t in each:
                t.__class__ = made

    def dispatch(
        cls: type, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        """Lets torch see plain DTensors: what it returns for a view has to have the class of what it is given."""
        given: list[Tree] = [t for t in tree_leaves((args, kwargs)) if type(t) is made]
        return as_plain(given, lambda: dtensor.__torch_dispatch__(func, types, args, kwargs or {}))

    def copied(self: torch.Tensor, memo: Memo) -> Tree:
        return as_plain([self], lambda: dtensor.__deepcopy__(self, memo))  # type: ignore[arg-type]

    def reduced(self: torch.Tensor, protocol: SupportsIndex) -> Tree:
        return as_plain([self], lambda: dtensor.__reduce_ex__(self, protocol))

    methods = {"__torch_dispatch__": classmethod(dispatch), "__deepcopy__": copied, "__reduce_ex__": reduced}
    made = type(kind.__name__, (kind, dtensor), methods)
    return made


def like_dtensor(local: torch.Tensor, other: DTensor) -> DTensor:
    """Returns a DTensor over this memory, which is laid out as another's, in a dtype of its own."""
    return laid_out(local, other.device_mesh, other.placements, other.shape)


def _rows(mesh: DeviceMesh, shape: torch.Size, dim: int = 0) -> list[Placement]:
    from torch.distributed.tensor import Replicate, Shard

    return [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(dim) if shape else Replicate()]


def laid_out(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """Returns a DTensor of this shape whose part here this is."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def _put_together(sharded: Tree) -> torch.Tensor:
    """Returns the full tensor of a ShardedTensor; what torch has for it gives it to one rank alone."""
    group = sharded._process_group
    shards = sharded.local_shards()
    # of one kind on all ranks, also on those without a shard
    kind = sharded.metadata().shards_metadata[0].placement.device().type
    served = [device.type for device in group._device_types]
    device = kind if kind in served else served[0]
    full = torch.zeros(sharded.size(), dtype=sharded.dtype, device=device)
    for shard in shards:
        here = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        narrowed(full, here, Box((0,) * full.dim(), tuple(full.shape))).copy_(shard.tensor)
    torch.distributed.all_reduce(full, group=group)
    return full
