"""Ranks as threads of one process that take turns: deterministic, needs no processes and no network.

For trying things out, for debuggers, and for tests that draw thousands of programs.

Groups of simulated ranks: collectives work directly on the tensors of all ranks; nothing runs in parallel.

Collectives, shardkit's and torch's, are functions of what all ranks brought: one thread can reach them all.

Legend: W world size, S one rank's shard numel, N sum of all shards' numel. Lists have one entry a rank; where torch
takes several tensors of a rank at once, that is a list of them. ``op`` is the name of a reduction ("SUM", "AVG", ...).

Sums are added up in the order in which gloo, and shardkit on top of it, add them: results equal those of processes to
the bit.

What the protocol of groups leaves undefined afterwards is overwritten with NaN (integers: the largest value),
so that code which reads it shows it here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.backend import (
    Backend,
    Group,
    Pool,
    ReduceOp,
    Sizes,
    Work,
    check_members,
    is_group,
    register_rank_provider,
    size_of,
)
from shardkit.errors import ConfigurationError, OutOfStepError
from shardkit.types import ProcessGroup, T, Tree

from ..c10d.group import ORDERED_CHANNELS, ReduceScatterPlan
from ..diagnosis.stack_report import Call
from ..eager import Host, ObjectsOverBytes
from .rank_threads import Finish, Meeting, RankThreads

__all__ = ["SimulatedBackend", "SimulatedGroup"]

_rank = threading.local()  # group: this thread's rank among all


class SimulatedBackend(Host):
    """CPU tensors, one thread a rank."""

    name = "simulated"

    def is_available(self) -> bool:
        return True

    def group(self, process_group: ProcessGroup = None) -> Group:
        here: Group | None = getattr(_rank, "group", None)
        if is_group(process_group):
            return process_group
        if process_group is None:
            if here is None:
                raise ConfigurationError(
                    "this thread is no simulated rank; start ranks with shardkit.launch(fn, world_size, "
                    "backend='simulated') and build sharded objects inside fn"
                )
            return here
        if size_of(process_group) == 1:
            return SimulatedGroup(self, RankThreads(1), Line((0,)), 0)
        raise ConfigurationError(
            f"process_group is a {type(process_group).__name__}; simulated ranks take a shardkit group "
            "(Group.new_group) or None for all ranks"
        )

    def _pool(self, world_size: int, timeout: float | None, start_timeout: float | None) -> Pool:
        return SimulatedPool(self, world_size, timeout)


class SimulatedPool(Pool):
    """Threads, new ones for each call. They run any function, and get copies of its arguments.

    When a rank fails, the others end with RankLostError.
    """

    def __init__(self, backend: Backend, world_size: int, timeout: float | None) -> None:
        super().__init__(world_size, timeout, None)
        self._backend = backend

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        def enter(rank: int) -> None:
            enter_group(SimulatedGroup(self._backend, threads, line, rank))

        threads, line = RankThreads(self.world_size, enter), Line(range(self.world_size))
        return threads.run(fn, args, self.timeout)

    def close(self, kill: bool = False) -> None:
        """Does nothing: a call ends with its threads."""


def enter_group(group: Group) -> None:
    """Makes the calling thread a rank; this group is what it finds when it asks for all ranks."""
    _rank.group = group


register_rank_provider(lambda: _rank.group.backend if hasattr(_rank, "group") else None)


# ------------------------------------------------------------ groups
class Line:
    """Shared by the ranks of one group and channel: the collectives that not all have reached."""

    def __init__(self, ranks: Sequence[int], name: str = "main") -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.meetings: dict[int, Meeting] = {}
        self._pairs: dict[tuple[int, int, int], Line] = {}
        self._named: dict[str, Line] = {}

    def meeting(self, sequence: int) -> Meeting:
        """Returns the one for a rank's call of that number."""
        return self.meetings.setdefault(sequence, Meeting(self.ranks))

    def between(self, source: int, destination: int, tag: int) -> Line:
        """Returns what two of its ranks share, in one direction."""
        key = source, destination, tag
        if key not in self._pairs:
            ranks = self.ranks[source], self.ranks[destination]
            self._pairs[key] = Line(ranks, f"{self.name}, rank {ranks[0]} to rank {ranks[1]}, tag {tag}")
        return self._pairs[key]

    def named(self, ranks: Sequence[int], name: str) -> Line:
        """Returns what some of its ranks share."""
        return self._named.setdefault(name, Line([self.ranks[r] for r in ranks], name))


class SimulatedWork(Work):
    """This rank's part of a collective."""

    __slots__ = ("_call", "_group", "_meeting")

    def __init__(self, group: SimulatedGroup, meeting: Meeting, call: Call) -> None:
        self._group, self._meeting, self._call = group, meeting, call

    def is_done(self) -> bool:
        return self._meeting.over

    def wait(self) -> None:
        group = self._group
        group._threads.wait(group.ranks[group.rank], self._meeting, self._call)

    def result(self) -> Tree:
        """Returns what the last rank's ``finish`` returned."""
        self.wait()
        return self._meeting.result


class SimulatedGroup(ObjectsOverBytes):
    """Threads that communicate; see :class:`shardkit.backend.Group` for the methods.

    Args:
        rank: this rank within the line.
    """

    def __init__(self, backend: Backend, threads: RankThreads, line: Line, rank: int) -> None:
        self.backend = backend
        self.rank = rank
        self.ranks = line.ranks
        self.world_size = len(line.ranks)
        self._threads, self._line = threads, line
        self._sequence = 0
        self._channels: dict[str, SimulatedGroup] = {}

    def _issue(
        self,
        operation: str,
        numel: int,
        label: str,
        terms: tuple[object, ...],
        brought: Tree,
        finish: Finish,
        async_op: bool = False,
        itemsize: int = 1,
        either: bool = False,
    ) -> SimulatedWork:
        """Issues this rank's part of a collective over ``numel`` elements; ``either``: ranks name it differently."""
        self._sequence += 1
        call = Call(self._line.name, self._sequence, operation, numel, label)
        meeting = self._line.meeting(self._sequence)
        rank = self.ranks[self.rank]
        self._threads.arrive(
            rank, meeting, call, terms if either else (operation, *terms), brought, finish, numel * itemsize
        )
        if not meeting.missing():
            self._line.meetings.pop(self._sequence, None)
        work = SimulatedWork(self, meeting, call)
        if not async_op:
            work.wait()
        return work

    @property
    def issued(self) -> int:
        return self._sequence

    # ------------------------------------------------------------ groups
    def between(self, source: int, destination: int, tag: int) -> SimulatedGroup:
        """Makes a group of two ranks, of which this is one, for what goes from the first to the second."""
        line = self._line.between(source, destination, tag)
        return SimulatedGroup(self.backend, self._threads, line, 0 if self.rank == source else 1)

    def channel(self, name: str) -> SimulatedGroup:
        if name not in self._channels:
            work = self._issue(f"channel({name!r})", 0, "", (), None, lambda _: Line(self.ranks, name))
            self._channels[name] = SimulatedGroup(self.backend, self._threads, work.result(), self.rank)
        return self._channels[name]

    def channels(self) -> list[SimulatedGroup]:
        return list(self._channels.values())

    def new_group(self, ranks: Sequence[int]) -> SimulatedGroup | None:
        members = check_members(self, ranks)
        work = self._issue(
            f"new_group({members})", 0, "", (), None, lambda _: Line([self.ranks[r] for r in members])
        )
        line = work.result()
        if self.rank not in members:
            return None
        return SimulatedGroup(self.backend, self._threads, line, members.index(self.rank))

    def among(self, members: Sequence[int], name: str) -> SimulatedGroup:
        """Makes a group of these ranks, this one among them, without a word to others; all give it the same name."""
        line = self._line.named(members, name)
        if name not in self._channels:
            self._channels[name] = SimulatedGroup(self.backend, self._threads, line, members.index(self.rank))
        return self._channels[name]

    # ------------------------------------------------------------ tensors
    def _carry(
        self,
        operation: str,
        tensor: Tensor,
        label: str,
        terms: tuple[object, ...],
        brought: Tree,
        finish: Finish,
        async_op: bool,
    ) -> SimulatedWork:
        """Runs a collective over all of a tensor, whose dtype is the same on all ranks."""
        numel, size = tensor.numel(), tensor.element_size()
        return self._issue(
            operation, numel, label, (str(tensor.dtype), *terms), brought, finish, async_op, size
        )

    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        terms = parts, label if self._line.name in ORDERED_CHANNELS else ""
        brought, finish = ([output.detach().split(parts)], [shard]), of_pairs(all_gather)
        return self._carry("all_gather_into", output, label, terms, brought, finish, async_op)

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        terms, brought = (op.value, parts), (shard, input)
        finish = of_pairs(reduce_scatter_into, parts, op.name)
        return self._carry("reduce_scatter_into", input, label, terms, brought, finish, async_op)

    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        pieces = output.detach().split(come), input.detach().split(go)
        finish = of_pairs(all_to_all, label)
        return self._carry("all_to_all", input, label, (), pieces, finish, async_op)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        terms, finish = (op.value, tensor.numel()), functools.partial(all_reduce, op=op.name)
        return self._carry("all_reduce", tensor, label, terms, [tensor], finish, async_op)

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        def finish(brought: list[Tree]) -> None:
            reduce(brought, op.name, dst)
            for rank, other in enumerate(brought):
                if rank != dst:
                    spoil(other)

        terms = op.value, tensor.numel(), dst
        return self._carry("reduce", tensor, label, terms, tensor, finish, async_op)

    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        terms, finish = (tensor.numel(), src), functools.partial(broadcast, root=src)
        return self._carry("broadcast", tensor, label, terms, [tensor], finish, async_op)

    def barrier(self, *, label: str = "") -> None:
        self._issue("barrier", 0, label, (), None, lambda _: None)

    def _exchange(self, what: str, label: str, data: bytes) -> list[bytes]:
        return self._issue(what, len(data), label, (), data, list).result()

    def agree(self, what: str) -> None:
        self._issue("agreement", 0, what, (what,), None, lambda _: None)

    def abort(self, why: str = "the rank gave up") -> None:
        self._threads.give_up(self.ranks[self.rank], why)


# ------------------------------------------------------------ collectives
Tensors = Sequence[Tensor]
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_SEGMENT = 2**20  # bytes; gloo sends larger parts in several


def op_name(op: dist.ReduceOp) -> str:
    """Names how contributions are combined."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in _COMBINE:
        raise ConfigurationError(
            f"simulated ranks can't reduce with {name}; there are {', '.join(_COMBINE)}. Multiply before or after "
            "instead"
        )
    return name


def _combine(tensors: Tensors, op: str) -> Tensor:
    """Returns a new tensor; in the order given and in the tensors' dtype, so the same on every run."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        _COMBINE[op](result, tensor, out=result)
    return result.div_(len(tensors)) if op == "AVG" else result


def _around_the_ring(tensors: Tensors, op: str) -> Tensor:
    """Reduces as gloo's all-reduce does, to [N]: each rank's chunk goes around a ring, and is added to on its way."""
    tensors = [t.reshape(-1) for t in tensors]
    world_size, numel = len(tensors), tensors[0].numel()
    if world_size < 3:
        return _combine(tensors, op)
    result = torch.empty_like(tensors[0])
    # how many elements end on one rank: a number of segments of equal size
    largest = max(1, _SEGMENT // tensors[0].element_size())
    segments = max(-(-numel // largest), 2 * world_size)
    segments = -(-segments // world_size) * world_size
    chunk = max(1, segments // world_size * -(-numel // segments))
    for owner, first in enumerate(range(0, numel, chunk)):
        around = [tensors[(owner - d) % world_size] for d in range(1, world_size + 1)]
        result[first : first + chunk] = _combine([t[first : first + chunk] for t in around], op)
    return result


def reduce_scatter_into(shards: Tensors, inputs: Tensors, sizes: Sequence[int], op: str) -> None:
    """Makes each shard [S] the combination of all ranks' parts of the inputs [N], which are overwritten."""
    parts = [tensor.split(list(sizes)) for tensor in inputs]
    world_size, counts = len(sizes), tuple(sizes)
    reduced = []
    for rank in range(world_size):
        # one partner after the other; else all together
        in_rounds = ReduceScatterPlan(rank, counts).in_rounds
        ranks = [(rank - d) % world_size for d in range(world_size)] if in_rounds else range(world_size)
        own = [parts[r][rank] for r in ranks]
        if in_rounds or world_size < 3 or op in ("MAX", "MIN"):
            reduced.append(_combine(own, op))
        else:
            total = torch.stack(own).sum(0, dtype=own[0].dtype)
            reduced.append(total.div_(world_size) if op == "AVG" else total)
    for tensor in inputs:
        spoil(tensor)
    for shard, part in zip(shards, reduced, strict=True):
        shard.copy_(part)


def all_reduce(tensors: Sequence[Tensors], op: str) -> None:
    """Makes each tensor the combination of all ranks' tensors in its place; they travel end to end."""
    flat = [
        torch.cat([t.reshape(-1) for t in own]) if len(own) > 1 else own[0].reshape(-1) for own in tensors
    ]
    result = _around_the_ring(flat, op)
    for own in tensors:
        _fill(own, result)


def reduce(tensors: Tensors, op: str, root: int) -> None:
    """Makes the tensor of ``root`` the combination of all."""
    tensors[root].copy_(_around_the_ring(tensors, op).view(tensors[root].shape))


def broadcast(tensors: Sequence[Tensors], root: int) -> None:
    """Makes every tensor that of ``root``."""
    for rank, own in enumerate(tensors):
        for mine, theirs in zip(own, tensors[root], strict=True):
            if rank != root:
                mine.copy_(theirs.reshape(mine.shape))


def all_gather(outputs: Sequence[Sequence[Tensors]], inputs: Sequence[Tensors]) -> None:
    """Makes ``outputs[rank][k][source]`` what ``inputs[source][k]`` is."""
    for lists in outputs:
        for k, pieces in enumerate(lists):
            for piece, source in zip(pieces, inputs, strict=True):
                if piece.data_ptr() != source[k].data_ptr() or not piece.numel():
                    piece.copy_(source[k].reshape(piece.shape))


def reduce_scatter(outputs: Tensors, inputs: Sequence[Tensors], op: str) -> None:
    """Makes ``outputs[rank]`` the combination of all ranks' ``inputs[...][rank]``."""
    flat = [torch.cat([t.reshape(-1) for t in pieces]) for pieces in inputs]
    _fill(outputs, _around_the_ring(flat, op))


def gather(outputs: Sequence[Tensors], inputs: Tensors, root: int) -> None:
    for piece, source in zip(outputs[root], inputs, strict=True):
        piece.copy_(source.reshape(piece.shape))


def scatter(outputs: Tensors, inputs: Sequence[Tensors], root: int) -> None:
    for output, piece in zip(outputs, inputs[root], strict=True):
        output.copy_(piece.reshape(output.shape))


def all_to_all(outputs: Sequence[Tensors], inputs: Sequence[Tensors], label: str = "") -> None:
    """Makes ``outputs[rank][source]`` what ``inputs[source][rank]`` is."""
    for receiver, pieces in enumerate(outputs):
        for sender, piece in enumerate(pieces):
            sent = inputs[sender][receiver]
            if sent.numel() != piece.numel():
                raise OutOfStepError(
                    f"in all_to_all {label!r} rank {sender} sends {sent.numel()} elements to rank {receiver}, which "
                    f"expects {piece.numel()} (ranks within the group)"
                )
    for receiver, pieces in enumerate(outputs):
        for sender, piece in enumerate(pieces):
            piece.copy_(inputs[sender][receiver].reshape(piece.shape))


def of_pairs(function: Callable[..., None], *more: object) -> Callable[[list[Tree]], None]:
    """Calls a function with what each rank brought first, what each brought second, and more."""
    return lambda all_: function([one for one, _ in all_], [other for _, other in all_], *more)


def _fill(tensors: Tensors, flat: Tensor) -> None:
    """Cuts ``flat`` over the tensors; behind each other, or all of it for each."""
    first = 0
    for tensor in tensors:
        tensor.copy_(flat[first : first + tensor.numel()].view(tensor.shape))
        first += tensor.numel()


def spoil(tensor: torch.Tensor) -> None:
    """Writes values that nobody may read: NaN, and the largest of integers."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
