"""Parts of fairscale.nn.pipe beside Pipe and AsyncPipe."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from shardkit.backend import backend_for_device
from shardkit.errors import ConfigurationError
from shardkit.pipeline import microbatch
from shardkit.pipeline.async_pipe import LazyModule
from shardkit.pipeline.microbatch import Batch, in_tuple
from shardkit.pipeline.microbatch import Value as TensorOrTensors
from shardkit.pipeline.pipe import Device
from shardkit.pipeline.skip import Skippable, StashPop
from shardkit.wrapping.activations import call_checkpointed

# ------------------------------------------------------------ types
Tensors = tuple[torch.Tensor, ...]
StashPopGenerator = Generator[StashPop, torch.Tensor | None, TensorOrTensors]
SkippableT = TypeVar("SkippableT", bound=Skippable)
InputDevice = int | str | torch.device | None


# ------------------------------------------------------------ micro-batches
BatchFunction = Callable[[TensorOrTensors], TensorOrTensors]


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    return [Batch(value, i) for i, value in enumerate(microbatch.split(input, chunks))]


def gather(outputs: list[Batch]) -> TensorOrTensors:
    return microbatch.join([batch.value for batch in outputs])


# ------------------------------------------------------------ checkpointing
class CheckpointedFunction(Protocol):
    def __call__(self, input: TensorOrTensors) -> TensorOrTensors: ...


class Checkpointing:
    """A function and its input: :meth:`checkpoint` computes without keeping activations."""

    def __init__(self, function: CheckpointedFunction, batch: Batch) -> None:
        self.function = function
        self.batch = batch

    def checkpoint(self) -> Batch:
        """Returns the function's result, whose activations backward computes again."""
        # What parameters the function uses is not known: those of a module are, others as if there were some.
        near = self.function if isinstance(self.function, nn.Module) else _UNKNOWN
        return Batch(call_checkpointed(self.function, (self.batch.value,), {}, near=near), self.batch.index)

    def recompute(self, batch: Batch) -> None:
        """Does nothing: backward comes to it by itself."""


_UNKNOWN = nn.ParameterList([nn.Parameter(torch.empty(0))])


# ------------------------------------------------------------ Pipe
Devices = Iterable[Device] | list[Device]
Module = nn.Module


def recommend_auto_balance(message: str) -> str:
    """Returns the message, and how to have the numbers of layers found."""
    return message + microbatch.ADVICE


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: list[torch.device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Returns partitions on their devices, with the numbers of layers and the devices (superfluous ones are removed).

    Raises:
        BalanceError: (a ValueError) the numbers don't fit.
        TooFewDevicesError: (an IndexError) fewer devices than partitions.
    """
    balance = list(balance)
    microbatch.check_balance(len(module), balance, len(devices), "devices")
    del devices[len(balance) :]
    parts = microbatch.split_module(module, balance)
    return nn.ModuleList(p.to(d) for p, d in zip(parts, devices, strict=True)), balance, devices


def verify_splitting(
    module: nn.Sequential,
    partitions: Sequence[nn.Sequential],
    balance: Iterable[int],
    devices: list[torch.device],
) -> None:
    """Raises ConfigurationError (a ValueError) for a parameter on two devices."""
    microbatch.verify_shared_parameters(partitions, devices)


# ------------------------------------------------------------ AsyncPipe
def check_balance(module: nn.Sequential | list[LazyModule], balance: list[int]) -> None:
    """Raises BalanceError (a ValueError) for numbers of layers that don't fit."""
    microbatch.check_balance(len(module), balance, len(balance), "ranks")


def verify_module(module: nn.Sequential | list[LazyModule]) -> None:
    """Raises ConfigurationError (a ValueError) for a layer that is there twice."""
    microbatch.verify_distinct(module)


# ------------------------------------------------------------ balance
def detach(batch: Batch) -> None:
    """Cuts a batch off its graph, in place."""
    batch[:] = tuple(x.detach().requires_grad_(x.requires_grad) for x in batch)


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: TensorOrTensors,
    *,
    timeout: float = 1.0,
    device: Device = torch.device("cuda"),  # noqa: B008  # fairscale's default
) -> list[int]:
    """Returns numbers of layers such that forward and backward of all partitions take about the same time.

    Args:
        module: stays as it is; copies of its layers run one by one.
        sample: input with any batch size.
        timeout: seconds to measure for.
        device: where the layers run; of any kind.
    """
    return balance_cost(profile_times(module, sample, timeout, torch.device(device)), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: TensorOrTensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = torch.device("cuda"),  # noqa: B008  # fairscale's default
) -> list[int]:
    """Returns numbers of layers such that all partitions take about the same memory in training.

    Args:
        module: stays as it is; copies of its layers run one by one.
        input: a mini-batch.
        chunks: micro-batches it will be cut into.
        param_scale: copies of parameters: 2 for themselves and gradients, and the optimizer's state (SGD with
            momentum 1, Adam 2).
        device: where the layers run; of any kind (fairscale: CUDA only).
    """
    return balance_cost(profile_sizes(module, input, chunks, param_scale, torch.device(device)), partitions)


# ------------------------------------------------------------ an order between parts of a backward
# From torchgpipe (Kim et al. 2020, arXiv 2004.09910), section 3.1: an edge of autograd's graph that carries an empty
# tensor. ``x, phony = fork(x)`` and later ``y = join(y, phony)``: backward finishes with y before it comes to x.
@functools.cache
def get_phony(device: torch.device, *, requires_grad: bool) -> torch.Tensor:
    """Returns an empty tensor, shape [0], which costs no memory; the same one for the same arguments."""
    return torch.empty(0, device=device, requires_grad=requires_grad)


def fork(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input, and a phony that comes from the same place of autograd's graph."""
    if torch.is_grad_enabled() and input.requires_grad:
        return Fork.apply(input)  # type: ignore[no-any-return, no-untyped-call]
    return input, get_phony(input.device, requires_grad=False)


def join(input: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:
    """Returns the input, whose backward comes before that of the phony's origin."""
    if torch.is_grad_enabled() and (input.requires_grad or phony.requires_grad):
        return Join.apply(input, phony)  # type: ignore[no-any-return, no-untyped-call]
    return input


class Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return input.detach(), get_phony(input.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_input: torch.Tensor, grad_grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad_input


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, input: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return input.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_input: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad_input, None


# ------------------------------------------------------------ streams
# torch has all of it in ``torch.Stream`` and ``torch.accelerator``; what is added is a host that stands for a device
# with one stream, on which all work is done when a call returns.
class CPUStreamType:
    """The class of :data:`CPUStream`."""


CPUStream = CPUStreamType()
"""The host's only stream."""

AbstractStream = torch.Stream | CPUStreamType


def new_stream(device: torch.device) -> AbstractStream:
    """Returns a new stream of a device; the host's is always the same."""
    return CPUStream if device.type == "cpu" else torch.get_device_module(device).Stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """Returns the stream on which work for that device is issued."""
    return CPUStream if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def default_stream(device: torch.device) -> AbstractStream:
    """Returns the stream on which work is issued where nobody chose another."""
    return CPUStream if device.type == "cpu" else torch.get_device_module(device).default_stream(device)


@contextlib.contextmanager
def use_device(device: torch.device) -> Generator[None]:
    """Makes new tensors of the device's type, within this block, lie on this one of them."""
    with contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        yield


@contextlib.contextmanager
def use_stream(stream: AbstractStream | None) -> Generator[None]:
    """Issues work, within this block, on that stream (None and the host's: nothing changes)."""
    if isinstance(stream, torch.Stream):
        with torch.get_device_module(stream.device).stream(stream):
            yield
    else:
        yield


def get_device(stream: AbstractStream) -> torch.device:
    """Returns the device that a stream belongs to."""
    return as_cuda(stream).device if is_cuda(stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Makes what is issued on ``source`` from now on come after what ``target`` has been given so far."""
    if is_cuda(target):
        if is_cuda(source):
            as_cuda(source).wait_stream(as_cuda(target))
        else:  # the host itself
            as_cuda(target).synchronize()


def record_stream(tensor: torch.Tensor, stream: AbstractStream) -> None:
    """Keeps a tensor's memory until what that stream has been given so far is done."""
    if is_cuda(stream):
        # A view's offset hides the storage's begin, which is what the allocator knows.
        tensor.new_empty(0).set_(tensor.untyped_storage()).record_stream(as_cuda(stream))


def is_cuda(stream: AbstractStream | None) -> bool:
    """Says whether it is a device's stream (any device's, in spite of the name), not the host's."""
    return isinstance(stream, torch.Stream)


def as_cuda(stream: AbstractStream) -> torch.Stream:
    """Returns the same stream, for type checkers: a device's."""
    return cast("torch.Stream", stream)


# ------------------------------------------------------------ how many layers each partition should get
# Costs are split into blocks of about the same sum by Bárány and Grinberg, "Block partitions of sequences"
# (arXiv 1308.2452). The blocks are those that fairscale finds, so that names in state dicts are, too.
def solve(sequence: list[int], partitions: int = 1) -> list[list[int]]:
    """Cuts numbers into consecutive blocks whose sums differ by no more than the largest difference of two numbers.

    Raises:
        ConfigurationError: (a ValueError) fewer than one block, or more blocks than numbers.
    """
    if partitions < 1:
        raise ConfigurationError(f"partitions must be a positive integer ({partitions} < 1)")
    if len(sequence) < partitions:
        raise ConfigurationError(
            f"sequence is shorter than intended partitions ({len(sequence)} < {partitions})"
        )
    low, spread = min(sequence), max(sequence) - min(sequence)
    found = _even_out(
        [(x - low) / spread if spread else 0.0 for x in sequence], 1.0, partitions, nearest=False
    )
    cuts = found or _even_out([x - low for x in sequence], spread, partitions, nearest=True)
    return [sequence[i:j] for i, j in itertools.pairwise(cuts)]


def _even_out(costs: Sequence[float], bound: float, partitions: int, *, nearest: bool) -> list[int]:
    """Finds where blocks begin and end, when the sums of no two of them differ by more than the bound.

    The smallest block takes elements from its neighbour towards the largest one. Of several smallest blocks the paper
    takes the one nearest to the largest, and then this comes to an end. fairscale takes the first, and may not.

    Returns:
        One more number than blocks; none at all if blocks are empty or it does not come to an end.
    """
    each = len(costs) // partitions
    cuts = [each * i for i in range(partitions)] + [len(costs)]
    sums = [sum(costs[i:j]) for i, j in itertools.pairwise(cuts)]
    largest = -1
    for _ in range(len(costs) ** 2 * partitions):
        if largest < 0:  # stays the same until it loses an element
            largest = max(range(partitions), key=lambda i: (sums[i], i))
        smallest = min(range(partitions), key=lambda i: (sums[i], abs(i - largest) if nearest else i))
        if sums[largest] <= sums[smallest] + bound:
            return cuts if all(i < j for i, j in itertools.pairwise(cuts)) else []
        giver = smallest + (1 if largest > smallest else -1)
        cuts[max(smallest, giver)] += giver - smallest
        for i in (smallest, giver):
            sums[i] = sum(costs[cuts[i] : cuts[i + 1]])
        if giver == largest:
            largest = -1
    return []


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Yields copies of the layers, one at a time, on a device and in training mode."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def profile_times(
    module: nn.Sequential, sample: TensorOrTensors, timeout: float, device: torch.device
) -> list[int]:
    """Returns how many microseconds forward and backward of each layer take, summed over rounds until the time is over.

    There is at least one round. Arguments are those of :func:`balance_by_time`.

    Raises:
        ConfigurationError: (a ValueError) parameters have gradients, which copies would share the memory of.
    """
    if any(p.grad is not None for p in module.parameters()):
        raise ConfigurationError(
            "some parameter already has gradient; call module.zero_grad(set_to_none=True) first"
        )
    synchronize = backend_for_device(device.type).synchronize
    times = [0.0 for _ in module]
    end = time.monotonic() + timeout
    while True:
        value = _fresh(sample, device)
        for i, layer in enumerate(layerwise_sandbox(module, device)):
            value = _fresh(value, device)
            synchronize()
            begin = time.perf_counter()
            value = layer(value)
            outputs = [t for t in in_tuple(value) if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, outputs)
            synchronize()
            times[i] += time.perf_counter() - begin
        if time.monotonic() >= end:
            return [int(1e6 * t) for t in times]


def profile_sizes(
    module: nn.Sequential, input: TensorOrTensors, chunks: int, param_scale: float, device: torch.device
) -> list[int]:
    """Counts bytes that each layer needs in training: ``param_scale`` times its parameters, and what backward needs.

    What is kept is counted, for one sample, from what autograd saves and the layer returns. So it works on any device,
    where fairscale reads CUDA's memory counters. Arguments are those of :func:`balance_by_size`.
    """
    samples = in_tuple(input)[0].size(0) / chunks
    value: TensorOrTensors = tuple(t[:1] for t in input) if isinstance(input, tuple) else input[:1]
    sizes = []
    for layer in layerwise_sandbox(module, device):
        value = _fresh(value, device)
        held = {
            t.untyped_storage().data_ptr() for t in [*in_tuple(value), *layer.parameters(), *layer.buffers()]
        }
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, held: set[int] = held, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = layer(value)
        for tensor in in_tuple(value):
            keep(tensor)
        parameters = sum(p.untyped_storage().nbytes() for p in layer.parameters())
        sizes.append(int(sum(kept.values()) * samples + parameters * param_scale))
    return sizes


def balance_cost(cost: list[int], partitions: int) -> list[int]:
    """Returns the numbers of layers of partitions that cost about the same."""
    return [len(block) for block in solve(cost, partitions)]


def _fresh(value: TensorOrTensors, device: torch.device) -> TensorOrTensors:
    """Copies values to a device, as leaves."""
    made = tuple(t.detach().to(device).requires_grad_(t.requires_grad) for t in in_tuple(value))
    return made if isinstance(value, tuple) else made[0]
