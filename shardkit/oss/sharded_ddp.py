"""ShardedDDP: data parallelism whose gradients end at the rank that owns the parameter (ZeRO stage 2)."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend, backend_for, not_compiled
from ..checks import (
    check_one_device,
    check_same_everywhere,
    new_run_ids,
    option_facts,
    parameter_fact,
    proposed_run_id,
    refuse_lazy,
    refuse_writers,
    shape_fact,
)
from ..errors import ConfigurationError, LifecycleError, check_kinds, noting_errors
from ..optimizers.shards import IN_BACKWARD, refuse_steps_in_backward
from ..policy import ReducePolicy
from ..reduction.compression import check_compressible
from ..reduction.ordered import announced, check_order, order_in_words, refuse_local, refuse_other
from ..torch_seams.tensors import group_of
from ..torch_seams.wrappers import (
    PreparedForAccelerate,
    check_modules,
    check_wrappable,
    note_wrapper,
    signed_as_wrapped,
)
from ..tracing.tracer import note_model
from ..types import ProcessGroup, StateDict, Tree
from .exchange import BufferSync, GradientExchange, broadcast_module, connect_sync_batch_norm, paths_in
from .optimizer import OSS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("shardkit")


@runtime_checkable
class AroundOSS(Protocol):
    """An optimizer around an OSS, as :class:`~shardkit.AdaScale` is."""

    @property
    def optimizer(self) -> Optimizer: ...


class ShardedDDP(PreparedForAccelerate, nn.Module):
    """Wraps a module so that backward averages each gradient over ranks and leaves it with its owner.

    ::

        optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
        model = ShardedDDP(model, optimizer)

    Copies (of ``copy.deepcopy``, pickle, torch.optim.swa_utils) hold the module, for evaluation and averaging.

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
        mesh: all of its ranks, in place of ``group``.

    Raises:
        ConfigurationError: parameters on several devices, or of an FSDP module; an optimizer that is no OSS; an option
            of ``reduce`` that is FSDP's.
        RankMismatchError: the modules of two ranks differ in names, shapes, dtypes or what is trainable.
    """

    @noting_errors
    def __init__(
        self,
        module: nn.Module,
        optimizer: OSS | AroundOSS | Sequence[OSS | AroundOSS],
        *,
        group: ProcessGroup = None,
        broadcast_buffers: bool = True,
        sync_module_states: bool = True,
        reduce: ReducePolicy | None = None,
        watch_trainable: bool = True,
        backend: str | Backend | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        check_modules([module], type(self).__name__)
        super().__init__()
        check_wrappable(module, type(self).__name__)
        check_kinds({"reduce": reduce, "backend": backend}, reduce=ReducePolicy, backend=str | Backend)
        policy = reduce or ReducePolicy()
        if policy.predivide is not None:
            raise ConfigurationError(
                f"predivide={policy.predivide} is for FSDP; ShardedDDP divides halves by the number of ranks before "
                "they are summed, and everything else afterwards"
            )
        optimizers = _sharded(optimizer, policy)
        check_one_device(module.parameters())
        self.module = module
        self._sharded_optimizers = optimizers
        group = group_of(mesh, group)
        self._backend = backend_for(module.parameters(), backend)
        self._group = self._backend.group(group)
        for o in optimizers:
            if o._group.ranks != self._group.ranks:
                raise ConfigurationError(
                    f"ShardedDDP averages gradients over ranks {list(self._group.ranks)}, and its OSS gives parameters "
                    f"owners among {list(o._group.ranks)}; pass the same group to both"
                )
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        if trained and trained.isdisjoint(id(p) for o in optimizers for p in o._parameters()):
            raise ConfigurationError(
                "the OSS has none of the module's parameters, which would not train: make it of module.parameters()"
            )
        self._watch_trainable = watch_trainable
        self._warn_on_change = True
        facts = option_facts(
            reduce=policy,
            broadcast_buffers=broadcast_buffers,
            sync_module_states=sync_module_states,
            parameters_of_each_optimizer=[len(list(o._parameters())) for o in optimizers],
        )
        tensors: list[tuple[str, object]] = [(n, parameter_fact(p)) for n, p in module.named_parameters()]
        tensors += [(n, (shape_fact(b), str(b.dtype))) for n, b in module.named_buffers()]
        what = "the module's parameters and buffers, or options,"
        told = check_same_everywhere(self._group, tensors + facts, what, proposed_run_id())
        (self._run_id,) = new_run_ids(self._group, told[0])
        refuse_lazy(tensors, "ShardedDDP")
        refuse_writers(module.named_modules(), self._group)
        sent = {policy.dtype or p.dtype for p in module.parameters()}
        check_compressible(policy.compression, sent, self._backend)
        check_order(policy, module.named_modules())
        if self._backend.even_shards_only:
            refuse_other(policy, f"ShardedDDP on {self._backend.name}; take FSDP there")
        connect_sync_batch_norm(module, group, self._group)
        if sync_module_states:
            broadcast_module(module, self._group.channel("gradients"))
            for segment in (s for o in self._sharded_optimizers for s in o.placement.segments):
                segment.take_values()
        self._buffers_sync = BufferSync(module, self._group, broadcast_buffers)
        self._exchange: GradientExchange | None = GradientExchange(
            module, optimizers, self._group, policy, self._buffers_sync, self._run_id, sync_module_states
        )
        # hooks on parameters outlive the wrapper; a module may be wrapped again
        weakref.finalize(self, self._exchange.close).atexit = False
        note_model(module)
        parameters = list(module.parameters())
        owned = [p for o in optimizers for p in o._parameters() if o.owner_of(p) == self._group.rank]
        what = (
            f"{type(self).__name__} of {len(parameters)} parameters ({sum(p.nbytes for p in parameters)} bytes), "
            f"{sum(p.nbytes for p in owned)} bytes of them owned by this rank"
        )
        logger.info(announced(what, self._group, order_in_words(policy, self._group.world_size)))

    @signed_as_wrapped
    def forward(self, *args: object, **kwargs: object) -> Tree:
        """Runs the module; in training it first checks what is trainable and brings buffers up to date."""
        exchange = self._entered()
        try:
            outputs = self.module(*args, **kwargs)
        except BaseException as error:
            if exchange is not None:
                exchange.fail_forward(error)
            raise
        if exchange is not None:
            exchange.end_forward(outputs)
        return outputs

    @not_compiled
    def _entered(self) -> GradientExchange | None:
        """Returns what listens to the forward that begins; None where none of its gradients will be reduced."""
        if (
            torch._C._functorch.maybe_current_level() is not None
            and any(map(torch._C._functorch.is_gradtrackingtensor, self.module.parameters()))
            and self._exchange is not None
            and self._group.world_size > 1
        ):
            raise LifecycleError(
                f"rank {self._group.rank}: torch.func.grad (vjp, jacrev, hessian, ...) would give this rank's own "
                "gradients of a ShardedDDP's parameters, which nothing averages. Call loss.backward(), or transform "
                "what it wraps, .module, and average what comes out"
            )
        if not self.training or not torch.is_grad_enabled():
            return None
        exchange = self._connected()
        if IN_BACKWARD in sys.modules and sys.modules[IN_BACKWARD].param_to_acc_grad_map.data:
            refuse_steps_in_backward(self.module.parameters())
        if self._watch_trainable:
            exchange.refresh_if_changed(self._warn_on_change)
        exchange.begin_forward()
        return exchange

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ShardedDDP:
        super()._apply(fn, recurse)
        if self._exchange is not None:
            self._exchange.check_device()
        return self

    def _connected(self) -> GradientExchange:
        if self._exchange is None:
            raise LifecycleError(
                "this is a copy of a ShardedDDP: no optimizer owns its parameters, so nothing can be trained here. Use "
                "it for evaluation, or wrap its .module in a ShardedDDP with an OSS of its own"
            )
        return self._exchange

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward, inside, only accumulate this rank's gradients; the next one outside reduces them too."""
        exchange = self._connected()
        refuse_local(exchange.policy)
        state = exchange.state
        before, state.accumulating = state.accumulating, True
        try:
            yield
        finally:
            state.accumulating = before

    def reduce(self) -> None:
        """Reduces now what ``no_sync`` accumulated (every rank calls)."""
        self._connected().reduce_now()

    def sync_buffers(self, blocking: bool = True) -> None:
        """Replaces buffers by rank 0's (every rank calls). It is done on return, whatever ``blocking`` says."""
        self._connected()
        self._buffers_sync.sync()

    def refresh_trainable(self) -> None:
        """Takes note of parameters frozen, unfrozen, moved or added to an optimizer (every rank calls)."""
        self._connected().refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the module and of its optimizers' own parts."""
        if set_to_none and type(self.module).zero_grad is nn.Module.zero_grad:
            for m in paths_in(self.module):
                for p in m._parameters.values():
                    if p is not None:
                        p.grad = None
        else:
            self.module.zero_grad(set_to_none)
        for optimizer in self._sharded_optimizers:
            optimizer.zero_grad(set_to_none)
        if self._exchange is not None:
            self._exchange.recover()

    def __getstate__(self) -> StateDict:
        """Keeps the module alone: ranks and optimizers are this process's; see :meth:`_connected`."""
        state = self.__dict__.copy()
        state.update(
            dict.fromkeys(("_exchange", "_buffers_sync", "_group", "_backend")), _sharded_optimizers=[]
        )
        return state

    def __getattr__(self, name: str) -> Tree:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


note_wrapper(ShardedDDP)


def _sharded(optimizer: OSS | AroundOSS | Sequence[OSS | AroundOSS], policy: ReducePolicy) -> list[OSS]:
    """Lists one or several, without what is around them; raises ConfigurationError if any is no OSS."""
    optimizers = []
    for o in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if isinstance(o, AroundOSS):
            refuse_other(policy, f"{type(o).__name__}, which compares ranks' gradients")
            o = o.optimizer
        if not isinstance(o, OSS):
            what = "a module; pass" if isinstance(o, nn.Module) else "which shards nothing; wrap it first:"
            raise ConfigurationError(
                f"in place of an OSS there is a {type(o).__name__}, {what} OSS(module.parameters(), optim=..., ...)"
            )
        optimizers.append(o)
    return optimizers
