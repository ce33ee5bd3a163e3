"""Which modules of a tree become units of their own: the policies that ship, and how policies are asked.

A policy is a callable that is asked twice about a module, by keyword: with ``recurse=True`` whether to look at
the children, then, when they are done, with ``recurse=False`` whether to wrap the module itself. Three families
exist and differ in what they accept:

=====================  ====================================================================
fairscale >= 0.4.6     ``module, recurse, unwrapped_params, module_is_root``
older fairscale        ``module, recurse, unwrapped_params``
torch                  ``module, recurse, nonwrapped_numel``
=====================  ====================================================================

torch also has policy objects that plan the whole tree at once (``CustomPolicy``). :func:`adapt_policy` makes one
interface of all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..errors import ConfigurationError
from ..types import AnyCallable, StateDict

ModuleTypes = Iterable[type[nn.Module]]


def _size_decides(
    policy: Any,  # whose attributes hold the default types
    module: nn.Module,
    recurse: bool,
    large: bool,
    leaves: ModuleTypes | None,
    never_wrapped: ModuleTypes | None,
) -> bool:
    if recurse:
        kept_out = policy.FORCE_LEAF_MODULES if leaves is None else leaves
    else:
        kept_out = policy.EXCLUDE_WRAP_MODULES if never_wrapped is None else never_wrapped
    return large and not isinstance(module, tuple(kept_out))


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool = False,
    min_num_params: float = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Wraps what is large enough, children first (fairscale's default).

    Args:
        recurse: ask about the children (True) or about ``module`` itself (False).
        unwrapped_params: numel of its parameters that no wrapper holds yet.
        module_is_root: it is the module that :func:`~shardkit.wrapping.auto_wrap` was called with.
        min_num_params: from how many elements on a module is wrapped.
        force_leaf_modules: types whose children are never looked at, and which are never wrapped themselves; default
            ``default_auto_wrap_policy.FORCE_LEAF_MODULES``.
        exclude_wrap_modules: types that are never wrapped; default ``default_auto_wrap_policy.EXCLUDE_WRAP_MODULES``.
        skip_params_check_for_root: wrap the root however little is left for it. Its children are only looked at if
            it is large in all.
    """
    large = unwrapped_params >= min_num_params
    if not recurse and module_is_root and skip_params_check_for_root:
        large = True
    return _size_decides(
        default_auto_wrap_policy, module, recurse, large, force_leaf_modules, exclude_wrap_modules
    )


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: float = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wraps what is large enough, children first; arguments named as in torch.

    Args: see :func:`default_auto_wrap_policy`; ``nonwrapped_numel`` is its ``unwrapped_params``.
    """
    large = nonwrapped_numel >= min_num_params
    return _size_decides(
        size_based_auto_wrap_policy, module, recurse, large, force_leaf_modules, exclude_wrap_modules
    )


# Containers without a forward can't be wrapped; MultiheadAttention reads its children's weights without calling
# them, so they have to stay with it.
_policy: Any
for _policy in (default_auto_wrap_policy, size_based_auto_wrap_policy):
    _policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}
    _policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Wraps every module of the given types: ``functools.partial(..., transformer_layer_cls={Block})``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool = False
) -> bool:
    """Wraps the modules that carry a ``wrapper_config`` attribute (a dict of the wrapper's arguments)."""
    return recurse or hasattr(module, "wrapper_config")


@runtime_checkable
class AdaptedPolicy(Protocol):
    """A policy as :func:`~shardkit.wrapping.auto_wrap` asks it."""

    def descend(self, module: nn.Module, numel: int, is_root: bool) -> bool:
        """Whether to look at the children of ``module``, whose parameters have ``numel`` elements."""
        ...

    def arguments(self, module: nn.Module, numel: int, is_root: bool) -> StateDict | None:
        """Returns the wrapper's arguments that the policy itself sets, or None if ``module`` is not to be wrapped."""
        ...


class _CallablePolicy:
    def __init__(self, policy: AnyCallable) -> None:
        self._policy = policy
        self._accepted, takes_anything = _keywords(policy)
        if takes_anything:
            self._accepted |= {"module_is_root", "module", "recurse"}
            if "nonwrapped_numel" not in self._accepted:
                self._accepted.add("unwrapped_params")

    def _ask(self, module: nn.Module, recurse: bool, numel: int, is_root: bool) -> bool:
        offered = {
            "module": module,
            "recurse": recurse,
            "unwrapped_params": numel,
            "nonwrapped_numel": numel,
            "module_is_root": is_root,
        }
        return bool(self._policy(**{k: v for k, v in offered.items() if k in self._accepted}))

    def descend(self, module: nn.Module, numel: int, is_root: bool) -> bool:
        return self._ask(module, True, numel, is_root)

    def arguments(self, module: nn.Module, numel: int, is_root: bool) -> StateDict | None:
        return {} if self._ask(module, False, numel, is_root) else None


class _PlannedPolicy:
    """A policy object of torch that names its targets, and arguments for them, up front."""

    def __init__(self, targets: dict[nn.Module, StateDict]) -> None:
        self._targets = targets

    def descend(self, module: nn.Module, numel: int, is_root: bool) -> bool:
        return True

    def arguments(self, module: nn.Module, numel: int, is_root: bool) -> StateDict | None:
        return self._targets.get(module)


def _keywords(policy: AnyCallable) -> tuple[set[str], bool]:
    """Returns the keywords that a callable accepts, and whether it accepts any."""
    try:
        parameters = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):  # no signature to read (C code): it gets fairscale's four
        return {"module", "recurse", "unwrapped_params", "module_is_root"}, False
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {p.name for p in parameters if p.kind in by_keyword}
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def adapt_policy(policy: object, root: nn.Module) -> AdaptedPolicy:
    """Makes one interface of any of the families of policies; returns what has it already.

    Raises:
        ConfigurationError: ``policy`` is neither a callable nor a policy object of torch.
    """
    if isinstance(policy, AdaptedPolicy):
        return policy
    if callable(policy):
        return _CallablePolicy(policy)
    plan = getattr(policy, "_run_policy", None)
    if plan is None:
        raise ConfigurationError(
            f"auto_wrap_policy={policy!r} is no policy; pass a callable (module, recurse, unwrapped_params, "
            "module_is_root) -> bool, or a policy of torch.distributed.fsdp.wrap"
        )
    return _PlannedPolicy(plan(root_module=root, ignored_modules=set(), root_kwargs={}))


def with_min_num_params(policy: object, min_num_params: float) -> Callable[..., bool]:
    """Returns ``policy`` with another threshold.

    Raises:
        ConfigurationError: it has no argument ``min_num_params``.
    """
    if not callable(policy) or "min_num_params" not in _keywords(policy)[0]:
        raise ConfigurationError(
            f"min_num_params={min_num_params} was given, but the policy {policy!r} takes no such argument; leave "
            "it out, or use a policy by size"
        )
    return functools.partial(policy, min_num_params=min_num_params)
