"""torch_xla.distributed.fsdp.wrap: which submodules get FSDP wrappers of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import always_wrap_policy

from shardkit.types import Tree
from shardkit.wrapping.context import WrapContext, wrap_tree
from shardkit.wrapping.policies import default_auto_wrap_policy

__all__ = [
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "recursive_wrap",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wraps the modules for which ``lambda_fn`` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wraps every module of the given types."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wraps what has so many parameters that no wrapper below holds, 100 million by default.

    Args:
        recurse: ask about the children (True) or about ``module`` itself (False).
        unwrapped_params: numel of its parameters that no wrapper holds yet.
        min_num_params: from how many elements on a module is wrapped.
        force_leaf_modules: types whose children are never wrapped; default ``FORCE_LEAF_MODULES`` of this function.
        exclude_wrap_modules: types that are never wrapped; default ``EXCLUDE_WRAP_MODULES`` of this function.
    """
    leaves = _by_size.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = _by_size.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return default_auto_wrap_policy(
        module, recurse, unwrapped_params, False, min_num_params, leaves, excluded
    )


_by_size: Any = size_based_auto_wrap_policy  # a function with attributes
_by_size.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}
_by_size.FORCE_LEAF_MODULES = {nn.MultiheadAttention}


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Iterable[nn.Module],
    ignored_params: Iterable[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Tree,
) -> tuple[nn.Module, int]:
    """Wraps the submodules that the policy chooses, children before parents, in place.

    Args:
        module: root of the tree; nothing in it may be wrapped already.
        auto_wrap_policy: asked by keyword: ``module``, ``recurse``, ``unwrapped_params``.
        wrapper_cls: class or function that makes a wrapper: ``wrapper_cls(module, **kwargs)``.
        ignored_modules: neither wrapped nor looked into.
        ignored_params: not counted.
        only_wrap_children: leave ``module`` itself as it is, whatever the policy says.

    Returns:
        The module or its wrapper, and the numel of the counted parameters that are in a wrapper now.

    Raises:
        WrapError: a module is wrapped already.
    """
    context = WrapContext(
        wrapper_cls,
        kwargs=kwargs,
        uncounted=frozenset(ignored_params),
        ignored=frozenset(ignored_modules),
        keeps_root=only_wrap_children,
    )
    return wrap_tree(module, auto_wrap_policy, {}, context=context)
