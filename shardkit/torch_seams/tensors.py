"""Tensors: how their elements lie in memory, how much of it is alive, and classes of them.

Classes are how torch's own functions are told what tensors hold, or that they have no values.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..layout import Box
from ..types import AnyCallable, Args, Kwargs, Tree


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


def differing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Counts the elements that differ, and finds the largest absolute difference; nan where only one has nan."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())  # equal infinities have no difference
    apart = (a - b).abs().masked_fill(same, 0.0)
    return int(same.numel() - same.sum()), float(apart.max()) if apart.numel() else 0.0
