"""Parts of fairscale.nn.pipe beside Pipe and AsyncPipe."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from shardkit.backend import backend_for_device
from shardkit.errors import ConfigurationError
from shardkit.pipeline import microbatch
from shardkit.pipeline.microbatch import Batch, in_tuple
from shardkit.pipeline.microbatch import Value as TensorOrTensors
from shardkit.pipeline.pipe import Device
from shardkit.pipeline.skip import Skippable, StashPop

# ------------------------------------------------------------ types
Tensors = tuple[torch.Tensor, ...]
StashPopGenerator = Generator[StashPop, torch.Tensor | None, TensorOrTensors]
SkippableT = TypeVar("SkippableT", bound=Skippable)
InputDevice = int | str | torch.device | None
Devices = Iterable[Device] | list[Device]
Module = nn.Module


# ------------------------------------------------------------ micro-batches
BatchFunction = Callable[[TensorOrTensors], TensorOrTensors]


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    return [Batch(value, i) for i, value in enumerate(microbatch.split(input, chunks))]


def gather(outputs: list[Batch]) -> TensorOrTensors:
    return microbatch.join([batch.value for batch in outputs])


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
