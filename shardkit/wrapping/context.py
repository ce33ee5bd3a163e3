"""Wrapping modules while a model is built, or afterwards by policy: ``enable_wrap``, ``wrap``, ``auto_wrap``.

::

    with enable_wrap(wrapper_cls=FSDP, process_group=group):
        self.head = wrap(nn.Linear(8, 8))                          # this module
        self.body = auto_wrap(Transformer(), min_num_params=1e6)   # what is large inside of it

Outside of an ``enable_wrap`` context both return the module as it is, so a model needs no second version.
Names and behaviour follow fairscale's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..errors import ConfigurationError, LifecycleError
from ..types import AnyCallable, Kwargs, StateDict


# ------------------------------------------------------------ policies
# Which modules of a tree become units of their own: the policies that ship, and how policies are asked.
#
# A policy is a callable that is asked twice about a module, by keyword: with ``recurse=True`` whether to look at
# the children, then, when they are done, with ``recurse=False`` whether to wrap the module itself. Three families
# exist and differ in what they accept:
#
# =====================  ====================================================================
# fairscale >= 0.4.6     ``module, recurse, unwrapped_params, module_is_root``
# older fairscale        ``module, recurse, unwrapped_params``
# torch                  ``module, recurse, nonwrapped_numel``
# =====================  ====================================================================
#
# torch also has policy objects that plan the whole tree at once (``CustomPolicy``). :func:`adapt_policy` makes one
# interface of all of them.
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


@runtime_checkable
class AdaptedPolicy(Protocol):
    """A policy as :func:`~shardkit.wrapping.auto_wrap` asks it."""

    def descend(self, module: nn.Module, numel: int, is_root: bool) -> bool:
        """Says whether to look at the children of ``module``, whose parameters have ``numel`` elements."""
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


# ------------------------------------------------------------ contexts
class WrapError(ConfigurationError):
    """A module can't be wrapped as asked."""


class NestedWrapError(LifecycleError, NotImplementedError):
    """``enable_wrap`` inside of ``enable_wrap``. (A NotImplementedError too, as in fairscale.)"""


@dataclass(frozen=True)
class WrapContext:
    """Settings of an ``enable_wrap`` block.

    Attributes:
        wrapper_cls: makes the wrapper: ``wrapper_cls(module, **kwargs)``.
        policy: for :func:`auto_wrap` where it is given none.
        kwargs: the wrapper's arguments, unless the module or the call say otherwise.
        prepare: applied to a module before it is wrapped.
        uncounted: parameters that no policy counts.
    """

    wrapper_cls: AnyCallable
    policy: object = default_auto_wrap_policy
    kwargs: Kwargs = field(default_factory=dict)
    prepare: Callable[[nn.Module], nn.Module] | None = None
    uncounted: frozenset[nn.Parameter] = frozenset()


# Ranks may be threads of one process, each building its own replica: the state belongs to the thread.
_context: ContextVar[WrapContext | None] = ContextVar("shardkit.wrapping", default=None)


def current_context() -> WrapContext | None:
    """Returns the enclosing ``enable_wrap`` block's settings in this thread, or None."""
    return _context.get()


def enter_context(context: WrapContext) -> None:
    """Begins a block.

    Raises:
        NestedWrapError: one is open already; it stays as it is.
    """
    if _context.get() is not None:
        raise NestedWrapError(
            "enable_wrap inside of another enable_wrap block is not supported; end the first block, or pass what "
            "differs as arguments of wrap() and auto_wrap(), or as the module's wrapper_config"
        )
    _context.set(context)


def leave_context() -> None:
    """Ends the block, if there is one."""
    _context.set(None)


@contextlib.contextmanager
def enable_wrap(
    auto_wrap_policy: object = None, *, wrapper_cls: AnyCallable, **wrapper_kwargs: object
) -> Iterator[None]:
    """Lets :func:`wrap` and :func:`auto_wrap` wrap within this block (and this thread).

    Args:
        auto_wrap_policy: decides in :func:`auto_wrap`; default
            :func:`~shardkit.wrapping.context.default_auto_wrap_policy`.
        wrapper_cls: class or function that makes a wrapper of a module.
        **wrapper_kwargs: its arguments.

    Raises:
        NestedWrapError: within another such block.
    """
    policy = default_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
    enter_context(WrapContext(wrapper_cls, policy, wrapper_kwargs))
    try:
        yield
    finally:
        leave_context()


def wrap(module: nn.Module, **wrap_overrides: object) -> nn.Module:
    """Wraps one module, within :func:`enable_wrap`; else returns it.

    The wrapper's arguments are those of the block, overridden by the dict ``module.wrapper_config`` if there is
    one, overridden by ``wrap_overrides``.

    Raises:
        WrapError: ``wrapper_config`` is no dict.
    """
    context = _context.get()
    return module if context is None else _apply(context, module, {}, wrap_overrides)


def auto_wrap(
    module: nn.Module,
    auto_wrap_policy: object = None,
    *,
    min_num_params: float | None = None,
    **wrap_overrides: object,
) -> nn.Module:
    """Wraps the modules of a tree that the policy chooses, children before parents; within :func:`enable_wrap` only.

    The tree is changed in place. A module that has several names is wrapped once, and all names lead to the
    wrapper.

    Args:
        module: root of the tree; none of its modules may be wrapped already.
        auto_wrap_policy: see :mod:`shardkit.wrapping.context`; default that of the block.
        min_num_params: threshold for a policy by size (short for ``functools.partial(policy, min_num_params=...)``).
        **wrap_overrides: the wrapper's arguments, stronger than all others.

    Returns:
        The wrapper of ``module`` if the policy chose it too, else ``module``.

    Raises:
        WrapError: a module is wrapped already.
        ConfigurationError: the policy is none, or takes no ``min_num_params``.
    """
    context = _context.get()
    if context is None:
        return module
    policy = context.policy if auto_wrap_policy is None else auto_wrap_policy
    if min_num_params is not None:
        policy = with_min_num_params(policy, min_num_params)
    return wrap_tree(module, policy, wrap_overrides)[0]


def wrap_tree(
    module: nn.Module,
    policy: object,
    overrides: Kwargs,
    module_is_root: bool = True,
    context: WrapContext | None = None,
) -> tuple[nn.Module, int]:
    """Does what :func:`auto_wrap` does; also returns the numel of all parameters that are within a wrapper afterwards.

    Args: those of :func:`auto_wrap`; ``context`` takes the place of the enclosing block.

    Raises:
        LifecycleError: outside of an ``enable_wrap`` block, without ``context``.
        WrapError: a module is wrapped already.
    """
    context = context or _context.get()
    if context is None:
        raise LifecycleError(
            "there is nothing to wrap with outside of a `with enable_wrap(wrapper_cls=...)` block"
        )
    _check_nothing_is_wrapped(module, context.wrapper_cls)
    tree = _Tree(module, context, adapt_policy(policy, module), overrides)
    built_together = getattr(context.wrapper_cls, "__dict__", {}).get("built_together")
    if built_together is None:
        wrapped, params = tree.visit(module, module_is_root)
        return wrapped, tree.numel(params)
    try:
        with built_together():
            wrapped, params = tree.visit(module, module_is_root)
    except BaseException:
        tree.undo()
        raise
    return wrapped, tree.numel(params)


def _check_nothing_is_wrapped(root: nn.Module, wrapper_cls: AnyCallable) -> None:
    if not isinstance(wrapper_cls, type):
        return
    for name, module in root.named_modules():
        if isinstance(module, wrapper_cls):
            raise WrapError(
                f"{name or 'the root'} ({type(root).__name__}) is wrapped in {wrapper_cls.__name__} already, and "
                "auto_wrap counts on unwrapped modules; call it once for the whole tree, or mark the modules with "
                "wrapper_config and use config_auto_wrap_policy"
            )


def _apply(context: WrapContext, module: nn.Module, from_policy: Kwargs, overrides: Kwargs) -> nn.Module:
    own: Any = getattr(module, "wrapper_config", {})
    if not isinstance(own, dict):
        raise WrapError(
            f"wrapper_config of {type(module).__name__} is a {type(own).__name__}; it has to be a dict of the "
            "wrapper's arguments"
        )
    if context.prepare is not None:
        module = context.prepare(module)
    wrapper: nn.Module = context.wrapper_cls(module, **{**context.kwargs, **from_policy, **own, **overrides})
    return wrapper


class _Tree:
    """One walk over a tree of modules."""

    def __init__(
        self, root: nn.Module, context: WrapContext, policy: AdaptedPolicy, overrides: Kwargs
    ) -> None:
        self._context, self._policy, self._overrides = context, policy, overrides
        # Taken before anything is wrapped: wrappers may replace and flatten parameters.
        self._params = {m: frozenset(m.parameters()) - context.uncounted for m in root.modules()}
        self._numel = {p: p.numel() for p in self._params[root]}
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._done: dict[nn.Module, tuple[nn.Module, frozenset[nn.Parameter]]] = {}

    def undo(self) -> None:
        """Puts the modules back that were wrapped."""
        for module, name, child in self._replaced:
            setattr(module, name, child)

    def numel(self, params: frozenset[nn.Parameter]) -> int:
        return sum(self._numel[p] for p in params)

    def visit(self, module: nn.Module, is_root: bool) -> tuple[nn.Module, frozenset[nn.Parameter]]:
        """Returns what takes the place of ``module``, and which parameters are within a wrapper then."""
        if module in self._done:
            return self._done[module]
        replaced, params = module, self._params[module]
        # A set, not a count: parameters and modules that are shared are within a wrapper once.
        wrapped: frozenset[nn.Parameter] = frozenset()
        if self._policy.descend(module, self.numel(params), is_root):
            for child in list(module.children()):
                replacement, within = self.visit(child, False)
                wrapped |= within
                if replacement is not child:
                    for name in [n for n, m in module._modules.items() if m is child]:
                        self._replaced.append((module, name, child))
                        setattr(module, name, replacement)
            arguments = self._policy.arguments(module, self.numel(params - wrapped), is_root)
            if arguments is not None:
                replaced, wrapped = _apply(self._context, module, arguments, self._overrides), params
        self._done[module] = replaced, wrapped
        return replaced, wrapped
