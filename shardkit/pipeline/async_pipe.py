"""A sequential module whose parts are on the ranks of a group, one part each."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ..activations.checkpointing import patch_batchnorm
from ..errors import ConfigurationError, LifecycleError
from ..model_parallel.groups import get_pipeline_parallel_group
from ..types import Tree
from .batch_norm import DeferredBatchNorm
from .errors import PipeTypeError
from .link import Link
from .microbatch import Value, check, join, split
from .partition import check_balance, check_checkpoint, split_module, verify_distinct
from .skip import Skippable, arriving_keys
from .stage import Stage


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
            _refuse_skips_between_ranks(module, self.balance)
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
            link = Link(self.group, torch.device(device))
            self.pipeline = Stage(self.partition, link, self._rank, len(self.balance), self.checkpoint)
        if self.pipeline is None:
            raise LifecycleError(f"rank {self._rank} holds no partition")
        return self.pipeline

    def __len__(self) -> int:
        """Number of layers on this rank."""
        return 0 if self.partition is None else len(self.partition)

    def __getitem__(self, index: int) -> nn.Module:
        """Layer of this rank."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Layers of this rank."""
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
            outputs = self._forward_pass(input, backward)
            if backward and not self.final_stage:
                self._stage().backward()
        return join(outputs) if self.final_stage else outputs

    def _forward_pass(self, input: Value, backward: bool) -> list[Value]:
        values = split(input, self.chunks) if self._rank == 0 else []
        return self._stage().forward(values, backward=backward)

    def back_helper(self, output: Tree) -> None:
        """Nothing: forward has done it. For the loops of existing code.

        Raises:
            ConfigurationError: (a ValueError) on the last rank, whose loss runs backward.
        """
        if self.final_stage:
            raise ConfigurationError("back_helper should only be called on non-final stages")


def _refuse_skips_between_ranks(module: nn.Sequential, balance: list[int]) -> None:
    names = sorted({name for keys in arriving_keys(split_module(module, balance)) for _, name in keys})
    if names:
        raise ConfigurationError(
            f"skip connections between ranks are not supported: {names}; choose a balance that keeps both ends on "
            "one rank, or take Pipe"
        )


def _own_layers(module: nn.Sequential | list[LazyModule], balance: list[int], rank: int) -> nn.Sequential:
    """This rank's layers under the names they have in the module (in a list: their places)."""
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
