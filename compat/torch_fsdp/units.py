"""Which modules below one become units: torch's policies, asked by the core."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp.api import MixedPrecision

from shardkit.errors import ConfigurationError
from shardkit.fsdp.calls import cast_inputs
from shardkit.fsdp.state import Ignored
from shardkit.types import AnyCallable, Args, Kwargs, StateDict, Tree
from shardkit.wrapping.context import WrapContext, wrap_tree
from shardkit.wrapping.policies import adapt_policy


def wrap_below(
    root: nn.Module, policy: object, ignored: Ignored, wrapper: AnyCallable, arguments: Kwargs
) -> None:
    """Wraps what a policy chooses below a module, in place.

    Args:
        root: stays as it is itself.
        policy: a function or an object of ``torch.distributed.fsdp.wrap``, or one like them.
        ignored: neither wrapped nor counted.
        wrapper: called with a module and ``arguments``.

    Raises:
        WrapError: something is wrapped already.
        ConfigurationError: the policy is none.
    """
    mixed: MixedPrecision | None = arguments["mixed_precision"]
    full_precision = () if mixed is None else tuple(mixed._module_classes_to_ignore)
    asked = _CorePolicy(root, policy, ignored, full_precision, arguments)
    context = WrapContext(wrapper, kwargs=arguments, uncounted=frozenset(ignored.parameters))
    wrap_tree(root, asked, {}, context=context)


class _Planned:
    """An object of torch's that plans with what is ignored here."""

    def __init__(self, policy: Tree, ignored: Ignored, arguments: Kwargs) -> None:
        self._policy, self._ignored, self._arguments = policy, ignored, arguments

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        plan: dict[nn.Module, Kwargs] = self._policy._run_policy(
            root_module, self._ignored.modules, self._arguments
        )
        return plan


class _CorePolicy:
    """A policy as the core asks it; modules that stay in full precision are units of their own."""

    def __init__(
        self, root: nn.Module, policy: object, ignored: Ignored, full_precision: Sequence[type[nn.Module]],
        arguments: Kwargs,
    ) -> None:  # fmt: skip
        if hasattr(policy, "_run_policy"):
            policy = _Planned(policy, ignored, arguments)
        elif not callable(policy):
            raise ConfigurationError(
                f"auto_wrap_policy is {policy!r}; pass a policy of torch.distributed.fsdp.wrap, or a function "
                "(module, recurse, nonwrapped_numel) -> bool"
            )
        self._policy = adapt_policy(policy, root)
        self._ignored, self._full_precision = ignored, tuple(full_precision)
        self._closed: set[nn.Module] = set()  # not looked into, but for what stays in full precision

    def descend(self, module: nn.Module, numel: int, is_root: bool) -> bool:
        """See :class:`~shardkit.wrapping.policies.AdaptedPolicy`."""
        if module in self._ignored.modules:
            return False
        if module not in self._closed and self._policy.descend(module, numel, is_root):
            return True
        self._closed.update(module.modules())
        return bool(self._full_precision)

    def arguments(self, module: nn.Module, numel: int, is_root: bool) -> StateDict | None:
        """See :class:`~shardkit.wrapping.policies.AdaptedPolicy`."""
        if not is_root and isinstance(module, self._full_precision):
            _InFloat32(module)
            return {"mixed_precision": None}
        if is_root or module in self._closed:
            return None
        return self._policy.arguments(module, numel, is_root)


class _InFloat32:
    """Hooks of a module that computes in fp32, whatever comes in; goes out what came in."""

    def __init__(self, module: nn.Module) -> None:
        self._dtype: torch.dtype | None = None
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        floats = [
            v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()
        ]
        self._dtype = floats[0].dtype if floats else None
        args, kwargs = cast_inputs((args, kwargs), torch.float32)
        return args, kwargs

    def _after(self, module: nn.Module, args: Args, output: Tree) -> Tree:
        return output if self._dtype is None else cast_inputs(output, self._dtype)
