"""Groups of simulated ranks: collectives work directly on the tensors of all ranks; nothing runs in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardkit.backend import Backend, ReduceOp, Sizes, Work, check_members
from shardkit.types import Tree

from ..c10d.group import ORDERED_CHANNELS
from ..diagnosis.stack_report import Call
from ..objects import ObjectsOverBytes
from . import collectives
from .collectives import of_pairs
from .rank_threads import Finish, Meeting, RankThreads


class Line:
    """Shared by the ranks of one group and channel: the collectives that not all have reached."""

    def __init__(self, ranks: Sequence[int], name: str = "main") -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self._meetings: dict[int, Meeting] = {}
        self._pairs: dict[tuple[int, int, int], Line] = {}
        self._named: dict[str, Line] = {}

    def meeting(self, sequence: int) -> Meeting:
        """Returns the one for a rank's call of that number."""
        return self._meetings.setdefault(sequence, Meeting(self.ranks))

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

    def drop(self, sequence: int) -> None:
        self._meetings.pop(sequence, None)


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
            self._line.drop(self._sequence)
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
        brought, finish = ([output.detach().split(parts)], [shard]), of_pairs(collectives.all_gather)
        return self._carry("all_gather_into", output, label, terms, brought, finish, async_op)

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        terms, brought = (op.value, parts), (shard, input)
        finish = of_pairs(collectives.reduce_scatter_into, parts, op.name)
        return self._carry("reduce_scatter_into", input, label, terms, brought, finish, async_op)

    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        pieces = output.detach().split(come), input.detach().split(go)
        finish = of_pairs(collectives.all_to_all, label)
        return self._carry("all_to_all", input, label, (), pieces, finish, async_op)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        def finish(brought: list[Tree]) -> None:
            collectives.all_reduce(brought, op.name)

        terms = op.value, tensor.numel()
        return self._carry("all_reduce", tensor, label, terms, [tensor], finish, async_op)

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        def finish(brought: list[Tree]) -> None:
            collectives.reduce(brought, op.name, dst)
            for rank, other in enumerate(brought):
                if rank != dst:
                    collectives.spoil(other)

        terms = op.value, tensor.numel(), dst
        return self._carry("reduce", tensor, label, terms, tensor, finish, async_op)

    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        def finish(brought: list[Tree]) -> None:
            collectives.broadcast(brought, src)

        terms = tensor.numel(), src
        return self._carry("broadcast", tensor, label, terms, [tensor], finish, async_op)

    def barrier(self, *, label: str = "") -> None:
        self._issue("barrier", 0, label, (), None, lambda _: None)

    def _exchange(self, what: str, label: str, data: bytes) -> list[bytes]:
        return self._issue(what, len(data), label, (), data, list).result()

    def agree(self, what: str) -> None:
        self._issue("agreement", 0, what, (what,), None, lambda _: None)

    def abort(self, why: str = "the rank gave up") -> None:
        self._threads.give_up(self.ranks[self.rank], why)
