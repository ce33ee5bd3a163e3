"""fairscale.nn.wrap.auto_wrap on top of :mod:`shardkit.wrapping`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic

from torch import nn

from shardkit.types import AnyCallable, Kwargs, T, Tree
from shardkit.wrapping import context as wrapping
from shardkit.wrapping.context import WrapContext, WrapError, auto_wrap, current_context, wrap
from shardkit.wrapping.policies import config_auto_wrap_policy, default_auto_wrap_policy

__all__ = ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "wrap"]  # from elsewhere
__all__ += ["ConfigAutoWrap", "enable_wrap"]


@contextlib.contextmanager
def enable_wrap(auto_wrap_policy: object = None, **wrapper_kwargs: Tree) -> Iterator[None]:
    """Wraps as :func:`shardkit.wrapping.enable_wrap`; ``move_module_cuda_half=True`` also does ``module.cuda().half()``
    before wrapping.

    Raises:
        WrapError: ``wrapper_cls`` is missing.
        NestedWrapError: within another such block.
    """
    with ConfigAutoWrap(auto_wrap_policy, **wrapper_kwargs):
        yield


class _FromContext(Generic[T]):
    """A class attribute that shows the open block's setting in this thread."""

    def __init__(self, read: Callable[[WrapContext], T], outside: Callable[[], T]) -> None:
        self._read, self._outside = read, outside

    def __get__(self, instance: object, owner: type) -> T:
        context = current_context()
        return self._outside() if context is None else self._read(context)


def _to_cuda_half(module: nn.Module) -> nn.Module:
    return module.cuda().half()


class ConfigAutoWrap:
    """The block behind :func:`enable_wrap` as a class; its class attributes show what is set now.

    Args:
        auto_wrap_policy: for :func:`auto_wrap` where it is given none.
        **kwargs: ``wrapper_cls``, ``move_module_cuda_half`` and the wrapper's arguments.
    """

    in_autowrap_context = _FromContext(lambda c: True, lambda: False)
    move_module_cuda_half = _FromContext(lambda c: c.prepare is _to_cuda_half, lambda: False)
    wrapper_cls = _FromContext[AnyCallable | None](lambda c: c.wrapper_cls, lambda: None)
    kwargs = _FromContext[Kwargs](lambda c: c.kwargs, dict)
    auto_wrap_policy: object = _FromContext[object](lambda c: c.policy, lambda: None)

    def __init__(self, auto_wrap_policy: object = None, **kwargs: Tree) -> None:
        self.auto_wrap_policy = auto_wrap_policy
        self.kwargs = kwargs

    @staticmethod
    def enable_autowrap_context(auto_wrap_policy: object, kwargs: Kwargs) -> None:
        """Begins a block.

        Raises:
            WrapError: ``wrapper_cls`` is missing.
            NestedWrapError: a block is open already.
        """
        rest = dict(kwargs)
        prepare = _to_cuda_half if rest.pop("move_module_cuda_half", False) else None
        wrapper_cls = rest.pop("wrapper_cls", None)
        if wrapper_cls is None and current_context() is None:
            raise WrapError("enable_wrap needs wrapper_cls=..., the class that modules are wrapped in")
        policy = default_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
        wrapping.enter_context(WrapContext(wrapper_cls, policy, rest, prepare))

    @staticmethod
    def disable_autowrap_context() -> None:
        wrapping.leave_context()

    def __enter__(self) -> None:
        self.enable_autowrap_context(self.auto_wrap_policy, self.kwargs)

    def __exit__(self, *error: object) -> None:
        self.disable_autowrap_context()

    @staticmethod
    def recursive_wrap(
        module: nn.Module, auto_wrap_policy: object, module_is_root: bool, **kwargs: Tree
    ) -> tuple[nn.Module, int]:
        """Wraps what the policy (default: the block's) chooses in the tree of ``module``.

        Returns:
            What takes the place of ``module``, and the numel of the parameters within wrappers.
        """
        policy = ConfigAutoWrap.auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
        return wrapping.wrap_tree(module, policy, kwargs, module_is_root)
