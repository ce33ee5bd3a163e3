"""Nested containers, their tensors, and argument lists."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypedDict

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from shardkit.errors import ConfigurationError
from shardkit.flattening.flat_parameter import rename_prefix
from shardkit.types import Args, Kwargs, StateDict, Tree


class NonTensors(TypedDict):
    """Holds what is left of a tuple without its tensors."""

    is_tensor: list[bool]
    objects: list[object]


def apply_to_type(type_fn: Callable[[Tree], bool], fn: Callable[[Tree], Tree], container: Tree) -> Tree:
    """Copies nested dicts, lists, tuples and sets with ``fn(x)`` in place of each ``x`` that ``type_fn`` accepts.

    Keys are kept. OrderedDicts and namedtuples keep their class; of a PackedSequence the data is replaced (fairscale
    calls ``fn`` on it and returns the sequence as it was).
    """

    def again(x: Tree) -> Tree:
        return apply_to_type(type_fn, fn, x)

    if type_fn(container):
        return fn(container)
    if isinstance(container, PackedSequence):
        data = again(container.data)
        return container if data is None else container._replace(data=data)  # a function that only looks
    if isinstance(container, OrderedDict):
        return type(container)((k, again(v)) for k, v in container.items())
    if isinstance(container, dict):
        return {k: again(v) for k, v in container.items()}
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*map(again, container))
    for kind in (list, tuple, set):
        if isinstance(container, kind):
            return kind(again(x) for x in container)
    return container


def apply_to_tensors(fn: Callable[[torch.Tensor], Tree], container: Tree) -> Tree:
    return apply_to_type(torch.is_tensor, fn, container)


def recursive_copy_to_device(value: Tree, non_blocking: bool, device: torch.device) -> Tree:
    """Returns nested lists, tuples and mappings (as dicts) with their tensors on a device."""

    def again(x: Tree) -> Tree:
        return recursive_copy_to_device(x, non_blocking, device)

    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, (list, tuple)):
        copies = [again(x) for x in value]
        return copies if isinstance(value, list) else tuple(copies)
    if isinstance(value, Mapping):
        return {k: again(v) for k, v in value.items()}
    return value


def to_np(tensor_or_container: Tree) -> Tree:
    return apply_to_tensors(lambda t: t.detach().cpu().numpy(), tensor_or_container)


def from_np(ndarray_or_container: Tree) -> Tree:
    """Returns numpy arrays as tensors that share their memory."""
    import numpy as np  # the only use; torch runs without it

    return apply_to_type(lambda x: isinstance(x, np.ndarray), torch.from_numpy, ndarray_or_container)


def pack_kwargs(*args: Tree, **kwargs: Tree) -> tuple[tuple[str, ...], Args]:
    """Returns the names of keyword arguments, and all values: ``pack_kwargs(1, a=2) == (("a",), (1, 2))``."""
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_kwargs(kwarg_keys: tuple[str, ...], flat_args: Args) -> tuple[Args, Kwargs]:
    """Returns arguments and keyword arguments from what :func:`pack_kwargs` returned.

    Raises:
        ConfigurationError: there are more names than values.
    """
    positional = len(flat_args) - len(kwarg_keys)
    if positional < 0:
        raise ConfigurationError(
            f"{len(kwarg_keys)} names {kwarg_keys} for {len(flat_args)} values; pass what pack_kwargs returned"
        )
    return flat_args[:positional], dict(zip(kwarg_keys, flat_args[positional:], strict=True))


def split_non_tensors(
    mixed: torch.Tensor | Args,
) -> tuple[tuple[torch.Tensor, ...], NonTensors | None]:
    """Returns the tensors of a tuple, and ``{"is_tensor": one bool an element, "objects": the others}``.

    One tensor gives itself and None.
    """
    if isinstance(mixed, torch.Tensor):
        return (mixed,), None
    is_tensor = [isinstance(x, torch.Tensor) for x in mixed]
    tensors = tuple(x for x, t in zip(mixed, is_tensor, strict=True) if t)
    objects = [x for x, t in zip(mixed, is_tensor, strict=True) if not t]
    return tensors, {"is_tensor": is_tensor, "objects": objects}


def unpack_non_tensors(tensors: tuple[torch.Tensor, ...], packed_non_tensors: NonTensors | None) -> Args:
    """Returns the tuple that :func:`split_non_tensors` split.

    Raises:
        ConfigurationError: the parts don't belong together.
    """
    if packed_non_tensors is None:
        return tensors
    if not isinstance(packed_non_tensors, dict):
        raise ConfigurationError(
            f"packed_non_tensors is a {type(packed_non_tensors).__name__}; pass what split_non_tensors returned"
        )
    is_tensor, objects = packed_non_tensors["is_tensor"], packed_non_tensors["objects"]
    if (len(tensors), len(objects)) != (sum(is_tensor), len(is_tensor) - sum(is_tensor)):
        raise ConfigurationError(
            f"{len(tensors)} tensors and {len(objects)} other objects for a tuple of {sum(is_tensor)} tensors and "
            f"{len(is_tensor) - sum(is_tensor)} others; pass what split_non_tensors returned"
        )
    next_tensor, next_object = iter(tensors), iter(objects)
    return tuple(next(next_tensor if t else next_object) for t in is_tensor)


# ------------------------------------------------------------ objects as bytes
def pyobject_to_tensor(obj: object, fixed_buffer_size: int = 0) -> torch.Tensor:
    """Returns the pickled object as a uint8 tensor [numel], zeros up to ``fixed_buffer_size`` if that is given.

    Raises:
        ConfigurationError: it is longer than ``fixed_buffer_size``.
    """
    pickled = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    missing = fixed_buffer_size - pickled.numel()
    if not fixed_buffer_size:
        return pickled
    if missing < 0:
        raise ConfigurationError(
            f"the pickled object has {pickled.numel()} bytes; increase fixed_buffer_size ({fixed_buffer_size})"
        )
    return torch.nn.functional.pad(pickled, (0, missing))


def tensor_to_pyobject(tensor: torch.Tensor) -> Tree:
    """Unpickles the object of :func:`pyobject_to_tensor`, running what it says: only for tensors of own ranks."""
    return pickle.loads(bytes(tensor.cpu().tolist()))


# ------------------------------------------------------------ keys of state dicts
def find_module_instances(module: nn.Module, search_class: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Returns all modules of a class in the tree, with their prefixes in a state dict (``"0.linear."``).

    A module that has several names within its parent is listed once there.
    """
    found = [("", module)] if isinstance(module, search_class) else []
    for name, child in module.named_children():
        found += [(f"{name}.{prefix}", m) for prefix, m in find_module_instances(child, search_class)]
    return found


def replace_by_prefix_(state_dict: StateDict, old_prefix: str, new_prefix: str) -> None:
    """Makes keys that begin with ``old_prefix`` begin with ``new_prefix``, in place.

    Raises:
        ConfigurationError: the prefixes are equal.
    """
    if old_prefix == new_prefix:
        raise ConfigurationError(f"old_prefix and new_prefix are both {old_prefix!r}; they have to differ")
    rename_prefix(state_dict, old_prefix, new_prefix)
