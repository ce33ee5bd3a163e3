"""Pipelines over ranks, one part of a sequential module each: driven by all of them, or by rank 0 alone.

Where rank 0 drives, the others serve its calls (torch.distributed.rpc). Calls and the output travel over RPC;
micro-batches and gradients go from stage to stage as in :class:`AsyncPipe`.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from ..errors import ConfigurationError, LifecycleError, RankLostError, RankMismatchError
from ..model_parallel.groups import get_pipeline_parallel_group, model_parallel_is_initialized
from ..types import AnyCallable, Args, Context, Kwargs, StateDict, Tree
from ..wrapping.activations import patch_batchnorm
from .microbatch import (
    DeferredBatchNorm,
    PipeTypeError,
    Value,
    check,
    check_balance,
    check_checkpoint,
    expect_micro_batches,
    in_tuple,
    join,
    split,
    split_module,
    verify_distinct,
)
from .pipe import checkpointed_cells, move, run_cell
from .skip import Skippable, arriving_keys


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

    Gradients are those of the plain module. See [Note: two passes].

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
        """Makes it in the first forward, when the parameters are where they will be."""
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
        return 0 if self.partition is None else len(self.partition)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
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
        """Does nothing: forward has done it. For the loops of existing code.

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

    held: AsyncPipe | None = None
    output: Value | None = None  # of the last stage, with its graph

    @property
    def model(self) -> AsyncPipe:
        if self.held is None:
            raise LifecycleError("this rank has got no stage from rank 0 yet")
        return self.held


_served = _Served()


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
    _served.held = _make_stage(args, kwargs)


def _serve_callback(callback: Callable[[Tree, AsyncPipe], object], ctx: Tree) -> None:
    with _served.model.lock:
        callback(ctx, _served.model)


def _serve_forward(training: bool, backward: bool) -> Value | None:
    """Runs forward of a stage, and backward unless it is the last; returns the last one's output."""
    model = _served.model.train(training)
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
        return rpc.rpc_async(self.worker_map[dist.get_global_rank(self.group, rank)], function, args=args)

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
        """Says whether this rank is the only stage."""
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


# ------------------------------------------------------------ a rank's stage, and its messages to its neighbours
# A message is a short text that says what comes, then tensors. They travel as bytes, so that every dtype does. What
# can't be sent from its device (gloo and CUDA) goes through host memory.
#
# [Note: two passes] Forward: each micro-batch is received from the rank before, goes through this rank's layers and is
# sent on. Backward: its gradients come back from the rank after, in the order in which that rank finishes them (the
# last one first), and what they become is sent on to the rank before. On the last rank autograd itself runs backward,
# when the user's loss does, and a hook sends the gradients. This is GPipe's order (arXiv 1811.06965), as fairscale's
# AsyncPipe has it: the loss is known only after all of forward, so that backward can't begin earlier.
_HEADER_BYTES = 1024


class NeighbourLink:
    """This rank's connections to the other ranks of a group.

    Args:
        group: a torch.distributed group.
        device: where received tensors are wanted.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        served = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
        direct = served.get(device.type, "gloo") != "gloo"
        self._wire = device if direct else torch.device("cpu")
        self.failed: set[int] = set()  # ranks that said so
        self.sending: list[tuple[dist.Work, torch.Tensor]] = []  # works, and the bytes they read

    def send(self, dst: int, facts: StateDict, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Sends to a rank of the group, without waiting.

        Args:
            facts: what JSON can hold, some hundred bytes.
        """
        shapes = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
        text = json.dumps({**facts, "tensors": shapes}).encode()
        if len(text) > _HEADER_BYTES:
            raise ConfigurationError(
                f"rank {self._group.rank()}: {len(tensors)} tensors are too many for one message between stages "
                f"(their shapes take {len(text)} bytes, {_HEADER_BYTES} are allowed); send fewer"
            )
        header = torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        self._send(dst, header.to(self._wire))
        for tensor in tensors:
            if tensor.numel():
                flat = tensor.detach().to(self._wire).contiguous().view(-1)
                self._send(dst, flat.view(torch.uint8))

    def _send(self, dst: int, data: torch.Tensor) -> None:
        work = dist.isend(data, group=self._group, group_dst=dst)
        if work is not None:  # this rank is in the group
            self.sending.append((work, data))

    def flush(self, seconds: float | None = None) -> None:
        """Waits for what is being sent; raises RuntimeError if that takes longer than the seconds given."""
        limit = () if seconds is None else (datetime.timedelta(seconds=seconds),)
        while self.sending:
            self.sending.pop(0)[0].wait(*limit)

    def receive(self, src: int) -> tuple[StateDict, list[torch.Tensor]]:
        """Receives a message of a rank of the group: facts and tensors.

        Raises:
            RankLostError: the other rank says that it failed.
        """
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self._wire)
        dist.recv(header, group=self._group, group_src=src)
        facts = json.loads(bytes(header.tolist()))
        if "error" in facts:
            self.failed.add(src)
            raise RankLostError(facts["error"])
        tensors = []
        for name, shape in facts.pop("tensors"):
            tensor = torch.empty(shape, dtype=getattr(torch, name), device=self._wire)
            if tensor.numel():
                dist.recv(tensor.view(-1).view(torch.uint8), group=self._group, group_src=src)
            tensors.append(tensor.to(self._device))
        return facts, tensors


_PATIENCE_SECONDS = 10.0  # for neighbours to hear of an error


class Stage:
    """This rank's layers, and the ranks before and after it.

    Args:
        layers: this rank's.
        link: to the other ranks.
        index: which stage of how many this is; its rank in the group.
        checkpoint: which micro-batches keep no activations: "always", "except_last", "never".
    """

    def __init__(
        self, layers: nn.Sequential, link: NeighbourLink, index: int, stages: int, checkpoint: str
    ) -> None:
        self._layers = layers
        self._link = link
        self._index = index
        self._before = index - 1 if index > 0 else None
        self._after = index + 1 if index + 1 < stages else None
        self._checkpoint = checkpoint
        self._due = (0, 0)  # a neighbour, and how many messages it still sends
        self._passed: dict[int, Value] = {}  # outputs that wait for their gradients, by micro-batch

    def forward(self, values: Sequence[Value], *, backward: bool) -> list[Value]:
        """Runs the forward pass.

        Args:
            values: micro-batches, on the first rank; others receive them.
            backward: gradients will come; the same on all ranks.

        Raises:
            RankMismatchError: the rank before says otherwise about ``backward``.
            RankLostError: a neighbour failed.
        """
        outputs: list[Value] = []
        count = len(values)
        self._passed.clear()
        with self._telling([self._before, self._after]):
            while not outputs or len(outputs) < count:
                i = len(outputs)
                if self._before is None:
                    value = values[i]
                else:
                    value, count = self._take(i, backward)
                if i == 0:
                    expect_micro_batches(self._layers, count)
                stop = checkpointed_cells(self._checkpoint, count) if backward else 0
                value, _ = run_cell(
                    self._layers, value, {}, f"chunk{i}-part{self._index}", checkpoint=i < stop
                )
                outputs.append(value)
                if self._after is not None:
                    facts = {"micro-batch": i, "of": count, "backward": backward}
                    facts["single"] = not isinstance(value, tuple)
                    self._link.send(self._after, facts, in_tuple(value))
            if not backward:  # else not yet: from a rank that fails instead of receiving, backward hears it
                self._link.flush()
        if backward and self._after is not None:
            self._passed = dict(enumerate(outputs))
        return outputs

    def _take(self, i: int, backward: bool) -> tuple[Value, int]:
        """Takes micro-batch i from the rank before, and how many there are; its gradients will be sent back."""
        facts, tensors = self._link.receive(self._index - 1)
        self._due = (self._index - 1, facts["of"] - i - 1)
        if facts["backward"] != backward:
            raise RankMismatchError(
                f"stages {self._index - 1} and {self._index} of a pipeline disagree whether backward follows "
                f"({facts['backward']} and {backward}): call train() or eval() on all ranks, and forward with or "
                "without grad mode on all"
            )
        leaves = [
            t.requires_grad_() for t in tensors if backward and (t.is_floating_point() or t.is_complex())
        ]
        if leaves:
            self._send_gradients_of(i, leaves)
        return (tensors[0] if facts["single"] else tuple(tensors)), facts["of"]

    def _send_gradients_of(self, i: int, leaves: list[torch.Tensor]) -> None:
        """Sends the gradients of all these inputs of micro-batch i to the rank before, once backward has them."""
        sent = False

        def send(gradients: Sequence[torch.Tensor | None]) -> None:
            nonlocal sent
            if sent:
                raise LifecycleError(
                    "backward through a pipeline over ranks runs once for each forward: the other stages have let go "
                    "of their activations; run forward again"
                )
            sent = True
            whole = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)]
            self._link.send(self._index - 1, {"micro-batch": i}, whole)
            self._link.flush()

        torch.autograd.graph.register_multi_grad_hook(leaves, send)

    def backward(self) -> None:
        """Runs backward, on all ranks but the last: gradients from the rank after go through this rank's layers.

        Raises:
            RankLostError: a neighbour failed.
        """
        after = self._index + 1
        with self._telling([self._before]):
            for left in reversed(range(len(self._passed))):
                facts, gradients = self._link.receive(after)
                self._due = (after, left)
                value = self._passed.pop(facts["micro-batch"])
                outputs = [t for t in in_tuple(value) if t.is_floating_point() or t.is_complex()]
                pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad]
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            self._link.flush()

    @contextlib.contextmanager
    def _telling(self, neighbours: Sequence[int | None]) -> Iterator[None]:
        """Turns an error on this rank into one on these neighbours, which wait for it."""
        self._due = (0, 0)
        try:
            yield
        except Exception as error:
            facts: StateDict = {"error": str(error)[:600]}
            if not isinstance(error, RankLostError):
                told = f"stage {self._index} of the pipeline failed: {type(error).__name__}: {error}"
                facts = {"error": told[:600]}
            with contextlib.suppress(RuntimeError):  # the error at hand is what matters
                self._link.sending.clear()
                src, left = self._due
                for _ in range(left if src not in self._link.failed else 0):
                    # and drop what a neighbour still sends, which would wait for that
                    self._link.receive(src)
                for neighbour in neighbours:
                    if neighbour is not None and neighbour not in self._link.failed:
                        self._link.send(neighbour, facts)
                self._link.flush(_PATIENCE_SECONDS)
            raise
