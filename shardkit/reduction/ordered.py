"""Sums whose bits are the same on any number of ranks (``ReducePolicy(order="fixed")``).

Legend: K micro-batches of a step, W world size, N numel of a packed form, S numel of a rank's part of it.

[Note: fixed order] A step's micro-batches are numbered ``k = round * W + rank``, where each round is one backward of
every rank. The gradient of each is divided by K, element by element, travels as it is to the owners of its parts (an
all-to-all, of as many bytes as a reduce-scatter), and is added there to what is in ``grad``, one after the other:
``((0 + g[0]/K) + g[1]/K) + ...``. So the order is that of the numbers, whatever W is, and one rank that runs all K
computes the same sums. Adding 0.0 to what is sent makes a negative zero a positive one: sums that begin so are never
-0.0, so that zeros in place of a gradient that was not there change no bit.

[Note: exact norms] The squares of numbers of 24 bits have 48, and fp64 has room for 53. Numbers are divided by a power
of two above the largest of all of them; their squares, below 1, are cut into two integers of 36 bits, of which 2**16
add up in fp64 without rounding, in any order; these sums add up in integers of 64 bits. What is cut off a square is
below 2**-72 of the square of that power of two, so the norm's relative error is at most n * 2**-71 for n numbers,
which is below the rounding of fp32 up to n = 10**14. Cost: an all-reduce of the largest, and one of four integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..backend import Group, ReduceOp, Work
from ..errors import ConfigurationError, LifecycleError
from ..policy import ReducePolicy
from ..torch_seams.tensors import alike, as_plain
from .compression import CompressedAllReduce

_BITS, _HALF, _CHUNK = 36, 26, 2**16


def microbatches(reduce: ReducePolicy, world_size: int) -> int:
    """Returns K; 0 where gradients have no fixed order."""
    return 0 if reduce.order is None else reduce.microbatches or world_size


def ranks_of(group: Group, replicas: Group | CompressedAllReduce | None) -> int:
    """Counts the ranks over which gradients are summed."""
    return group.world_size * (1 if replicas is None else replicas.world_size)


def order_in_words(reduce: ReducePolicy, world_size: int) -> str:
    """Returns what logs and summaries say of it, after what else they say."""
    count = microbatches(reduce, world_size)
    return f", sums over {count} micro-batches in a fixed order" if count else ""


def announced(what: str, group: Group, order: str) -> str:
    """Returns the line that logs have about what was wrapped."""
    return f"rank {group.rank}: {what}; backend {group.backend.name}, world size {group.world_size}{order}"


# ------------------------------------------------------------ what can't have one
def check_order(reduce: ReducePolicy, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises ConfigurationError for what depends on the number of ranks; alike on all ranks, since options are."""
    for path, m in modules if reduce.order is not None else ():
        if isinstance(m, nn.SyncBatchNorm) or getattr(m, "track_running_stats", False):
            refuse_other(
                reduce,
                f"{path or 'the module'!r}, a {type(m).__name__}: its statistics are those of the batches that a rank "
                "has seen. Take a norm without statistics (GroupNorm, LayerNorm)",
            )


def refuse_local(reduce: ReducePolicy, what: str = "no_sync()") -> None:
    """Raises LifecycleError where gradients of a rank's own would add up before they are sent."""
    if reduce.order is not None:
        raise LifecycleError(
            f'{what} with order="fixed": sums of a rank\'s own would depend on the number of ranks. Run every '
            "micro-batch's backward outside of it, and don't divide losses by their number; "
            "ReducePolicy(microbatches=...) does"
        )


def refuse_replicas(reduce: ReducePolicy, group: Group, replicas: Group) -> None:
    """Raises ConfigurationError unless ranks are numbered replica by replica, as their contributions arrive."""
    if not group.backend.has_storage:
        refuse_other(reduce, "replicas on XLA; shard over all ranks")
    for ranks, step in ((group.ranks, 1), (replicas.ranks, group.world_size)):
        if tuple(ranks) != tuple(range(ranks[0], ranks[0] + len(ranks) * step, step)):
            refuse_other(reduce, "replicas with shards not on consecutive ranks, as hybrid_groups has them")


def refuse_other(reduce: ReducePolicy, what: str) -> None:
    """Raises ConfigurationError for what changes gradients by the number of ranks."""
    if reduce.order is not None:
        raise ConfigurationError(f'order="fixed" is not possible with {what}')


# ------------------------------------------------------------ gradients
def exchange(
    group: Group, packed: torch.Tensor, sizes: Sequence[int] | None, count: int, label: str
) -> tuple[torch.Tensor, Work]:
    """Starts to send each rank its part of a micro-batch's gradients (collective).

    Args:
        packed: [N]; it has to last until the wait.
        sizes: numel of each rank's part; None: all have the same.
        count: K.
        label: says what it is in errors.

    Returns:
        What came, rank by rank, [W * S], and what to wait for.
    """
    world = group.world_size
    own = packed.numel() // world if sizes is None else sizes[group.rank]
    arrived = packed.new_empty(world * own)
    each = None if sizes is None else [own] * world
    share = packed.div_(count).add_(0.0)
    work = group.all_to_all(arrived, share, each, sizes, async_op=True, label=label)
    return arrived, work


def contributions(arrived: torch.Tensor, world_size: int) -> Iterator[torch.Tensor]:
    """Yields each rank's part of what came, in the order in which they are added."""
    parts = arrived.view(world_size, -1)
    yield parts[0].clone()  # it may become the gradient, which would keep all others in memory
    yield from parts[1:]


class Rounds:
    """Counts the backwards of a step, so that none is left out of it.

    Args:
        params: those that have the sums.
        microbatches: of a step, over all ranks.

    Attributes:
        params: those that have the sums; others when what is trained changes.
        are_uneven: ranks have different numbers of them, inside of ``uneven``, which counts them.
    """

    are_uneven = False

    def __init__(self, params: Sequence[torch.Tensor], microbatches: int, world_size: int) -> None:
        self.params, self.microbatches, self._world_size = params, microbatches, world_size
        self._rounds = -(-microbatches // world_size)  # backwards of a rank, those that it follows among them
        self._count, self._has_gradients = 0, False

    def begin(self) -> None:
        """Forgets a step whose gradients have been cleared, as a backward begins.

        Raises:
            LifecycleError: ranks can't share micro-batches evenly.
        """
        if self.microbatches % self._world_size and not self.are_uneven:
            raise LifecycleError(
                f'microbatches={self.microbatches} with order="fixed": {self._world_size} ranks can\'t share them '
                f"evenly. Pass a number that {self._world_size} divides, or run each step inside of "
                "`with shardkit.uneven(model):`"
            )
        if self._count and self._has_gradients and not self._any_gradient():
            self._count = 0

    def end(self) -> None:
        """Counts a backward that has ended."""
        self._count = 0 if self.are_uneven else (self._count + 1) % self._rounds
        self._has_gradients = self._any_gradient()

    def _any_gradient(self) -> bool:
        return any(p.grad is not None for p in self.params)

    def are_waiting(self) -> bool:
        """Tells whether there are more to come."""
        return self._count > 0

    def check_step(self, stepped: set[int] | None = None) -> None:
        """Raises LifecycleError if there are, for a step over parameters with these ids (None: over all)."""
        if self._count and (stepped is None or any(id(p) in stepped for p in self.params)):
            raise LifecycleError(
                f'with order="fixed" a step has {self._rounds} backwards on each rank, and step() comes after '
                f"{self._count}. Run the others, change ReducePolicy(microbatches=...), or clear the gradients by "
                "zero_grad()"
            )


# ------------------------------------------------------------ norms
def exact_norm(
    portions: Sequence[tuple[Sequence[torch.Tensor], Sequence[Group]]], like: torch.Tensor
) -> torch.Tensor:
    """Computes the norm of order 2 (0-dim) of dense gradients, however they are cut; see [Note: exact norms].

    Args:
        portions: of each its gradients here, and the groups that have the others.
        like: has the device and dtype of the result.

    Raises:
        ConfigurationError: a compiler decides how fp64 is computed.
    """
    if any(not group.backend.has_storage for _, groups in portions for group in groups):
        what = "a norm of order 2 on XLA, where devices have no fp64 of their own; clip by norm_type=inf"
        raise ConfigurationError(f'order="fixed" is not possible with {what}')
    with as_plain():
        there = [([_real(g) for g in gradients if g.numel()], groups) for gradients, groups in portions]
        found = torch.stack(
            [_over(groups, _largest(rows, like), ReduceOp.MAX) for rows, groups in there]
        ).amax(0)
        exponent = torch.frexp(found[0])[1].clamp(-1000, 1000)
        scale = torch.ldexp(torch.ones_like(found[0]), -exponent)
        total = torch.zeros(4, dtype=torch.int64, device=like.device)
        for rows, groups in there:
            part = torch.zeros_like(total)
            for row in _joined(rows):
                part += _sums(row, scale.to(row.device)).to(like.device)
            total += _over(groups, part, ReduceOp.SUM)
        high, more, low, least = total.double()
        square = (high * 2.0**_HALF + more) * 2.0**-_BITS + (low * 2.0**_HALF + least) * 2.0 ** (-2 * _BITS)
        norm = torch.ldexp(square.sqrt(), exponent)
        norm = torch.where(found[0] == torch.inf, found[0], norm)
        return torch.where(found[1] > 0, torch.nan, norm).to(like.dtype)


def _real(gradient: torch.Tensor) -> torch.Tensor:
    plain = gradient.as_subclass(torch.Tensor)
    return (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)


def _over(groups: Sequence[Group], value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduces a value over the ranks of all groups (collective)."""
    for group in groups:
        if group.world_size > 1:
            on_device = value.to(group.backend.device())
            group.channel("control").all_reduce(on_device, op=op, label="norm of gradients")
            value = on_device.to(value.device)
    return value


def _largest(rows: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Finds the largest magnitude, inf if there is any that is not finite, and whether there is no number, [2]."""
    if not rows:
        return torch.zeros(2, dtype=torch.float64, device=like.device)
    norms = torch._foreach_norm(list(rows), torch.inf)
    largest = torch.stack([n.to(like.device, torch.float64) for n in norms]).amax()
    is_nan = largest.isnan()
    return torch.stack([torch.where(is_nan, torch.inf, largest), is_nan.double()])


def _joined(rows: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Puts small tensors together; order and cuts don't matter."""
    small = []
    for row in rows:
        if row.numel() >= _CHUNK:
            yield row
        else:
            small.append(row)
    yield from (torch.cat(together) for together in alike(small, _CHUNK))


def _sums(row: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Sums both integers of the scaled squares; each sum is cut in two, [4]."""
    whole = row.numel() - row.numel() % _CHUNK
    # on the host what is computed in between stays in its cache
    at_once = 1 if row.device.type == "cpu" else 256
    total = torch.zeros(4, dtype=torch.int64, device=row.device)
    for block in (*row[:whole].view(-1, _CHUNK).split(at_once), row[whole:].view(1, -1)):
        squares = block.double().mul_(scale).square_().mul_(2.0**_BITS)
        high = squares.floor()
        low = squares.sub_(high).mul_(2.0**_BITS).floor_()
        sums = torch.stack((high.sum(1), low.sum(1))).long()
        total += torch.stack((sums >> _HALF, sums & (2**_HALF - 1)), 1).sum(2).view(4)
    return total
