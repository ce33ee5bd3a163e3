"""A pipeline over ranks that rank 0 drives alone; the other ranks serve its calls (torch.distributed.rpc).

Calls and the output travel over RPC; micro-batches and gradients go from stage to stage as in :class:`AsyncPipe`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from ..errors import ConfigurationError, LifecycleError
from ..model_parallel.groups import get_pipeline_parallel_group, model_parallel_is_initialized
from ..types import AnyCallable, Args, Context, Kwargs, Tree
from .async_pipe import AsyncPipe
from .microbatch import Value, split
from .schedule import move

_GROUPS_SECONDS = 10.0


class _Served:
    """What this process holds for rank 0."""

    model: AsyncPipe | None = None
    output: Value | None = None  # of the last stage, with its graph


_served = _Served()


def _model() -> AsyncPipe:
    if _served.model is None:
        raise LifecycleError("this rank has got no stage from rank 0 yet")
    return _served.model


def _own_device() -> torch.device:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, dist.get_rank() % torch.accelerator.device_count())


def _await_groups() -> None:
    """Rank 0's ``initialize_model_parallel`` may end first, and its call come while this rank is still in there."""
    end = time.monotonic() + _GROUPS_SECONDS
    while not model_parallel_is_initialized() and time.monotonic() < end:
        time.sleep(0.005)


def _make_stage(args: Args, kwargs: Kwargs) -> AsyncPipe:
    _await_groups()
    device = _own_device()
    group = get_pipeline_parallel_group()
    return AsyncPipe(*args, **{**kwargs, "group": group, "input_device": device}).to(device)


def _serve_stage(args: Args, kwargs: Kwargs) -> None:
    _served.model = _make_stage(args, kwargs)


def _serve_callback(callback: Callable[[Tree, AsyncPipe], object], ctx: Tree) -> None:
    model = _model()
    with model.lock:
        callback(ctx, model)


def _serve_forward(training: bool, backward: bool) -> Value | None:
    """Forward of a stage, and backward unless it is the last; the last one's output."""
    model = _model().train(training)
    with torch.set_grad_enabled(backward):
        output = model(())
    if not model.final_stage:
        return None
    _served.output = output if backward else None
    return move(_detached(output), torch.device("cpu"))


def _serve_backward(gradients: tuple[torch.Tensor | None, ...]) -> None:
    output, _served.output = _served.output, None
    if output is None:
        raise LifecycleError(
            "backward through a pipeline over ranks runs once for each forward; run forward again"
        )
    tensors = output if isinstance(output, tuple) else (output,)
    pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None and t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g.to(t.device) for t, g in pairs])


def _detached(value: Value) -> Value:
    return tuple(t.detach() for t in value) if isinstance(value, tuple) else value.detach()


class _Running(Context):
    run: Callable[..., None]


class _Backward(torch.autograd.Function):
    """Outputs as they are; their gradients go to the last stage, and backward of all stages runs."""

    @staticmethod
    def forward(
        ctx: _Running, anchor: torch.Tensor, run: Callable[..., None], *outputs: torch.Tensor
    ) -> Tree:  # type: ignore[override]
        ctx.run = run
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(t.view_as(t) for t in outputs)

    @staticmethod
    def backward(ctx: _Running, *gradients: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        ctx.run(tuple(None if g is None else g.cpu() for g in gradients))
        return (None, None, *(None for _ in gradients))


class PipeRPCWrapper(nn.Module):
    """An :class:`AsyncPipe` that rank 0 makes and trains as if it were a plain module::

        rpc.init_rpc(...); initialize_model_parallel(1, world_size)
        if rank == 0:
            pipe = PipeRPCWrapper(model, balance, worker_map={0: "worker0", 1: "worker1"}, chunks=4)
            pipe.foreach_worker(make_optimizer, include_self=True)
            loss_function(pipe(input), target).backward()
        rpc.shutdown()

    Args:
        args, kwargs: those of AsyncPipe; ``worker_map`` (global rank to name of the RPC worker) is required. The
            module is pickled and sent to the other ranks, which keep their part.

    Raises:
        ConfigurationError: not on the first rank of the group, or the group is not the one of
            ``get_pipeline_parallel_group()``.
    """

    def __init__(self, *args: Tree, **kwargs: Tree) -> None:
        super().__init__()
        self.group = kwargs.pop("group", None) or get_pipeline_parallel_group()
        if self.group.rank() != 0:
            raise ConfigurationError(
                f"PipeRPCWrapper is made by the first rank of the pipeline, and this is rank {self.group.rank()}; let "
                "the others call torch.distributed.rpc.shutdown()"
            )
        if self.group is not get_pipeline_parallel_group():
            raise ConfigurationError(
                "group must be get_pipeline_parallel_group(): other ranks look theirs up, since groups can't be sent"
            )
        if not kwargs.get("worker_map"):
            raise ConfigurationError("worker_map={global rank: name of its RPC worker} is required")
        self.worker_map: dict[int, str] = kwargs["worker_map"]
        self._foreach_worker(_serve_stage, (args, kwargs))
        self.model = _make_stage(args, kwargs)

    def _call(self, rank: int, function: AnyCallable, args: Args) -> torch.futures.Future[Tree]:
        name = self.worker_map[dist.get_global_rank(self.group, rank)]
        return rpc.rpc_async(name, function, args=args)

    def _foreach_worker(self, function: AnyCallable, args: Args) -> None:
        for future in [self._call(rank, function, args) for rank in range(1, self.group.size())]:
            future.wait()

    def foreach_worker(
        self, callback: Callable[[Tree, AsyncPipe], object], ctx: Tree = None, *, include_self: bool = False
    ) -> None:
        """Runs ``callback(ctx, stage)`` on the other ranks, and on this one if asked to.

        Errors come back here (fairscale prints them).
        """
        self._foreach_worker(_serve_callback, (callback, ctx))
        if include_self:
            with self.model.lock:
                callback(ctx, self.model)

    @property
    def final_stage(self) -> bool:
        """Whether this rank is the only stage."""
        return self.model.final_stage

    def forward(self, tensor: Value) -> Value:
        """The output of the last stage, on this rank's device.

        Args:
            tensor: a tensor or a tuple of tensors.
        """
        if self.final_stage:
            return self.model(tensor)  # type: ignore[no-any-return]
        backward = self.model.training and torch.is_grad_enabled()
        served = [
            self._call(rank, _serve_forward, (self.model.training, backward))
            for rank in range(1, len(self.model.balance))
        ]
        stage = self.model._stage()
        stage.forward(split(tensor, self.model.chunks), backward=backward)
        output = move(served[-1].wait(), _own_device())
        if not backward:
            return output

        def run(gradients: tuple[torch.Tensor | None, ...]) -> None:
            last = self._call(len(self.model.balance) - 1, _serve_backward, (gradients,))
            stage.backward()
            for future in [last, *served]:
                future.wait()

        tensors = output if isinstance(output, tuple) else (output,)
        passed = _Backward.apply(torch.empty(0, requires_grad=True), run, *tensors)
        return passed if isinstance(output, tuple) else passed[0]  # type: ignore[no-any-return]
