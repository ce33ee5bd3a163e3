"""Groups on top of torch.distributed: what gloo and NCCL share.

The C++ process group is called directly: ``torch.distributed``'s functions spend ten and more Python calls on each
collective. Names of that class that differ between torch versions are avoided.

[Note: call order] Whatever arrives is given to whoever waits in the same place of a channel. If ranks are in different
calls there, gloo takes bytes of one for the other's, or ends the process where there are more than were expected. Where
calls have one order on all ranks (gathers: each is waited for before the next can matter), a channel keeps that order.
Having issued the same calls so far, all ranks predict the same next one: what followed the last time. A call that was
predicted is issued at once. Any other is issued when all ranks have said, in the store, that it is their next one too.
So ranks that part wait for each other before a wrong byte is sent: one in the predicted call and one for an agreement,
or each for another agreement, which the watch finds. A step that is like the one before it costs a comparison a call.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import pickle
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.backend import (
    DONE,
    Backend,
    Group,
    Pool,
    ReduceOp,
    Sizes,
    Work,
    check_member,
    check_members,
    size_of,
)
from shardkit.errors import ConfigurationError, OutOfStepError, RankLostError, ShardkitError
from shardkit.types import ProcessGroup, T

from .. import connections
from ..diagnosis.stack_report import AGREEMENT, Call, CallFacts, uncounted
from ..diagnosis.watchdog import STORE_THREAD, NoAnswer, Watch
from ..eager import GroupInName, ImaginedGroup, OneRank, RanksInName
from ..processes import RankPool

# ------------------------------------------------------------ tensors on their way
# In the form in which a library takes them, and what a rank does by itself around what gloo carries.
# Legend: W world size, S one rank's shard numel.
NUMBERS = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.int8,
    }
)
"""Dtypes that every library knows; everything else (int16, unsigned 16 to 64 bits, float8, complex numbers) travels as
bytes."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Views complex numbers as pairs of real ones, [2 * numel], in the same memory: no library knows them."""
    return torch.view_as_real(tensor.detach()).view(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views a contiguous tensor as its bytes, [numel * itemsize]."""
    return tensor.detach().view(-1).view(torch.uint8)


# Elements that would arrive at once in a reduce-scatter; above, ranks exchange in rounds.
ROUNDS_ABOVE = 2**18


class ReduceScatterPlan:
    """Says how the parts of a reduce-scatter travel, for one set of sizes.

    Attributes:
        in_rounds: whether what arrives is too much to hold at once.
        partners: in each round, the rank to send to and the one to receive from.
    """

    __slots__ = ("in_rounds", "largest", "numel", "own", "partners", "sizes")

    def __init__(self, rank: int, sizes: tuple[int, ...]) -> None:
        self.own = sizes[rank]
        self.numel = sum(sizes)
        self.sizes = list(sizes)
        world_size = len(sizes)
        self.largest = max(sizes)
        self.in_rounds = world_size > 1 and world_size * self.largest > ROUNDS_ABOVE
        self.partners = [((rank + d) % world_size, (rank - d) % world_size) for d in range(1, world_size)]


plan_of = functools.lru_cache(maxsize=4096)(ReduceScatterPlan)
_OVER_ROWS = {ReduceOp.MAX: torch.amax, ReduceOp.MIN: torch.amin}
_OF_TWO = {ReduceOp.MAX: torch.maximum, ReduceOp.MIN: torch.minimum}


def accumulate(
    shard: torch.Tensor, local: torch.Tensor | None, received: torch.Tensor, op: ReduceOp, world_size: int
) -> None:
    """Adds up what arrived, in rank order.

    Args:
        shard: the result, [S].
        local: this rank's own part where it did not travel, [S].
        received: the parts that arrived, [W * S] or, with ``local``, [S]; this may be ``shard``.
    """
    if not shard.numel():
        return
    if local is None:
        _OVER_ROWS.get(op, torch.sum)(received.view(world_size, shard.numel()), 0, out=shard)
    else:
        _OF_TWO.get(op, torch.add)(local, received, out=shard)
    if op is ReduceOp.AVG:
        shard.div_(world_size)


def finish(tensor: torch.Tensor, wire: torch.Tensor, divisor: int) -> None:
    """Divides an average, and copies back where the tensor could not travel as it is."""
    with torch.no_grad():
        if divisor > 1:
            wire.div_(divisor)
        if wire is not tensor:
            tensor.copy_(wire)


# ------------------------------------------------------------ the order of calls
Key = tuple[str, int, str]  # operation, numel, label

ORDERED_CHANNELS = ("parameters",)
_LONGEST = 4096  # calls that are remembered
_CONTEXT = 32  # calls that tell which of several earlier places this one is like


class CallOrder:
    """Predicts calls from earlier ones; deterministic, so that ranks that have issued the same predict the same.

    Attributes:
        history: the calls so far, and
        next: the place in it of the call that is predicted; the caller moves it on, and appends, when it comes true.
    """

    def __init__(self) -> None:
        self.history: list[Key] = []
        self.next = 0

    def expects(self, key: Key) -> bool:
        """Says whether this call was predicted; then it is noted."""
        history, at = self.history, self.next
        if at < len(history) and history[at] == key:
            history.append(history[at])
            self.next = at + 1
            if len(history) > 2 * _LONGEST:
                self._forget()
            return True
        return False

    def turn(self, key: Key) -> None:
        """Notes a call that was not predicted."""
        self.history.append(key)
        if len(self.history) > 2 * _LONGEST:
            self._forget()
        self.next = self._place_like_this()

    def _forget(self) -> None:
        del self.history[:_LONGEST]
        self.next = max(0, self.next - _LONGEST)

    def _place_like_this(self) -> int:
        """Finds what follows the earlier place that the most calls lead to as they led here; the latest of those."""
        history = self.history
        last, best, found = len(history) - 1, 0, len(history)
        for j in range(last - 1, -1, -1):
            if history[j] != history[last]:
                continue
            alike = 1
            while alike < _CONTEXT and alike <= j and history[j - alike] == history[last - alike]:
                alike += 1
            if alike > best:
                best, found = alike, j + 1
                if alike == _CONTEXT:
                    break
        return found


_LATE = 1.0  # seconds that a look may take
_PAUSES = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # seconds between looks


class Agreement:
    """All ranks say that they are about to do the same; has the form of a work of torch.distributed.

    Args:
        channel: whose calls it is about.
        number: counts the channel's agreements.
        key: what this rank is about to do.
    """

    def __init__(
        self, store: Store, channel: str, number: int, key: Key, world_size: int, timeout: timedelta
    ) -> None:
        self._store = store
        self._place = f"shardkit/agreement/{channel}"
        self._done = f"{self._place}/{number}/all"
        self._completed = False
        STORE_THREAD.ask(lambda: self._say(number, key, world_size), timeout.total_seconds(), patient=True)

    def _say(self, number: int, key: Key, world_size: int) -> None:
        store = self._store
        mine = f"{self._place}/{number}/{zlib.crc32(repr(key).encode())}"
        if store.add(mine, 1) == world_size:
            store.set(self._done, "")
            if number > 1:  # all have come here, so nobody looks at those before any more
                store.delete_key(f"{self._place}/{number - 1}/all")
            store.delete_key(mine)

    def is_completed(self) -> bool:
        """Says whether a wait has seen it."""
        return self._completed

    def wait(self, timeout: timedelta = timedelta()) -> None:
        """Raises RuntimeError when the time is over."""
        until, looks = time.monotonic() + timeout.total_seconds(), 0
        while True:
            # look by look: ranks may be threads, of which one could say nothing while another one's look goes on
            with contextlib.suppress(NoAnswer):
                self._completed = STORE_THREAD.ask(
                    lambda: self._store.check([self._done]), _LATE, patient=True
                )
            if self._completed:
                return
            if time.monotonic() > until:
                raise RuntimeError("the agreement timed out")
            time.sleep(_PAUSES[min(looks // 8, len(_PAUSES) - 1)])
            looks += 1


# ------------------------------------------------------------ works and groups
SLICE = timedelta(seconds=1)  # a wait that is no longer costs nothing
_LOOK = 0.25  # of the time waited, and at most a second, passes between looks afterwards
_WARN_SECONDS = 30.0
_TOKEN = torch.zeros(1, device="cpu")
_PROBE_TAG = 0x5AFD
_LOST = (
    "Connection closed",
    "Connection reset",
    "Connection timed out",
    "Broken pipe",
    "Socket closed",
    "closed by peer",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
    "Timed out waiting",
    "pair closure",  # of gloo: an earlier wait was ended
    "gloo/transport/",
    "ncclRemoteError",
)


OPS = {
    ReduceOp.SUM: dist.ReduceOp(dist.ReduceOp.SUM),
    ReduceOp.AVG: dist.ReduceOp(dist.ReduceOp.SUM),  # gloo has no AVG: divided afterwards
    ReduceOp.MAX: dist.ReduceOp(dist.ReduceOp.MAX),
    ReduceOp.MIN: dist.ReduceOp(dist.ReduceOp.MIN),
}
PIECE = 2**20  # most elements that a rank receives in a round
MAIN = "main"  # the name of what is no channel
P = ParamSpec("P")
After: TypeAlias = "Callable[[], None] | None"  # what is left to do on this rank


class TorchWork(Protocol):
    """A work of torch's, or an agreement."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: timedelta = ..., /) -> object: ...


class C10dWork(Work):
    """Collectives in flight that were issued as one call, and what is left to do on this rank afterwards."""

    __slots__ = ("_after", "_call", "_group", "_works")

    def __init__(self, group: C10dGroup, works: list[TorchWork], call: CallFacts, after: After) -> None:
        self._group, self._works, self._call, self._after = group, works, call, after

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait(SLICE)
            except RuntimeError as error:
                self._group.wait_on(work, error, Call(*self._call))
        self._works = []
        after, self._after = self._after, None
        if after is not None:
            after()


# ------------------------------------------------------------ objects between ranks, as tensors of bytes
def announce(group: C10dGroup, obj: object, sends: bool, label: str) -> tuple[bytearray, list[int]]:
    """Returns the pickled object, and the number of bytes on every rank."""
    problem: Exception | None = None
    data = bytearray()
    if sends:
        try:
            data = bytearray(pickle.dumps(obj))
        except Exception as error:  # noqa: BLE001 - whatever __reduce__ of the user's object raises
            problem = error
    counts = sizes_of(group, len(data) if problem is None else -1, label)
    if min(counts) < 0:
        ranks = [group.ranks[r] for r, count in enumerate(counts) if count < 0]
        what = f" ({type(obj).__name__} here: {problem})" if problem is not None else ""
        raise ConfigurationError(
            f"objects of ranks {ranks} can't be pickled{what}; label {label!r}"
        ) from problem
    return data, counts


def sizes_of(group: C10dGroup, size: int, label: str) -> list[int]:
    sizes = torch.zeros(group.world_size, dtype=torch.int64, device=group.device)
    own = sizes[group.rank : group.rank + 1]
    own.fill_(size)
    group.all_gather_into(sizes, own, label=label)
    return sizes.tolist()  # type: ignore[no-any-return]


def as_tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else _TOKEN.new_empty(0, dtype=torch.uint8)


def _buffer(group: C10dGroup, numel: int) -> tuple[bytearray, torch.Tensor]:
    buffer = bytearray(numel)
    if numel and group.device.type == "cpu":
        return buffer, torch.frombuffer(buffer, dtype=torch.uint8)
    return buffer, torch.empty(numel, dtype=torch.uint8, device=group.device)


def _parts(buffer: bytearray, received: torch.Tensor, sizes: Sequence[int]) -> list[memoryview]:
    if received.device.type != "cpu":
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(received)
    view, start, parts = memoryview(buffer), 0, []
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts


class C10dGroup(Group):
    """Ranks of a torch.distributed process group.

    Args:
        process_group: torch's object.
        ranks: global rank of each member.
        parent: the group that this is a channel or a sub-group of.
    """

    ends_at_exit = True
    _ops = OPS
    _dtypes = NUMBERS  # that it can carry
    _work: type[C10dWork] = C10dWork

    def __init__(
        self,
        backend: Backend,
        process_group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        name: str = MAIN,
        parent: C10dGroup | None = None,
    ) -> None:
        self.backend = backend
        self.process_group: Any = process_group
        self.of_torch = weakref.ref(process_group)  # itself, of which process_group may be a proxy
        self.ranks = tuple(ranks)
        self.rank = rank
        self.world_size = len(self.ranks)
        self.exchanges = self.world_size == 2 and self._work is C10dWork  # sums are formed on the host
        self._name = name
        self._sequence = 0
        self._channels: dict[str, C10dGroup] = {}
        self._meetings = 0
        self._subgroups: weakref.WeakSet[C10dGroup] = weakref.WeakSet()
        connections.register(process_group, self if self.ends_at_exit else None)
        connections.belongs_here(self)
        if parent is None:  # the user's, which lasts as long as torch has it
            self._timeout = connections.timeout_of(process_group, backend.device_type)
            self.process_group = weakref.proxy(process_group)
        else:
            self._timeout = parent._timeout
        self._watch: Watch = self._new_watch() if parent is None or name == MAIN else parent._watch
        self._order = CallOrder() if name in ORDERED_CHANNELS else None
        self._root: C10dGroup = self if parent is None else parent._root  # all its ranks are connected
        self._agreements = 0
        self._probes: list[TorchWork] = []  # works that may never end

    @functools.cached_property
    def device(self) -> torch.device:
        """Has what ranks tell each other in bytes."""
        return self.backend.device()

    def _new_watch(self) -> Watch:
        return Watch(self._store(), self.rank, self.world_size, "watch", self.ranks)

    # ------------------------------------------------------------ groups
    def channel(self, name: str) -> C10dGroup:
        """Returns a group of the same ranks over connections of its own: calls in different channels never meet."""
        if name not in self._channels:
            pg: Any = self._meet(f"channel {name!r}", f"channel/{name}", list(range(self.world_size)))
            self._channels[name] = type(self)(self.backend, pg, self.ranks, self.rank, name, self)
        return self._channels[name]

    def channels(self) -> list[C10dGroup]:
        return list(self._channels.values())

    def new_group(self, ranks: Sequence[int]) -> C10dGroup | None:
        """Returns a sub-group of these group ranks; None on the others."""
        members = check_members(self, ranks)
        global_ranks = [self.ranks[r] for r in members]
        pg = self._meet(f"a group of ranks {members}", f"group/{'_'.join(map(str, members))}", members)
        if pg is None:
            return None
        group = type(self)(self.backend, pg, global_ranks, members.index(self.rank), parent=self)
        self._subgroups.add(group)
        return group

    def _meet(self, what: str, name: str, members: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns a process group of these group ranks, known to them alone; None on the others."""
        self._meetings += 1  # for the same members may meet again
        self.barrier(label=f"connecting {what}")  # a rank that does not come shows here
        if self.rank not in members:
            return None
        name = f"{name}/{self._meetings}"
        return self._connect(PrefixStore(f"shardkit/{name}", self._store()), name, members)

    def _store(self) -> Store:
        """Returns the process group's store, in which the group of another backend over these ranks writes, too."""
        return PrefixStore(self.backend.name, self.process_group.get_group_store())

    def _connect(self, store: Store, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """Returns a process group of the ranks that call this."""
        return connections.connect_gloo(store, members.index(self.rank), len(members), self._timeout)

    def close(self) -> None:
        """Ends the connections of all channels and sub-groups; from now on every call raises a LifecycleError.

        Called when torch destroys the process group that all of them were made from.
        """
        for group in (*self._channels.values(), *self._subgroups):
            group.close()
        self._channels.clear()
        self._watch.close()
        self.process_group = connections.DESTROYED

    def left_behind(self) -> None:
        """Refuses all calls from now on: this process is a fork."""
        rank = self.ranks[self.rank]
        self.process_group = connections.Refusing(lambda: connections.refusal(rank))

    # ------------------------------------------------------------ agreements
    def agree(self, what: str) -> None:
        if self._order is not None:
            self._follow("agreement", 0, what)
        else:
            self._agree(("agreement", 0, what))

    def _agree(self, key: tuple[str, int, str]) -> None:
        """Returns when all ranks have come here with the same ``key``."""
        self._agreements += 1
        name = f"{self._name} {AGREEMENT}"
        call = (name, self._agreements, *key)
        self._watch.issued[name] = self._agreements
        self._watch.recent.append(call)
        try:
            agreement = self._start(
                Agreement, self._store(), self._name, self._agreements, key, self.world_size, self._timeout
            )
        except NoAnswer:
            self._give_up(Call(*call))
        C10dWork(self, [agreement], call, None).wait()

    def _follow(self, operation: str, numel: int, label: str) -> None:
        """Notes that a call is about to be issued, in a channel that may keep an order; see [Note: call order]."""
        if self._order is not None and not self._order.expects(key := (operation, numel, label)):
            self._turn(self._order, key)

    def _turn(self, order: CallOrder, key: Key) -> None:
        """Orders a call that this rank's order of calls has not predicted; says what it has, if ranks part here."""
        operation, numel, label = key
        for _, _, expected in order.history[order.next : order.next + 1]:
            label += f", where {expected!r} came the last time"
        self._agree((operation, numel, label))
        order.turn(key)

    # ------------------------------------------------------------ bookkeeping of calls
    def _issue(
        self,
        works: list[TorchWork],
        operation: str,
        numel: int,
        label: str,
        async_op: bool,
        after: After = None,
    ) -> Work:
        self._sequence += 1
        call = (self._name, self._sequence, operation, numel, label)
        self._watch.issued[self._name] = self._sequence
        self._watch.recent.append(call)
        work = self._work(self, works, call, after)
        if not async_op:
            work.wait()
        return work

    def abort(self, why: str = "the rank gave up") -> None:
        """Lets ranks that wait for this one hear why it has left, unless it goes on to issue something."""
        self._watch.give_up(why)

    # ------------------------------------------------------------ collectives
    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        if output.requires_grad or shard.requires_grad:
            output, shard = output.detach(), shard.detach()
        before = sum(parts[: self.rank])
        if output.data_ptr() + before * output.element_size() != shard.data_ptr():
            output[before : before + shard.numel()].copy_(shard)
        return self._all_gather_others(output, shard, parts, async_op, label)

    def _all_gather_others(
        self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str
    ) -> Work:
        """Has each rank broadcast its shard to its slice of ``output``: nothing is copied, no buffer is needed.

        Two ranks exchange theirs, which costs gloo half of what two broadcasts do.
        """
        pieces = [*torch.split_with_sizes(output, parts)]
        pieces[self.rank] = shard
        if self._order is not None and not self._order.expects(  # here, for it would cost a call
            key := ("all_gather_into", output.numel(), label)
        ):
            self._turn(self._order, key)
        if output.dtype not in self._dtypes:
            pieces = list(map(as_bytes, pieces))
        group = self.process_group
        try:
            if self.world_size == 2 and 0 not in parts:
                other = 1 - self.rank
                send, receive = [0, 0], [0, 0]
                send[other], receive[other] = pieces[self.rank].numel(), pieces[other].numel()
                works = [group.alltoall_base(pieces[other], pieces[self.rank], receive, send)]
            elif 0 in parts:
                works = [group.broadcast(piece, r) for r, piece in enumerate(pieces) if parts[r]]
            else:  # without a call of Python's for each
                works = list(map(group.broadcast, pieces, range(self.world_size)))
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "all_gather_into", output.numel(), label))
        return self._issue(works, "all_gather_into", output.numel(), label, async_op)

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        """Sends each rank its part and adds up locally: half the bytes of gloo's own reduce-scatter."""
        if input.is_complex():
            doubled = [2 * n for n in parts]
            return self._reduce_scatter(as_real(shard), as_real(input), doubled, op, async_op, label)
        if shard.requires_grad or input.requires_grad:
            shard, input = shard.detach(), input.detach()
        # of two ranks the own part stays where it is, and the other's is added to where it arrives
        if self.world_size == 2:
            pieces = torch.split_with_sizes(input, parts)
            after = functools.partial(accumulate, shard, pieces[self.rank], shard, op, 2)
            return self.exchange(shard, pieces[1 - self.rank], after=after, async_op=async_op, label=label)
        plan = plan_of(self.rank, tuple(parts))
        if plan.in_rounds:
            return self._reduce_scatter_in_rounds(shard, input, plan, op, async_op, label)
        # the own part is copied, so that the input need not be taken apart
        received, come = input.new_empty(plan.own * self.world_size), [plan.own] * self.world_size
        work = self._start(self.process_group.alltoall_base, received, input, come, plan.sizes)
        after = functools.partial(accumulate, shard, None, received, op, self.world_size)
        return self._issue([work], "reduce_scatter_into", plan.numel, label, async_op, after)

    def exchange(
        self, output: Tensor, input: Tensor, *, after: After = None, async_op: bool = False, label: str = ""
    ) -> Work:
        if output.is_complex():
            output, input = as_real(output), as_real(input)
        send, receive, numel = [0, 0], [0, 0], output.numel() + input.numel()
        send[1 - self.rank], receive[1 - self.rank] = input.numel(), output.numel()
        try:
            work = self.process_group.alltoall_base(output, input, receive, send)
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "reduce_scatter_into", numel, label))
        return self._issue([work], "reduce_scatter_into", numel, label, async_op, after)

    def _reduce_scatter_in_rounds(
        self, shard: Tensor, input: Tensor, plan: ReduceScatterPlan, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        """Meets one partner after the other, in pieces, so that little memory holds what has just arrived."""
        parts = torch.split_with_sizes(input, plan.sizes)
        own = parts[self.rank]
        received = own.new_empty(min(plan.own, PIECE))
        part_op = ReduceOp.SUM if op is ReduceOp.AVG else op
        for first in range(0, plan.largest, PIECE):
            local, result, arrived = own, shard, received
            if plan.largest > PIECE:
                local, result = own[first : first + PIECE], shard[first : first + PIECE]
                arrived = received[: local.numel()]
            for to, source in plan.partners:
                sent = parts[to] if plan.largest <= PIECE else parts[to][first : first + PIECE]
                send, receive = [0] * self.world_size, [0] * self.world_size
                send[to], receive[source] = sent.numel(), arrived.numel()
                work = self._start(self.process_group.alltoall_base, arrived, sent, receive, send)
                is_last_partner = source == plan.partners[-1][1]
                divisor = self.world_size if is_last_partner else 2
                reduction = op if is_last_partner else part_op
                after = functools.partial(accumulate, result, local, arrived, reduction, divisor)
                is_last = is_last_partner and first + PIECE >= plan.largest
                done = self._issue(
                    [work], "reduce_scatter_into", plan.numel, label, async_op and is_last, after
                )
                local = result
        return done

    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        numel = input.numel()
        if input.dtype not in self._dtypes:
            size = input.element_size()
            come, go = [n * size for n in come], [n * size for n in go]
            output, input = as_bytes(output), as_bytes(input)
        work = self._start(self.process_group.alltoall_base, output, input, come, go)
        return self._issue([work], "all_to_all", numel, label, async_op)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        if not tensor.numel():
            return DONE
        wire, sent = self._to_sum("all_reduce", tensor)
        self._follow("all_reduce", tensor.numel(), label)
        options = dist.AllreduceOptions()
        options.reduceOp = self._ops[op]
        work = self._start(self.process_group.allreduce, [sent], options)
        after = self._back(tensor, wire, op)
        return self._issue([work], "all_reduce", tensor.numel(), label, async_op, after)

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        if not tensor.numel():
            return DONE
        wire, sent = self._to_sum("reduce", tensor)
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = self._ops[op], dst
        work = self._start(self.process_group.reduce, [sent], options)
        after = self._back(tensor, wire, op)
        return self._issue([work], f"reduce(dst={dst})", tensor.numel(), label, async_op, after)

    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        if not tensor.numel():
            return DONE
        wire = tensor.contiguous()
        sent = wire if wire.dtype in self._dtypes else as_bytes(wire)
        work = self._start(self.process_group.broadcast, sent, src)
        after = self._back(tensor, wire)
        return self._issue([work], f"broadcast(src={src})", tensor.numel(), label, async_op, after)

    def _to_sum(self, operation: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tensor in one piece, and as numbers that the library adds up."""
        wire = tensor.contiguous()
        sent = as_real(wire) if wire.is_complex() else wire
        self._check_sum(operation, sent)
        return wire, sent

    def _check_sum(self, operation: str, tensor: Tensor) -> None:
        """Raises for numbers that the library can't add up."""

    def _back(self, tensor: Tensor, wire: Tensor, op: ReduceOp = ReduceOp.SUM) -> After:
        """Returns what is left to do for means, and for tensors that could not travel as they are."""
        divisor = self.world_size if op is ReduceOp.AVG and self._ops is OPS else 1
        return None if wire is tensor and divisor == 1 else functools.partial(finish, tensor, wire, divisor)

    def barrier(self, *, label: str = "") -> None:
        self._issue([self._start(self.process_group.barrier)], "barrier", 0, label, False)

    # ------------------------------------------------------------ a wait that lasts
    def wait_on(self, work: TorchWork, error: RuntimeError, call: Call) -> None:
        """Goes on waiting for a work that did not come through at once."""
        began = time.monotonic() - SLICE.total_seconds()
        limit = self._timeout.total_seconds()
        warn_at = _WARN_SECONDS
        while True:
            if work.is_completed():  # it came through, or failed, just after its slice of time
                try:
                    work.wait()
                    self._watch.arrived()
                    return
                except RuntimeError as final:
                    self._raise(final, call)
            if "timed out" not in str(error).lower():
                self._raise(error, call)
            waited = time.monotonic() - began
            if waited >= limit:
                self._give_up(call)
            if waited >= warn_at:
                self._watch.warn(call, waited)
                warn_at *= 2
            try:
                self._watch.look(call)
            except ShardkitError as found:
                connections.never_destroy()
                raise found from found.__cause__  # without the end of a slice of waiting, which says nothing
            if isinstance(work, Agreement) and waited > 3 * SLICE.total_seconds():
                self._probe(call)
            try:
                work.wait(timedelta(seconds=min(1.0, _LOOK * waited, max(0.1, limit - waited))))
                self._watch.arrived()
                return
            except RuntimeError as again:
                error = again

    def _give_up(self, call: Call) -> NoReturn:
        """Raises where nobody knows why ``call`` does not come to its end."""
        connections.never_destroy()
        message = (
            f"rank {self.rank} waited {self._timeout} (the process group's timeout) in {call.describe()}, and no rank "
            f"says why: a rank of {list(self.ranks)} is stopped or can't be reached. If a step may take as long, pass "
            "a longer timeout= to init_process_group or new_group"
        )
        self._watch.fail(message, lost=True)
        raise RankLostError(message) from None

    def _raise(self, error: RuntimeError, call: Call) -> NoReturn:
        connections.never_destroy()
        lost = any(sign in str(error) for sign in _LOST)
        said = self._watch.last_words(call) if lost else ""
        self._watch.fail(said or f"{error} in {call.describe()}", lost=lost and not said)
        if said:  # it left because of an error that concerns this rank too
            raise OutOfStepError(said) from error
        if lost:
            raise RankLostError(
                f"rank {self.rank} lost another rank of the group (ranks {list(self.ranks)}) during {call.describe()}. "
                f"That rank died or left; its own output says why. ({error})"
            ) from error
        raise error

    def _start(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Issues on the process group; connections that broke before show here."""
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "collective", 0, ""))

    def _probe(self, call: Call) -> None:
        """Sends a token that nobody has to receive: an agreement uses no connection that could tell of a lost rank."""
        root = self._root
        for rank, of_job in enumerate(self.ranks):
            if rank == self.rank or rank in self._watch.reports:
                continue
            try:
                with uncounted(root.process_group):
                    work = root.process_group.send([_TOKEN], root.ranks.index(of_job), _PROBE_TAG)
                self._probes.append(work)
            except RuntimeError as error:
                self._raise(error, call)

    # ------------------------------------------------------------ objects
    # The bytes are received into a bytearray that pickle reads in place, so neither numpy nor a copy is needed.
    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        return [pickle.loads(part) for part in self._gathered(*announce(self, obj, True, label), label)]

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        sizes = sizes_of(self, len(data), label)
        return [bytes(part) for part in self._gathered(bytearray(data), sizes, label)]

    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        check_member(self, "gather_object", dst)
        packed, sizes = announce(self, obj, True, label)
        data = as_tensor(packed).to(self.device)
        here, world = self.rank == dst, self.world_size
        buffer, everything = _buffer(self, sum(sizes) if here else 0)
        send = [data.numel() if r == dst else 0 for r in range(world)]
        self.all_to_all(everything, data, sizes if here else [0] * world, send, label=label)
        return [pickle.loads(part) for part in _parts(buffer, everything, sizes)] if here else None

    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T:
        check_member(self, "broadcast_object", src)
        here = self.rank == src
        data, sizes = announce(self, obj, here, label)
        received = self._spread(data, sizes[src], src, label)
        return obj if here else pickle.loads(received)

    def _widths(self, sizes: Sequence[int]) -> Sequence[int]:
        """Returns how many bytes travel for objects of these sizes."""
        return sizes

    def _gathered(self, data: bytearray, sizes: Sequence[int], label: str) -> list[memoryview]:
        widths = self._widths(sizes)
        own = as_tensor(data.ljust(widths[self.rank], b"\0")).to(self.device)
        buffer, everything = _buffer(self, sum(widths))
        self.all_gather_into(everything, own, widths, label=label)
        return [part[:size] for part, size in zip(_parts(buffer, everything, widths), sizes, strict=True)]

    def _spread(self, data: bytearray, size: int, src: int, label: str) -> memoryview:
        (width,) = self._widths([size])
        if self.rank == src:
            self.broadcast(as_tensor(data.ljust(width, b"\0")).to(self.device), src, label=label)
            return memoryview(data)
        buffer, received = _buffer(self, width)
        self.broadcast(received, src, label=label)
        return _parts(buffer, received, [size])[0]


class C10dBackend(Backend):
    """A backend whose ranks are processes. Its groups are over torch's: one for each, as long as that exists.

    A group and its channels end when torch destroys the process group, which others may still hold then (torch's own
    compiler holds the one that exists when it is imported). What ends for certain is torch's entry in its list of
    process groups, and with it the Python object of the group's store: that is what is watched.
    """

    def __init__(self) -> None:
        self._known: dict[int, C10dGroup] = {}  # by id of the process group

    @abc.abstractmethod
    def _make_group(self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> C10dGroup:
        """Makes the group over a process group of these global ranks; ``rank`` is the own position among them."""

    def group(self, process_group: ProcessGroup = None) -> Group:
        if isinstance(process_group, C10dGroup | ImaginedGroup):
            return process_group
        if isinstance(process_group, dist.ProcessGroup) or process_group is None:
            return self._of_torch(process_group)
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError(
                f"rank {dist.get_rank()} is no member of the process group; build sharded objects on its members only "
                "(new_group returns this value on the other ranks)"
            )
        if isinstance(process_group, RanksInName):
            return GroupInName(self, process_group)
        if (size := size_of(process_group)) is not None:
            if size == 1:
                return OneRank(self, [0])
            raise ConfigurationError(
                f"{type(process_group).__name__} has {size} ranks but can't communicate; pass a torch.distributed group"
            )
        raise ConfigurationError(
            f"process_group is a {type(process_group).__name__}; pass a torch.distributed process group, a shardkit "
            "group or None for all ranks"
        )

    def _of_torch(self, process_group: dist.ProcessGroup | None) -> C10dGroup:
        if not dist.is_initialized():
            raise ConfigurationError(
                "no process group exists yet: call torch.distributed.init_process_group(...) first, or start the ranks "
                "with shardkit.launch(fn, world_size)"
            )
        pg = process_group if process_group is not None else dist.group.WORLD
        if pg is None or pg not in _listed():
            raise ConfigurationError(
                "torch.distributed does not know this process group: it was destroyed, or made by other means than "
                "init_process_group and new_group"
            )
        if id(pg) not in self._known:
            connections.check_process_group(pg)
            self._known[id(pg)] = self._make_group(pg, dist.get_process_group_ranks(pg), dist.get_rank(pg))
            # Not at the end of the interpreter, which has taken apart by then what closing needs.
            weakref.finalize(_listed()[pg][1], self._end_of, id(pg)).atexit = False
        return self._known[id(pg)]

    def _end_of(self, key: int) -> None:
        """Forgets a process group that torch has destroyed."""
        self._known.pop(key).close()

    def _pool(self, world_size: int, timeout: float | None, start_timeout: float | None) -> Pool:
        self._check_ranks(world_size)
        variables = self._environment_of_ranks(world_size)
        return RankPool(
            world_size, self.name, timeout=timeout, start_timeout=start_timeout, environment=variables
        )

    def _check_ranks(self, world_size: int) -> None:
        """Raises ConfigurationError where this machine can't have so many."""

    def _environment_of_ranks(self, world_size: int) -> dict[str, str]:
        """Returns variables that the ranks' processes need when they begin, beside those of torchrun."""
        return {}


def _listed() -> Mapping[dist.ProcessGroup, tuple[str, Store]]:
    """Returns the process groups that torch knows: for each its backend's name and its store."""
    return dist.distributed_c10d._world.pg_map
