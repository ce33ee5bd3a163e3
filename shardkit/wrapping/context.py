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
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..errors import ConfigurationError, LifecycleError
from ..types import AnyCallable, Kwargs
from .policies import AdaptedPolicy, adapt_policy, default_auto_wrap_policy, with_min_num_params


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
        ignored: neither wrapped nor looked into.
        keeps_root: the root of a tree stays as it is, whatever the policy says.
    """

    wrapper_cls: AnyCallable
    policy: object = default_auto_wrap_policy
    kwargs: Kwargs = field(default_factory=dict)
    prepare: Callable[[nn.Module], nn.Module] | None = None
    uncounted: frozenset[nn.Parameter] = frozenset()
    ignored: frozenset[nn.Module] = frozenset()
    keeps_root: bool = False


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
            :func:`~shardkit.wrapping.policies.default_auto_wrap_policy`.
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
        auto_wrap_policy: see :mod:`shardkit.wrapping.policies`; default that of the block.
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
    kind = context.wrapper_cls
    already = [n for n, m in module.named_modules() if isinstance(kind, type) and isinstance(m, kind)]
    if already:
        raise WrapError(
            f"{already[0] or 'the root'} ({type(module).__name__}) is wrapped in {kind.__name__} already, and "
            "auto_wrap counts on unwrapped modules; call it once for the whole tree, or mark the modules with "
            "wrapper_config and use config_auto_wrap_policy"
        )
    tree = _Tree(module, context, adapt_policy(policy, module, context.ignored, context.kwargs), overrides)
    built_together = getattr(kind, "__dict__", {}).get("built_together")
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
        context = self._context
        if module not in context.ignored and self._policy.descend(module, self.numel(params), is_root):
            for child in list(module.children()):
                replacement, within = self.visit(child, False)
                wrapped |= within
                if replacement is not child:
                    for name in [n for n, m in module._modules.items() if m is child]:
                        self._replaced.append((module, name, child))
                        setattr(module, name, replacement)
            is_kept = is_root and context.keeps_root
            numel = self.numel(params - wrapped)
            arguments = None if is_kept else self._policy.arguments(module, numel, is_root)
            if arguments is not None:
                replaced, wrapped = _apply(context, module, arguments, self._overrides), params
        self._done[module] = replaced, wrapped
        return replaced, wrapped
