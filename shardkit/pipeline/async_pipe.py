"""Pipelines over ranks, one part of a sequential module each: driven by all of them, or by rank 0 alone.

Where rank 0 drives, the others serve its calls (torch.distributed.rpc). Calls and the output travel over RPC;
micro-batches and gradients go from stage to stage as in :class:`AsyncPipe`.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from ..errors import ConfigurationError, LifecycleError
from ..model_parallel.groups import get_pipeline_parallel_group, model_parallel_is_initialized
from ..types import AnyCallable, Args, Context, Kwargs, Tree
from ..wrapping.activations import patch_batchnorm
from .batch_norm import DeferredBatchNorm
from .microbatch import Value, check, join, split
from .partition import PipeTypeError, check_balance, check_checkpoint, split_module, verify_distinct
from .schedule import move
from .skip import Skippable, arriving_keys
from .stage import NeighbourLink, Stage, in_tuple


class LazyModule:
    """A layer that only the rank that holds it makes, by calling the function."""

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        self.function = function

    def __call__(self) -> nn.Module:
        return self.function()


class AsyncPipe(nn.Module):
    """Pipeline parallelism over ranks: each holds ``balance[rank]`` layers and passes micro-batches on::

        pipe = AsyncPipe([LazyModule(make_a), LazyModule(make_b)], balance=[1, 1], chunks=8, group=group)
        output = pipe(input)              # in training mode the first ranks come back from it after backward
        if pipe.final_stage:
            loss_function(output, target).backward()
        optimizer.step()

    Gradients are those of the plain module. See ``stage`` for the order of things.

    Args:
        module: a sequential module, the same on all ranks, or a list of layers or functions that make them.
        balance: number of layers of each rank. Ranks beyond hold nothing and give their input back.
        group: the stages, in rank order; default: the one of ``initialize_model_parallel(..., pipeline_length)``.
        worker_map: not needed (fairscale sends over RPC).
        input_device: where received tensors go; default: where this rank's parameters are.
        chunks: micro-batches that the first rank cuts its input into.
        checkpoint: which micro-batches keep only their inputs: "always", "except_last", "never".
        deferred_batch_norm: running statistics of mini-batches, not of micro-batches.

    Attributes:
        final_stage: whether this rank returns the output.
        partition: this rank's layers.

    Raises:
        ConfigurationError: (a ValueError) wrong numbers; a layer twice; a skip connection between ranks.
        TooFewDevicesError: (an IndexError) fewer ranks than partitions.
    """

    balance: list[int] = []  # noqa: RUF012  # fairscale's class attributes
    chunks: int = 1
    checkpoint: str = "except_last"

    def __init__(
        self,
        module: nn.Sequential | list[LazyModule],
        balance: Iterable[int],
        *,
        group: dist.ProcessGroup | None = None,
        worker_map: dict[int, str] | None = None,
        input_device: int | str | torch.device | None = None,
        chunks: int = chunks,
        checkpoint: str = checkpoint,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_checkpoint(checkpoint, chunks)
        self.balance, self.chunks, self.checkpoint = list(balance), chunks, checkpoint
        self.worker_map, self.input_device = worker_map, input_device
        self.group = get_pipeline_parallel_group() if group is None else group
        self.lock = threading.Lock()
        verify_distinct(module)
        check_balance(len(module), self.balance, self.group.size(), "ranks")
        if isinstance(module, nn.Sequential):
            arriving = arriving_keys(split_module(module, self.balance))
            if names := sorted({name for keys in arriving for _, name in keys}):
                raise ConfigurationError(
                    f"skip connections between ranks are not supported: {names}; choose a balance that keeps both "
                    "ends on one rank, or take Pipe"
                )
        self._rank = self.group.rank()
        self.final_stage = self._rank == len(self.balance) - 1
        self.partitions: list[nn.Sequential] = []
        self.partition: nn.Sequential | None = None
        self.pipeline: Stage | None = None
        if self._rank >= len(self.balance):
            warnings.warn("More ranks than partitions, some ranks unused", stacklevel=2)
            return
        partition = _own_layers(module, self.balance, self._rank)
        if deferred_batch_norm:
            partition = DeferredBatchNorm.convert_deferred_batch_norm(partition, chunks)
        if checkpoint != "never":
            patch_batchnorm(partition)
        self.add_module("0", partition)
        self.partitions = [partition]
        self.partition = partition

    def _stage(self) -> Stage:
        """Made in the first forward, when the parameters are where they will be."""
        if self.pipeline is None and self.partition is not None:
            device = self.input_device
            if device is None:
                device = next((p.device for p in self.partition.parameters()), torch.device("cpu"))
            link = NeighbourLink(self.group, torch.device(device))
            self.pipeline = Stage(self.partition, link, self._rank, len(self.balance), self.checkpoint)
        if self.pipeline is None:
            raise LifecycleError(f"rank {self._rank} holds no partition")
        return self.pipeline

    def __len__(self) -> int:
        """Returns the number of layers on this rank."""
        return 0 if self.partition is None else len(self.partition)

    def __getitem__(self, index: int) -> nn.Module:
        """Returns a layer of this rank."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Returns the layers of this rank."""
        return iter(()) if self.partition is None else iter(self.partition)

    def forward(self, input: Value, *, event: object = None) -> Tree:
        """Passes the first rank's input through the layers of all ranks; called on all of them.

        In training mode (and grad mode) ranks other than the last run their backward here too, which waits for the last
        rank's.

        Args:
            input: a tensor or a tuple of tensors; of no consequence on other ranks than the first.
            event: not needed.

        Returns:
            On the last rank the output, on others its micro-batches.

        Raises:
            PipeTypeError: (a TypeError) something else than tensors.
            RankMismatchError: some ranks are in training mode and others are not.
            RankLostError: another rank failed; the message has its error.
        """
        if self.partition is None:
            return input
        if self._rank == 0:
            check(input)
        backward = self.training and torch.is_grad_enabled()
        with self.lock:
            values = split(input, self.chunks) if self._rank == 0 else []
            outputs = self._stage().forward(values, backward=backward)
            if backward and not self.final_stage:
                self._stage().backward()
        return join(outputs) if self.final_stage else outputs

    def back_helper(self, output: Tree) -> None:
        """Nothing: forward has done it. For the loops of existing code.

        Raises:
            ConfigurationError: (a ValueError) on the last rank, whose loss runs backward.
        """
        if self.final_stage:
            raise ConfigurationError("back_helper should only be called on non-final stages")


def _own_layers(module: nn.Sequential | list[LazyModule], balance: list[int], rank: int) -> nn.Sequential:
    """Returns this rank's layers under the names they have in the module (in a list: their places)."""
    if isinstance(module, nn.Sequential):
        return split_module(module, balance)[rank]
    start = sum(balance[:rank])
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for place, layer in itertools.islice(enumerate(module), start, start + balance[rank]):
        if not isinstance(layer, nn.Module) and not callable(layer):
            raise PipeTypeError(f"layer must be nn.Module or callable, is {type(layer)}")
        made[str(place)] = layer if isinstance(layer, nn.Module) else layer()
        if isinstance(made[str(place)], Skippable):
            raise ConfigurationError(
                "Can't use Skippable layers with multi-process pipe and lazy construction; pass a nn.Sequential"
            )
    return nn.Sequential(made)


_GROUPS_SECONDS = 10.0


class _Served:
    """Held by this process for rank 0."""

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


def _make_stage(args: Args, kwargs: Kwargs) -> AsyncPipe:
    # rank 0's initialize_model_parallel may end first, and its call come while this rank is still in there
    end = time.monotonic() + _GROUPS_SECONDS
    while not model_parallel_is_initialized() and time.monotonic() < end:
        time.sleep(0.005)
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
    """Runs forward of a stage, and backward unless it is the last; returns the last one's output."""
    model = _model().train(training)
    with torch.set_grad_enabled(backward):
        output = model(())
    if not model.final_stage:
        return None
    _served.output = output if backward else None
    shown = tuple(t.detach() for t in output) if isinstance(output, tuple) else output.detach()
    return move(shown, torch.device("cpu"))


def _serve_backward(gradients: tuple[torch.Tensor | None, ...]) -> None:
    output, _served.output = _served.output, None
    if output is None:
        raise LifecycleError(
            "backward through a pipeline over ranks runs once for each forward; run forward again"
        )
    pairs = [
        (t, g) for t, g in zip(in_tuple(output), gradients, strict=True) if g is not None and t.requires_grad
    ]
    torch.autograd.backward([t for t, _ in pairs], [g.to(t.device) for t, g in pairs])


class _RunningCall(Context):
    run: Callable[..., None]


class _RemoteBackward(torch.autograd.Function):
    """Outputs as they are; their gradients go to the last stage, and backward of all stages runs."""

    @staticmethod
    def forward(
        ctx: _RunningCall, anchor: torch.Tensor, run: Callable[..., None], *outputs: torch.Tensor
    ) -> Tree:  # type: ignore[override]
        ctx.run = run
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(t.view_as(t) for t in outputs)

    @staticmethod
    def backward(ctx: _RunningCall, *gradients: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
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
        """Returns the output of the last stage, on this rank's device.

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

        passed = _RemoteBackward.apply(torch.empty(0, requires_grad=True), run, *in_tuple(output))
        return passed if isinstance(output, tuple) else passed[0]  # type: ignore[no-any-return]
