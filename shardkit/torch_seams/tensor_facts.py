"""Classes of tensors by which torch's own functions are told what they hold, or that they have no values.

Facts are what a tensor answers without its values. Names are those under which torch announces a call to
``__torch_function__``; attributes are read (get) or set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, TypeVar

import torch

from ..types import AnyCallable

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
