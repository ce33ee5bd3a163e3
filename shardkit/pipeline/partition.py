"""Cuts a sequential module into partitions of consecutive layers; and the errors of pipelines."""

from __future__ import annotations

import copy
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..backend import backend_for_device
from ..errors import ConfigurationError
from .microbatch import Value


class PipeTypeError(ConfigurationError, TypeError):
    """Something is of a kind that a pipeline can't take."""


class BalanceError(ConfigurationError):
    """The numbers of layers in the partitions don't fit the module."""


class TooFewDevicesError(ConfigurationError, IndexError):
    """There are more partitions than devices or ranks to hold them."""


ADVICE = (
    "; while a model still changes, shardkit.nn.pipe.balance finds numbers of layers that take about the same time: "
    "balance_by_time(partitions, model, sample)"
)


def verify_module(module: nn.Module) -> None:
    """Only sequential modules with distinct layers are cut.

    Raises:
        PipeTypeError: (a TypeError) it is not sequential.
        ConfigurationError: (a ValueError) a layer is in it twice.
    """
    if not isinstance(module, nn.Sequential):
        raise PipeTypeError(
            f"module must be nn.Sequential to be partitioned, and is a {type(module).__name__}"
        )
    verify_distinct(module)


def verify_distinct(layers: Iterable[object]) -> None:
    """Raises ConfigurationError (a ValueError) for a layer that is there twice."""
    ids = [id(layer) for layer in layers]
    if len(set(ids)) != len(ids):
        raise ConfigurationError(
            "module with duplicate children is not supported; make a layer for each place"
        )


def check_balance(layers: int, balance: Sequence[int], places: int, what: str) -> None:
    """Compares numbers of layers in the partitions with how many layers and places (devices, ranks) there are.

    Raises:
        BalanceError: (a ValueError) they are not positive or don't add up.
        TooFewDevicesError: (an IndexError) more partitions than places.
    """
    if sum(balance) != layers:
        raise BalanceError(
            "module and sum of balance have different length "
            f"(module: {layers}, sum of balance: {sum(balance)}){ADVICE}"
        )
    if any(number <= 0 for number in balance):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {list(balance)}){ADVICE}")
    if len(balance) > places:
        raise TooFewDevicesError(
            f"too few {what} to hold given partitions ({what}: {places}, partitions: {len(balance)})"
        )


def check_checkpoint(checkpoint: str, chunks: int) -> None:
    """Raises ConfigurationError (a ValueError) for a mode or a number of micro-batches that there isn't."""
    if chunks <= 0:
        raise ConfigurationError(f"number of chunks must be positive integer, and is {chunks}")
    if checkpoint not in ("always", "except_last", "never"):
        raise ConfigurationError(
            f"checkpoint is not one of 'always', 'except_last', or 'never', but {checkpoint!r}"
        )


def require_balance(balance: object) -> None:
    """Raises BalanceError (a ValueError) where none is given."""
    if balance is None:
        raise BalanceError(f"balance is required: the number of layers in each partition{ADVICE}")


def split_module(module: nn.Sequential, balance: Sequence[int]) -> list[nn.Sequential]:
    """Partitions of that many layers each, which keep the names they have in the module."""
    named = iter(module.named_children())
    return [nn.Sequential(OrderedDict(itertools.islice(named, number))) for number in balance]


def verify_shared_parameters(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """A parameter of two partitions can be on one device only.

    Raises:
        ConfigurationError: (a ValueError) they are on different ones.
    """
    place: dict[int, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for name, parameter in partition.named_parameters():
            if place.setdefault(id(parameter), device) != device:
                raise ConfigurationError(
                    "module with duplicate parameters on distinct devices is not supported: "
                    f"{name} {tuple(parameter.shape)} is on {place[id(parameter)]} and on {device}; "
                    "put the layers that share it into one partition"
                )


# ------------------------------------------------------------ balance
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
    """Where blocks begin and end, when the sums of no two of them differ by more than the bound.

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
    """Copies of the layers, one at a time, on a device and in training mode."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def profile_times(module: nn.Sequential, sample: Value, timeout: float, device: torch.device) -> list[int]:
    """Microseconds that forward and backward of each layer take, summed over rounds until the time is over.

    Args:
        module: stays as it is; layers run one after the other, on copies.
        sample: input with any batch size.
        timeout: seconds; there is at least one round.
        device: where they run.

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
            outputs = [t for t in _tensors(value) if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, outputs)
            synchronize()
            times[i] += time.perf_counter() - begin
        if time.monotonic() >= end:
            return [int(1e6 * t) for t in times]


def profile_sizes(
    module: nn.Sequential, input: Value, chunks: int, param_scale: float, device: torch.device
) -> list[int]:
    """Bytes that each layer needs in training: ``param_scale`` times its parameters, and what it keeps for backward.

    What is kept is counted, for one sample, from what autograd saves and the layer returns. So it works on any device,
    where fairscale reads CUDA's memory counters.

    Args:
        module: stays as it is.
        input: a mini-batch.
        chunks: micro-batches it will be cut into.
        param_scale: copies of parameters: themselves, gradients, optimizer state.
        device: where the layers run.
    """
    samples = _tensors(input)[0].size(0) / chunks
    value: Value = tuple(t[:1] for t in input) if isinstance(input, tuple) else input[:1]
    sizes = []
    for layer in layerwise_sandbox(module, device):
        value = _fresh(value, device)
        held = {
            t.untyped_storage().data_ptr() for t in [*_tensors(value), *layer.parameters(), *layer.buffers()]
        }
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, held: set[int] = held, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = layer(value)
        for tensor in _tensors(value):
            keep(tensor)
        parameters = sum(p.untyped_storage().nbytes() for p in layer.parameters())
        sizes.append(int(sum(kept.values()) * samples + parameters * param_scale))
    return sizes


def balance_cost(cost: list[int], partitions: int) -> list[int]:
    """Numbers of layers of partitions that cost about the same."""
    return [len(block) for block in solve(cost, partitions)]


def _tensors(value: Value) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _fresh(value: Value, device: torch.device) -> Value:
    """Copies values to a device, as leaves."""
    made = tuple(t.detach().to(device).requires_grad_(t.requires_grad) for t in _tensors(value))
    return made if isinstance(value, tuple) else made[0]
