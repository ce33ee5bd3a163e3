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

import abc
import contextlib
import copy
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.backend import (
    Backend,
    Group,
    HostRandomStates,
    Pool,
    ReduceOp,
    Sizes,
    Work,
    check_members,
    host_random_states,
    is_group,
    register_rank_provider,
    set_host_random_states,
    size_of,
)
from shardkit.errors import (
    BackendError,
    ConfigurationError,
    OutOfStepError,
    RankFailedError,
    RankLostError,
    ShardkitError,
)
from shardkit.types import Args, ProcessGroup, T, Tree

from ..c10d.group import ORDERED_CHANNELS, ReduceScatterPlan
from ..connections import belongs_here, refusal
from ..diagnosis.stack_report import Call, SourceLine, here, place_of_error
from ..diagnosis.watchdog import OUT_OF_STEP_HINT
from ..eager import Host, ObjectsOverBytes

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


# ------------------------------------------------------------ ranks as threads
# Ranks as threads of this process, of which only one runs at a time.
#
# [Note: the baton] A rank runs until it has to wait for another one. Then the lowest rank that can go on does. So the
# order in which things happen is the same in every run, nothing needs a lock, and when no rank can go on, or one
# that others wait for has finished, it is known at once. They wait for collectives that not all members
# have reached, and for anything else that another rank brings.
Finish = Callable[[list[Tree]], object]  # what is done with all that ranks brought


class Awaited(abc.ABC):
    """Something that a rank can wait for.

    Attributes:
        error: why it can't come any more: an exception's class and message.
        time: when the last of those who bring it came, by the :class:`Clock`.
    """

    error: tuple[type[ShardkitError], str] | None = None
    time = 0.0

    @property
    @abc.abstractmethod
    def over(self) -> bool:
        """Says whether it came to its end, good or bad."""

    def fail(self, what: str) -> None:
        """Notes that nobody will bring it."""
        self.error = OutOfStepError, f"ranks are out of step: {what}. {OUT_OF_STEP_HINT}"

    def release(self) -> bool:
        """Says, where no rank can go on, whether this one may without it."""
        return False


class Condition(Awaited):
    """Something that another rank makes true.

    Args:
        optional: who waits for it goes on when no rank could otherwise.

    Attributes:
        released: it went on so.
    """

    def __init__(self, holds: Callable[[], bool], optional: bool = False) -> None:
        self.released = False
        self._holds, self._optional = holds, optional

    @property
    def over(self) -> bool:
        return self.released or self.error is not None or self._holds()

    def release(self) -> bool:
        self.released = self.released or self._optional
        return self.released


class Meeting(Awaited):
    """One collective, from the first rank that arrives to the last.

    Args:
        ranks: global rank of each member, in group order.

    Attributes:
        done: all have arrived, and the result is there.
        given_up: how often each rank that has arrived had given up before.
        result: what ``finish`` returned on the last rank to arrive.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.result: object = None
        self.done = False
        self.given_up: dict[int, int] = {}
        self._calls: dict[int, Call] = {}  # by global rank
        self._places: dict[int, SourceLine] = {}
        self._terms: dict[int, tuple[object, ...]] = {}
        self._brought: dict[int, Tree] = {}

    @property
    def over(self) -> bool:
        return self.done or self.error is not None

    def missing(self) -> set[int]:
        return set(self.ranks) - self._calls.keys()

    def describe(self, rank: int) -> str:
        """Returns the call of a rank that has arrived, and its line."""
        return f"{self._calls[rank].describe()} at {self._places[rank]}"

    def first(self) -> int:
        return next(iter(self._calls))

    def arrive(
        self,
        rank: int,
        call: Call,
        place: SourceLine,
        terms: tuple[object, ...],
        brought: Tree,
        finish: Finish,
    ) -> None:
        """Notes that ``rank`` is here; the last one does the work for all.

        Args:
            terms: what has to be equal on all ranks.
            brought: handed to ``finish`` as a list in group order.
        """
        self._calls[rank], self._terms[rank], self._places[rank] = call, terms, place
        if self.error is not None:
            return
        other = next((r for r, t in self._terms.items() if t != terms), None)
        if other is not None:
            self.fail(f"{self._beside(other, rank)}; {self._beside(rank, other)}")
            return
        self._brought[rank] = brought
        if self.missing():
            return
        try:
            with torch.no_grad():
                self.result = finish([self._brought[r] for r in self.ranks])
        except OutOfStepError as error:
            self.fail(str(error))
        except Exception as error:  # noqa: BLE001 - it is every member's
            self.error = BackendError, f"{call.describe()} failed: {type(error).__name__}: {error}"
        self.done = self.error is None
        self._brought.clear()

    def _beside(self, rank: int, other: int) -> str:
        """Returns a rank's call, and what of its terms differs from another's without being in that sentence."""
        said = f"rank {rank} is in {self.describe(rank)}"
        pairs = zip_longest(self._terms[rank], self._terms[other], fillvalue="")
        differing = [str(mine) for mine, theirs in pairs if mine != theirs and str(mine) not in said]
        return f"{said}, with {', '.join(differing)}" if differing else said

    def fail(self, what: str) -> None:
        super().fail(what)
        self._brought.clear()


class Clock:
    """Tells what time it would be on each rank if each had a processor of its own and messages took no time.

    A rank's time passes while its thread computes and sleeps; who waits goes on at the time of those it waits for.

    Attributes:
        seconds: of each rank, since it began.
        waited: how many of these for other ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.seconds, self.waited = [0.0] * world_size, [0.0] * world_size
        self._used = [0.0] * world_size  # what the rank's thread had computed when it was asked last

    def now(self, rank: int, slept: float = 0.0, is_for_all: bool = False) -> float:
        """Returns the time of the rank whose thread calls; what it has done since the last call may be for all."""
        used = time.thread_time()
        self.seconds[rank] += slept + (0.0 if is_for_all else used - self._used[rank])
        self._used[rank] = used
        return self.seconds[rank]


_LAST_WORDS = 2.0  # seconds that ranks get to unwind after a timeout


# a rank's call, its line, the bytes of the whole tensor, and how many ranks take part
Issued = Callable[[int, Call, SourceLine, int, int], None]


class Hang(NamedTuple):
    """The first thing that went wrong.

    Attributes:
        what: in words, with the lines of those concerned.
        stands: what each rank was doing then.
    """

    what: str
    stands: dict[int, str]


def in_words(stands: Mapping[int, str]) -> str:
    """Says what ranks do; those that do the same together."""
    return "; ".join(said_of(ranks, text) for text, ranks in ranks_by(stands).items())


def ranks_by(values: Mapping[int, Tree]) -> dict[Tree, list[int]]:
    """Sorts ranks by what they have."""
    found: dict[Tree, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def said_of(ranks: list[int], text: str) -> str:
    """Makes ``ranks 1, 2 are in ...`` of ``is in ...``."""
    verb, _, rest = text.partition(" ")
    if len(ranks) > 1:
        verb = {"is": "are", "has": "have", "runs,": "run,"}.get(verb, verb)
    return f"{named(ranks)} {verb} {rest}"


def named(ranks: list[int]) -> str:
    """Writes ``rank 3``, ``ranks 1, 2``, ``ranks 1 to 63``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


class RankThreads:
    """``world_size`` ranks; see [Note: the baton].

    Args:
        enter: called in each rank's thread before its function.
        issued: told of each call.
        patient: when a rank fails the others go on until they can't, which shows where each would wait for it.

    Attributes:
        hang: why ranks could not go on.
        is_finishing: what runs now is done for all ranks together.
        clock: of the ranks.
    """

    def __init__(
        self,
        world_size: int,
        enter: Callable[[int], None] = lambda rank: None,
        issued: Issued | None = None,
        patient: bool = False,
    ) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.hang: Hang | None = None
        self.clock = Clock(world_size)
        self.is_finishing = False
        self._enter, self._issued, self._patient = enter, issued, patient
        self._gates = [threading.Semaphore(0) for _ in range(world_size)]
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._turns, self._away, self._is_idle = threading.Lock(), set[int](), False
        self._waits: dict[int, Awaited] = {}
        self._last: dict[int, tuple[Call, SourceLine]] = {}  # what each rank has issued last
        self._open: dict[int, Meeting] = {}  # by id: those that not all members have reached
        self._finished: set[int] = set()
        self._failure: tuple[int, BaseException, str] | None = None
        self._given_up = [0] * world_size  # how often
        self._errors: dict[int, str] = {}  # how ranks failed
        self._doomed = ""  # why ranks will have to stop
        self._ended = ""  # why they have to, now
        self._all_done = threading.Event()
        self._is_left_behind = False
        belongs_here(self)

    # ------------------------------------------------------------ from the thread that starts them
    def run(self, fn: Callable[..., T], args: Args, timeout: float | None) -> list[T]:
        """Calls ``fn(rank, *args)`` on every rank, each with a copy of ``args``; returns results in rank order."""
        results: dict[int, T] = {}
        before = host_random_states()
        self._threads = [
            threading.Thread(
                target=self._main,
                args=(rank, fn, copy.deepcopy(args), before, results),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._pass_on()
            if not self._all_done.wait(timeout):
                raise self._timed_out(timeout)
            for thread in self._threads:
                thread.join()
        except BaseException:
            self._end("the job was ended")
            for thread in self._threads:
                thread.join(_LAST_WORDS / self.world_size)
            raise
        finally:
            set_host_random_states(before)
        if self._failure is not None:
            rank, error, text = self._failure
            raise RankFailedError(rank, type(error).__name__, text) from error
        return [results[rank] for rank in range(self.world_size)]

    def _main(
        self,
        rank: int,
        fn: Callable[..., T],
        args: Args,
        random_states: HostRandomStates,
        results: dict[int, T],
    ) -> None:
        self._gates[rank].acquire()
        try:
            if self._ended:
                return
            set_host_random_states(random_states)
            self._enter(rank)
            results[rank] = fn(rank, *args)
        except BaseException as error:  # noqa: BLE001 - reported by run
            self._note_failure(rank, error)
        finally:
            self._finish(rank)

    def _note_failure(self, rank: int, error: BaseException) -> None:
        what = f"failed with {type(error).__name__}: {error}"
        self._errors[rank] = f"{what} at {place_of_error(error)}"
        if self._failure is not None or self._ended:
            return
        self._failure = rank, error, traceback.format_exc()
        self._note_hang(f"rank {rank} {self._errors[rank]}", {rank: self._errors[rank]})
        self._doomed = self._doomed or f"rank {rank} {what}"
        if not self._patient or isinstance(error, OutOfStepError | RankLostError):
            self._ended = self._ended or self._doomed

    def _finish(self, rank: int) -> None:
        self._finished.add(rank)
        if not self._doomed:
            self._fail_without(rank, self._at_end(rank))
        if len(self._finished) == self.world_size:
            self._all_done.set()
        else:
            self._pass_on()

    def _end(self, why: str) -> None:
        """Lets every rank stop when it communicates next."""
        self._ended = self._ended or why
        for gate in self._gates:
            gate.release()

    def _timed_out(self, timeout: float | None) -> RankFailedError:
        frames = sys._current_frames()
        text = f"no answer after {timeout} s; rank {self._running} was running"
        self._note_hang(text)
        for rank, thread in enumerate(self._threads):
            stack = frames.get(thread.ident or 0)
            if rank not in self._finished and stack is not None:
                text += f"\n--- rank {rank}\n{''.join(traceback.format_stack(stack))}"
        return RankFailedError(self._running, "TimeoutError", text)

    @property
    def running(self) -> tuple[int, threading.Thread] | None:
        """Tells whose turn it is; None before they start."""
        return (self._running, self._threads[self._running]) if self._threads else None

    # ------------------------------------------------------------ from a rank
    @property
    def left(self) -> set[int]:
        return set(range(self.world_size)) - self._finished

    def arrive(
        self,
        rank: int,
        meeting: Meeting,
        call: Call,
        terms: tuple[object, ...],
        brought: Tree,
        finish: Finish,
        size: int = 0,
    ) -> None:
        """Issues the part of ``rank`` in a collective over ``size`` bytes."""
        if self._threads and threading.current_thread() is not self._threads[rank]:
            raise ConfigurationError(
                f"rank {rank}: {call.describe()} was called from {threading.current_thread().name!r}; only the thread "
                "that runs a simulated rank can communicate"
            )
        self._check_alive(rank, call)
        place = here()
        self._last[rank] = call, place
        if self._issued is not None:
            self._issued(rank, call, place, size, len(meeting.ranks))
        meeting.given_up[rank] = self._given_up[rank]
        meeting.time = max(meeting.time, self.clock.now(rank))
        self.is_finishing = True
        meeting.arrive(rank, call, place, terms, brought, finish)
        self.is_finishing = False
        self.clock.now(rank, is_for_all=True)
        missing = meeting.missing()
        if not missing:
            self._open.pop(id(meeting), None)
        else:
            self._open[id(meeting)] = meeting
            gone = sorted(missing & self._finished)
            if gone and meeting.error is None and not self._doomed:
                meeting.fail(
                    f"rank {rank} is in {meeting.describe(rank)}, but rank {gone[0]} {self._at_end(gone[0])}"
                )
        if meeting.error is not None:
            self._note_hang(meeting.error[1], {rank: f"is in {meeting.describe(rank)}"})

    def wait(self, rank: int, meeting: Awaited, call: Call) -> None:
        """Returns when all have arrived."""
        if not meeting.over:
            self._check_alive(rank, call)
            self._waits[rank] = meeting
            if rank not in self._last or self._last[rank][0] != call:
                self._last[rank] = call, here()
            states = host_random_states()
            self._pass_on()
            self._gates[rank].acquire()
            set_host_random_states(states)
            self._waits.pop(rank, None)
        if meeting.over and meeting.error is None:
            late = max(0.0, meeting.time - self.clock.now(rank))  # the rank goes on no earlier
            self.clock.seconds[rank] += late
            self.clock.waited[rank] += late
            return
        self._check_alive(rank, call)
        if meeting.error is not None:
            kind, text = meeting.error
            raise kind(text)

    def give_up(self, rank: int, why: str) -> None:
        """Lets nobody wait for ``rank`` in what is in flight, but for ranks that gave up as often and have gone on."""
        self._given_up[rank] += 1
        times = self._given_up[rank]
        self._fail_without(rank, f"gave up: {why}", lambda m: any(n < times for n in m.given_up.values()))

    def stands(self) -> dict[int, str]:
        """Returns what each rank is doing now, with its line."""
        return {rank: self._stand(rank) for rank in range(self.world_size)}

    def _stand(self, rank: int) -> str:
        if rank in self._errors:
            return self._errors[rank]
        if rank in self._finished:
            return self._at_end(rank)
        if rank not in self._last:
            return "has not communicated"
        call, place = self._last[rank]
        word = "is in" if rank in self._waits else "runs, after"
        return f"{word} {call.describe()} at {place}"

    def _at_end(self, rank: int) -> str:
        last = self._last.get(rank)
        return "has finished" + (
            "" if last is None else f" (its last call: {last[0].describe()} at {last[1]})"
        )

    def _note_hang(self, what: str, known: Mapping[int, str] | None = None) -> None:
        if self.hang is None:
            self.hang = Hang(what, {**self.stands(), **(known or {})})

    def _fail_without(self, rank: int, why: str, which: Callable[[Meeting], bool] = lambda _: True) -> None:
        for meeting in self._open.values():
            if rank in meeting.missing() and meeting.error is None and which(meeting):
                first = meeting.first()
                meeting.fail(f"rank {first} is in {meeting.describe(first)}, but rank {rank} {why}")
                self._note_hang(f"rank {first} is in {meeting.describe(first)}, but rank {rank} {why}")

    def left_behind(self) -> None:
        """Notes that this process is a fork; a single rank needs no other thread."""
        self._is_left_behind = self.world_size > 1

    def _check_alive(self, rank: int, call: Call) -> None:
        if self._is_left_behind:
            raise refusal(rank)
        if self._ended:
            raise RankLostError(f"rank {rank} can't go on with {call.describe()}: {self._ended}")

    @contextlib.contextmanager
    def away(self, rank: int) -> Iterator[None]:
        """Lets others run while ``rank``, whose thread calls this, waits for something that is no rank's word."""
        states = host_random_states()
        with self._turns:
            self._away.add(rank)
        self._pass_on()
        try:
            yield
        finally:
            with self._turns:
                self._away.discard(rank)
                is_my_turn, self._is_idle = self._is_idle, False
                if is_my_turn:
                    self._running = rank
            if not is_my_turn:
                self._gates[rank].acquire()
            set_host_random_states(states)

    def is_mine(self, rank: int) -> bool:
        """Says whether the calling thread is the one that runs this rank."""
        return bool(self._threads) and threading.current_thread() is self._threads[rank]

    def _pass_on(self) -> None:
        """Lets the lowest rank run that can (the caller waits for its own gate next, or ends)."""
        with self._turns:
            left = [r for r in range(self.world_size) if r not in self._finished and r not in self._away]
            ready = [r for r in left if self._ended or r not in self._waits or self._waits[r].over]
            if not ready and self._away:
                self._is_idle = True  # until one of them comes back
                return
            self._hand_over(left, ready)

    def _hand_over(self, left: list[int], ready: list[int]) -> None:
        if not ready:
            ready = [r for r in left if self._waits[r].release()]
        if not ready and self._doomed:
            self._ended, ready = self._ended or self._doomed, left
            if self.hang is not None:
                self.hang = Hang(self.hang.what, self.stands())
        if not ready:
            where = in_words({r: self._stand(r) for r in left})
            self._note_hang(where)
            for awaited in list(self._waits.values()):
                awaited.fail(where)
            ready = left
        self._running = ready[0]
        self._gates[self._running].release()
