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
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..errors import ConfigurationError
from ..types import AnyCallable, Kwargs, StateDict


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
    is_large = unwrapped_params >= min_num_params
    if recurse:
        leaves = _by_size.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        return is_large and not isinstance(module, tuple(leaves))
    excluded = _by_size.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    is_wanted = is_large or (module_is_root and skip_params_check_for_root)
    return is_wanted and not isinstance(module, tuple(excluded))


# Containers without a forward can't be wrapped; MultiheadAttention reads its children's weights without calling
# them, so they have to stay with it.
_by_size: Any = default_auto_wrap_policy  # a function with attributes
_by_size.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}
_by_size.FORCE_LEAF_MODULES = {nn.MultiheadAttention}


def __getattr__(name: str) -> AnyCallable:
    """Returns policies that are torch's own; to import them takes a while."""
    if name not in ("size_based_auto_wrap_policy", "transformer_auto_wrap_policy"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: AnyCallable = getattr(importlib.import_module("torch.distributed.fsdp.wrap"), name)
    return found


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool = False
) -> bool:
    """Wraps the modules that carry a ``wrapper_config`` attribute (a dict of the wrapper's arguments)."""
    return recurse or hasattr(module, "wrapper_config")


class AdaptedPolicy:
    """A policy as :func:`~shardkit.wrapping.auto_wrap` asks it: of a callable, with the keywords that it accepts."""

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
        """Says whether to look at the children of ``module``, whose parameters have ``numel`` elements."""
        return self._ask(module, True, numel, is_root)

    def arguments(self, module: nn.Module, numel: int, is_root: bool) -> StateDict | None:
        """Returns the wrapper's arguments that the policy itself sets, or None if ``module`` is not to be wrapped."""
        return {} if self._ask(module, False, numel, is_root) else None


class _PlannedPolicy(AdaptedPolicy):
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


def adapt_policy(
    policy: object, root: nn.Module, ignored: Iterable[nn.Module] = (), arguments: Kwargs | None = None
) -> AdaptedPolicy:
    """Makes one interface of any of the families of policies; returns what has it already.

    Args:
        root: of the tree, for policies that plan all of it, with what is ``ignored`` and the wrapper's ``arguments``.

    Raises:
        ConfigurationError: ``policy`` is neither a callable nor a policy object of torch.
    """
    if isinstance(policy, AdaptedPolicy):
        return policy
    plan = getattr(policy, "_run_policy", None)
    if plan is not None:
        targets = plan(root_module=root, ignored_modules=set(ignored), root_kwargs=arguments or {})
        return _PlannedPolicy(targets)
    if not callable(policy):
        raise ConfigurationError(
            f"auto_wrap_policy={policy!r} is no policy; pass a callable (module, recurse, unwrapped_params or "
            "nonwrapped_numel) -> bool, or a policy of torch.distributed.fsdp.wrap"
        )
    return AdaptedPolicy(policy)


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
