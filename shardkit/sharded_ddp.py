"""ShardedDDP: data parallelism whose gradients end at the rank that owns the parameter (ZeRO stage 2)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .backend import Backend, backend_for
from .errors import ConfigurationError
from .gradient_exchange import GradientExchange
from .module_sync import BufferSync, broadcast_module, connect_sync_batch_norm
from .oss import OSS
from .ownership import check_one_device, check_same_everywhere
from .policy import ReducePolicy


class ShardedDDP(nn.Module):
    """Wraps a module so that backward averages each gradient over ranks and leaves it with its owner.

    ::

        optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
        model = ShardedDDP(model, optimizer)

    After backward, ``param.grad`` of a parameter that this rank owns is the mean over ranks; elsewhere it is None. It
    keeps no gradient memory between steps, so ``zero_grad`` of the wrapper, the optimizer or the module all work.

    Args:
        module: any module on one device; its forward may take and return anything.
        optimizer: the OSS that owns the parameters, or several with disjoint parameters.
        group: ranks that train together; None for all.
        broadcast_buffers: rank 0's buffers replace the others' after each training step.
        sync_module_states: rank 0's parameters and buffers replace the others' now.
        reduce: size of gradient buckets and dtype on the wire.
        watch_trainable: notice before each forward that parameters were frozen, unfrozen or moved.
        backend: name or instance of the backend; by default that of the parameters' device.

    Raises:
        ConfigurationError: parameters on several devices, or an optimizer that is no OSS.
        RankMismatchError: the modules of two ranks differ in names, shapes, dtypes or what is trainable.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OSS | Sequence[OSS],
        *,
        group: Any = None,
        broadcast_buffers: bool = True,
        sync_module_states: bool = True,
        reduce: ReducePolicy | None = None,
        watch_trainable: bool = True,
        backend: str | Backend | None = None,
    ) -> None:
        super().__init__()
        optimizers: list[OSS] = []
        for o in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            if not isinstance(o, OSS):
                raise ConfigurationError(
                    f"the optimizer is a {type(o).__name__}; wrap it first: OSS(module.parameters(), "
                    f"optim={type(o).__name__}, ...)"
                )
            optimizers.append(o)
        check_one_device(module.parameters())
        self.module = module
        self._sharded_optimizers = optimizers
        self._backend = backend_for(module.parameters(), backend)
        self._group = self._backend.group(group)
        self._watch_trainable = watch_trainable
        self._warn_on_change = True
        check_same_everywhere(self._group, _facts(module), "the module's parameters and buffers")
        connect_sync_batch_norm(module, group, self._group)
        if sync_module_states:
            broadcast_module(module, self._group.channel("buffers"))
        self._buffers_sync = BufferSync(module, self._group.channel("buffers"), broadcast_buffers)
        self._exchange = GradientExchange(
            module, optimizers, self._group, reduce or ReducePolicy(), self._buffers_sync
        )
        # hooks on parameters outlive the wrapper; a module may be wrapped again
        weakref.finalize(self, self._exchange.close).atexit = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; in training it first checks what is trainable and brings buffers up to date."""
        training = self.training and torch.is_grad_enabled()
        if training:
            if self._watch_trainable:
                self._exchange.refresh_if_changed(self._warn_on_change)
            self._exchange.begin_forward()
        outputs = self.module(*args, **kwargs)
        if training:
            self._exchange.end_forward(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates this rank's gradients; the next backward outside reduces them too."""
        state = self._exchange.state
        before, state.accumulating = state.accumulating, True
        try:
            yield
        finally:
            state.accumulating = before

    def reduce(self) -> None:
        """Reduces now what ``no_sync`` accumulated (every rank calls)."""
        self._exchange.reduce_now()

    def sync_buffers(self, blocking: bool = True) -> None:
        """Replaces buffers by rank 0's (every rank calls). It is done on return, whatever ``blocking`` says."""
        self._buffers_sync.sync()

    def refresh_trainable(self) -> None:
        """Takes note of parameters frozen, unfrozen, moved or added to an optimizer (every rank calls)."""
        self._exchange.refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the module and of its optimizers' own parts."""
        self.module.zero_grad(set_to_none)
        for optimizer in self._sharded_optimizers:
            optimizer.zero_grad(set_to_none)
        self._exchange.recover()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _facts(module: nn.Module) -> list[tuple[str, Any]]:
    facts: list[tuple[str, Any]] = [
        (n, (tuple(p.shape), str(p.dtype), "trainable" if p.requires_grad else "frozen"))
        for n, p in module.named_parameters()
    ]
    return facts + [(n, (tuple(b.shape), str(b.dtype))) for n, b in module.named_buffers()]
