"""Tensors: how their elements lie in memory, how much of it is alive, and classes of them.

Classes are how torch's own functions are told what tensors hold, or that they have no values.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ..errors import ConfigurationError
from ..layout import Box
from ..types import AnyCallable, Args, Kwargs, Memo, ProcessGroup, Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def strided_view(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns a view of ``flat`` at ``offset`` with the shape of ``like``, and its strides where they are dense."""
    return flat.as_strided(like.shape, dense_strides(like), flat.storage_offset() + offset)


def dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    """Returns the tensor's strides where its elements fill their memory (channels-last, say), else contiguous ones."""
    is_dense = storage_order(like.shape, like.stride()) is not None
    return like.stride() if is_dense else contiguous_strides(like.shape)


def storage_order(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Returns dimensions in the order in which a tensor without gaps lies in memory; None: it has gaps, or overlaps."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1:
            if strides[d] != expected:
                return None
            expected *= shape[d]
    return order


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor whose elements lie in row-major order."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the host, without numpy and without a copy."""
    size = tensor.numel() * tensor.itemsize
    memory: Tree = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # a view of memory outlives the tensor, and this keeps it
    return memoryview(memory).cast("B")


def narrowed(tensor: torch.Tensor, box: Box, frame: Box) -> torch.Tensor:
    """Returns a view of what is in one box, of a tensor that is what is in another, ``frame``, around it."""
    for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, first - frame.offsets[dim], size)
    return tensor


# ------------------------------------------------------------ facts: what tensors answer without their values
# Names are those under which torch announces a call to ``__torch_function__``; attributes are read (get) or set.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes, as which the bits of any numbers can be read."""


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split(", "))


SHAPE = _names(
    "get shape, get ndim, get itemsize, get nbytes, __len__, dim, size, stride, numel, nelement, ndimension, "
    "element_size, is_contiguous, storage_offset"
)
FACTS = _names(
    "get dtype, get device, get layout, get requires_grad, get grad, get grad_fn, get is_leaf, get is_cpu, "
    "get is_cuda, get is_xla, get is_xpu, get is_mps, get is_meta, get is_sparse, get is_sparse_csr, "
    "get is_mkldnn, get is_nested, get is_quantized, get is_vulkan, get is_mtia, get is_maia, get is_ipu, "
    "get is_ort, get retains_grad, get output_nr, get name, get grad_dtype, get _backward_hooks, "
    "get _post_accumulate_grad_hooks, get _version, get _base, get _grad, set grad, set _grad, "
    "set requires_grad, set _backward_hooks, set _post_accumulate_grad_hooks, set grad_dtype, delete grad, "
    "requires_grad_, retain_grad, register_hook, get_device, register_post_accumulate_grad_hook, "
    "is_floating_point, is_complex, is_signed, is_same_size, is_inference, is_conj, is_neg, is_pinned, "
    "is_shared, data_ptr, __hash__, __dir__, has_names, get_default_dtype, result_type, can_cast, "
    "_get_grad_fn_or_grad_acc, get_gradient_edge, untyped_storage, is_distributed, _is_view"
)
# What makes another tensor of the same shape.
ALIKE = _names(
    "empty_like, zeros_like, ones_like, full_like, rand_like, randn_like, randint_like, new_empty, "
    "new_zeros, new_ones, new_full, new_tensor, new_empty_strided"
)
_ACCESSORS = {"__get__": "get", "__set__": "set", "__delete__": "delete"}


T = TypeVar("T", bound=torch.Tensor)


def alike(tensors: Iterable[T], numel: float = math.inf) -> Iterator[list[T]]:
    """Yields tensors of one dtype and device together, in order; as soon as they have so many elements."""
    kinds: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    numels: dict[tuple[torch.dtype, torch.device], int] = {}
    for t in tensors:
        kind = t.dtype, t.device
        kinds.setdefault(kind, []).append(t)
        numels[kind] = numels.get(kind, 0) + t.numel()
        if numels[kind] >= numel:
            del numels[kind]
            yield kinds.pop(kind)
    yield from kinds.values()


def move_buffers(
    module: torch.nn.Module, device: torch.device, source: str = "", non_blocking: bool = False
) -> None:
    """Moves buffers of a module itself, those on one type of device or all, in place."""
    for name, buffer in module._buffers.items():
        if buffer is not None and source in ("", buffer.device.type):
            module._buffers[name] = buffer.to(device, non_blocking=non_blocking)


def name_of(func: AnyCallable) -> str:
    """Returns a function's own name, or "get", "set" or "delete" and an attribute's."""
    try:
        name = func.__name__
    except AttributeError:
        name = str(func)
    accessor = _ACCESSORS.get(name)
    return name if accessor is None else f"{accessor} {func.__self__.__name__}"  # type: ignore[attr-defined]


# ------------------------------------------------------------ tensors with a class of their own
as_plain = torch._C.DisableTorchFunctionSubclass  # a context in which tensors are taken for what they are


class MarkedTensor(torch.Tensor):
    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        with as_plain():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def stays_marked(result: object, args: Sequence[object], kind: type[torch.Tensor]) -> bool:
    """Says whether the result of a function is its first argument, of this kind, again: cloned, detached, scaled."""
    return (
        type(result) is torch.Tensor
        and bool(args)
        and isinstance(args[0], kind)
        and args[0].shape == result.shape
    )


# ------------------------------------------------------------ bytes that are alive
# For devices whose allocator keeps no count (the CPU).
class LiveTensors(TorchDispatchMode):
    """Counts the bytes of storages from when an operation returns them until nobody refers to them any more.

    Attributes:
        peak: most that were alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Tree:
        returned = func(*args, **(kwargs or {}))
        self.add(returned)
        return returned

    def add(self, tensors: object) -> None:
        """Counts tensors in any nesting of containers."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.count(tensor.untyped_storage())

    def count(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage from now on; its size may have changed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.grown()

    def grown(self) -> None:
        """Notes that more may be alive than ever."""
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self.bytes -= self._sizes.pop(key, 0)


def parts_with_memory(tensor: Tree) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory that one of a wrapping class (a DTensor) is made of; else itself."""
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]:
        if isinstance(part, torch.Tensor):
            yield from parts_with_memory(part)


def named_parts(name: str, value: torch.Tensor, parts: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Returns what one of a wrapping class is made of, named as torchao does ("0._weight_scale"); others as it is."""
    if not is_traceable_wrapper_subclass(value):
        return {name: value}
    path, dot, last = name.rpartition(".")
    return {f"{path}{dot}_{last}_{p}": getattr(value, p) for p in parts or value.__tensor_flatten__()[0]}


# of what classes say of themselves: what is nobody's value, and what doesn't say what it is
_NO_VALUE = re.compile(r"device\(type='\w+'(, index=\d+)?\)|requires_grad=\w+| at 0x[0-9a-f]+")
_UNTOLD = re.compile(r"tensor\(|array\(|<lambda>| object at 0x")


def facts_beside(value: Tree) -> str | None:
    """Says what one of a wrapping class is beside its tensors, alike on any device; None where that can't be told."""
    if not is_traceable_wrapper_subclass(value):
        return ""
    names, context = value.__tensor_flatten__()
    dtypes = {name: getattr(value, name).dtype for name in names}
    numbers = {n: number for n, number in sorted(vars(value).items()) if type(number) in (int, float)}
    facts = f"{type(value).__qualname__} of {value.dtype}, made of {dtypes} with {context!r}, {numbers}"  # type: ignore[attr-defined]
    return None if _UNTOLD.search(facts) else _NO_VALUE.sub("", facts)


def copied(value: Tree) -> torch.Tensor:
    """Returns a copy, of one of a wrapping class made of copies: some (NF4) round anew where they are cloned."""
    if not is_traceable_wrapper_subclass(value):
        return value.clone()  # type: ignore[no-any-return]
    names, facts = value.__tensor_flatten__()
    parts = {name: getattr(value, name).clone() for name in names}
    return type(value).__tensor_unflatten__(parts, facts, value.size(), value.stride())  # type: ignore[no-any-return]


def differing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Counts the elements that differ, and finds the largest absolute difference; nan where only one has nan."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())  # equal infinities have no difference
    apart = (a - b).abs().masked_fill(same, 0.0)
    return int(same.numel() - same.sum()), float(apart.max()) if apart.numel() else 0.0


# ------------------------------------------------------------ DTensors
# DTensors of torch's that are cut along one dimension, by themselves or within another cut, and meshes.
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


def dimension_of(said: object, name: str, param: nn.Parameter) -> int:
    """Returns the dimension along which a parameter is cut, by what torch's ``shard_placement_fn`` says of it.

    Raises:
        ConfigurationError: it says something else.
    """
    from torch.distributed.tensor import Shard

    chosen, wrong = getattr(said, "placement", said), "Expected Shard"  # ShardPlacementResult of torch 2.13
    if chosen is None or isinstance(chosen, Shard):
        dim = 0 if chosen is None else chosen.dim + (param.dim() if chosen.dim < 0 else 0)
        if dim == 0 or 0 <= dim < param.dim():
            return dim
        wrong = f"Shard dim {dim} is invalid for {param.dim()}D tensor"
    raise ConfigurationError(
        f"Invalid shard_placement_fn result {said} for {name!r} of shape {tuple(param.shape)}: {wrong}. Parameters are "
        "cut along one of their dimensions"
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
    """Returns a DTensor over this memory, laid out as another's; on the host, too, where from_local would move it."""
    stride = contiguous_strides(other.shape)
    meta = other._spec.tensor_meta._replace(stride=stride, dtype=local.dtype)  # type: ignore[union-attr]
    kind: type[DTensor] = sys.modules["torch.distributed.tensor"].DTensor
    return kind.__new__(kind, local, other._spec.shallow_copy_with_tensor_meta(meta), requires_grad=False)


def _rows(mesh: DeviceMesh, shape: torch.Size, dim: int = 0) -> list[Placement]:
    from torch.distributed.tensor import Replicate, Shard

    return [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(dim) if shape else Replicate()]


def laid_out(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """Returns a DTensor of this shape whose part here this is."""
    from torch.distributed.tensor import DTensor

    strides = contiguous_strides(shape)
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
