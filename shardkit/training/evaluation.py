"""Evaluation on several ranks: every sample once, whatever their number, and what ranks found in one place.

torch's ``DistributedSampler`` makes ranks even: it repeats samples or drops some, and both falsify a metric. Here some
ranks have one sample fewer. Where the model's forward is a collective (FSDP), ranks still have to call it equally
often: :func:`in_step` sees to that. Results, and losses of
micro-batches, are gathered without a pickle where tensors suffice.

Legend: N samples, W world size, n_r elements of rank r's tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence, Sized
from itertools import zip_longest
from typing import TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Sampler

from ..backend import Backend, Group, backend_for
from ..errors import ConfigurationError, RankMismatchError
from ..types import ProcessGroup
from .data import rank_of_job

__all__ = ["EvaluationSampler", "gather", "gather_tensors", "in_step", "mean_loss"]

T = TypeVar("T")

_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_MOST_DIMENSIONS = 12
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def gather_tensors(
    tensor: torch.Tensor, group: ProcessGroup = None, *, backend: str | Backend | None = None
) -> list[torch.Tensor]:
    """Returns each rank's tensor, in rank order, on every rank (collective). Shapes may differ; dtypes may not.

    Args:
        tensor: any shape and number of dimensions; an empty one too.
        group: which ranks; None for all.
        backend: name or instance of the backend; by default that of the tensor's device.

    Returns:
        W tensors on the tensor's device, without a graph.

    Raises:
        RankMismatchError: dtypes differ between ranks (on all ranks).
        ConfigurationError: a dtype that collectives do not carry, or more than 12 dimensions.
    """
    return _gather(tensor.detach(), backend_for([tensor], backend).group(group).channel("control"))


def _gather(tensor: torch.Tensor, ranks: Group) -> list[torch.Tensor]:
    # What one rank can't send is told to all: else the others would wait for it.
    fits = tensor.dtype in _DTYPES and tensor.dim() <= _MOST_DIMENSIONS
    code = _DTYPES.index(tensor.dtype) if fits else -1
    shape = list(tensor.shape) if fits else []
    headers = _exchange([code, len(shape), *shape, *[0] * (_MOST_DIMENSIONS - len(shape))], ranks)
    for rank, header in enumerate(headers):
        if header[0] < 0:
            raise ConfigurationError(
                f"rank {ranks.ranks[rank]} wants to gather a tensor of a dtype that collectives do not carry, or of "
                f"more than {_MOST_DIMENSIONS} dimensions; choose one of {[str(d) for d in _DTYPES]}, or reshape it"
            )
        if header[0] != headers[0][0]:
            raise RankMismatchError(
                f"gather_tensors: rank {ranks.ranks[rank]} has {_DTYPES[header[0]]}, rank {ranks.ranks[0]} has "
                f"{_DTYPES[headers[0][0]]}; cast to one dtype"
            )
    shapes = [torch.Size(header[2 : 2 + header[1]]) for header in headers]
    sizes = [shape.numel() for shape in shapes]
    flat = tensor.reshape(-1)
    sent = flat.to(torch.uint8) if flat.dtype is torch.bool else flat.contiguous()
    whole = sent.new_empty(sum(sizes))
    if whole.numel():
        ranks.all_gather_into(whole, sent, sizes, label="gather_tensors").wait()
    return [p.to(tensor.dtype).view(s) for p, s in zip(whole.split(sizes), shapes, strict=True)]


def _exchange(numbers: Sequence[int], ranks: Group) -> list[list[int]]:
    mine = torch.tensor(list(numbers), dtype=torch.int64, device="cpu").to(ranks.backend.device())
    everybody = mine.new_empty(ranks.world_size * len(mine))
    ranks.all_gather_into(everybody, mine, label="shapes to gather").wait()
    return everybody.view(ranks.world_size, -1).tolist()


def gather(obj: T, group: ProcessGroup = None, *, backend: str | Backend | None = None) -> list[T]:
    """Returns each rank's object, in rank order, on every rank (collective).

    Objects of one structure whose leaves are tensors and numbers travel as tensors; anything else is pickled.

    Args:
        obj: tensors, numbers, any nesting of containers; anything picklable.
        group: which ranks; None for all.
        backend: name or instance of the backend; by default that of the first tensor's device.

    Returns:
        W objects; tensors in them are on the backend's device.
    """
    leaves, structure = tree_flatten(obj)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    chosen = backend_for(tensors, backend)
    ranks = chosen.group(group).channel("control")
    kinds = [str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves]
    plain = all(
        (isinstance(x, torch.Tensor) and x.dtype in _DTYPES and x.dim() <= _MOST_DIMENSIONS)
        or (type(x) in _NUMBERS and not (type(x) is int and abs(x) >= 2**63))
        for x in leaves
    )
    facts = [int(plain), len(leaves), zlib.crc32(f"{structure} {kinds}".encode())]
    everybody = _exchange(facts, ranks)
    if any(theirs != facts for theirs in everybody) or not plain:
        return ranks.all_gather_object(obj, label="gather")
    columns: list[list[object]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            columns.append([*_gather(leaf.detach().to(chosen.device()), ranks)])
            continue
        number = torch.tensor(leaf, dtype=_NUMBERS[type(leaf)], device="cpu").to(chosen.device())
        columns.append([t.item() for t in _gather(number, ranks)])
    return [
        tree_unflatten([column[rank] for column in columns], structure) for rank in range(ranks.world_size)
    ]


class EvaluationSampler(Sampler[int]):
    """Gives rank r the samples r, r + W, r + 2W, ... and nothing twice.

    ::

        sampler = EvaluationSampler(dataset)
        for batch, counts in in_step(DataLoader(dataset, batch_size=32, sampler=sampler)):
            scores = model(batch)
            if counts:
                ...

    Args:
        dataset: anything with a length N.
        num_replicas: W; by default that of the job.
        rank: by default the calling rank.
        backend: name or instance of the backend that knows them; by default the CPU's.

    Raises:
        ConfigurationError: ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        backend: str | Backend | None = None,
    ) -> None:
        self.rank, self.num_replicas = rank_of_job(rank, num_replicas, backend)
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))

    @property
    def most(self) -> int:
        """Returns how many samples the rank has that has most."""
        return -(-len(self.dataset) // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the order is always that of the dataset. For loops that call it on any sampler."""

    def in_order(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns results of all ranks, [n_r, ...] each, in the order of the dataset, [N, ...].

        Raises:
            ConfigurationError: a rank has not one row for each of its samples.
        """
        counts = [len(range(r, len(self.dataset), self.num_replicas)) for r in range(self.num_replicas)]
        if [len(p) for p in parts] != counts:
            raise ConfigurationError(
                f"expected the results of {counts} samples from the ranks, got {[len(p) for p in parts]}"
            )
        whole = parts[0].new_empty(len(self.dataset), *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            whole[rank :: self.num_replicas] = part
        return whole


def in_step(loader: DataLoader[T]) -> Iterator[tuple[T, bool]]:
    """Yields batches of a loader with an :class:`EvaluationSampler`, equally many on all ranks.

    Yields:
        The batch, and whether it counts. A rank that has no more of its own gets one again that does not.

    Raises:
        ConfigurationError: the loader has another sampler, or no fixed batch size.
    """
    sampler = loader.sampler
    if not isinstance(sampler, EvaluationSampler) or loader.batch_size is None or loader.drop_last:
        raise ConfigurationError(
            "in_step takes a DataLoader with an EvaluationSampler, a batch_size, and drop_last=False; "
            f"got a {type(sampler).__name__}, batch_size={loader.batch_size}, drop_last={loader.drop_last}"
        )
    steps, done, batch = -(-sampler.most // loader.batch_size), 0, None
    for batch in loader:
        yield batch, True
        done += 1
    for _ in range(steps - done):
        if batch is None:  # more ranks than samples
            batch = loader.collate_fn([loader.dataset[0]])
        yield batch, False


def mean_loss(
    losses: Sequence[torch.Tensor], group: ProcessGroup = None, *, backend: str | Backend | None = None
) -> torch.Tensor:
    """Computes the mean over a step's micro-batches, added in the order of their numbers, on every rank (collective).

    Args:
        losses: of this rank's, 0-dim, in the order in which it ran them: rank r's are number r, W + r, 2 * W + r, ... A
            rank may have fewer than others, or none.
        group: which ranks; None for all.
        backend: name or instance of the backend; by default that of the losses' device.

    Returns:
        A 0-dim tensor of fp64 without a graph, with the same bits on any number of ranks.
    """
    chosen = backend_for(list(losses), backend)
    own = torch.zeros(0, dtype=torch.float64, device=losses[0].device if losses else chosen.device())
    if losses:
        own = torch.stack([loss.detach().double() for loss in losses])
    rounds = zip_longest(*[part.unbind() for part in gather_tensors(own, group, backend=chosen)])
    there = [loss for of_one in rounds for loss in of_one if loss is not None]
    total = torch.zeros_like(there[0])
    for loss in there:
        total += loss
    return total / len(there)
