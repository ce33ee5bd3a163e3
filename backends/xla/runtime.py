"""A rank of the XLA backend: one that torch_xla itself started (a TPU core, or a single device), or a replica.

[Note: exchange among all] torch_xla's programs run on all ranks or on none, so a part of the ranks can't exchange
anything by itself. All ranks exchange at once, each with its own group, and each takes what its group brought. A row
says what the rank is doing and which group it means, so that every rank sees whether all mean the same, and how the
groups divide the ranks: the same error is raised everywhere, or none.

Replicas are threads of a child process of :class:`~shardkit.backends.xla.pool.ReplicaPool`. Each XLA:CPU device has one
replica. Its state is found by the ordinal of the thread's default device, never by the thread: torch_xla sets
the default device in autograd's device threads too, and hooks issue collectives from there.

[Note: when a graph runs] A sync goes through these steps:

1. wait for this replica's own running work, so that nothing blocks while it holds the turn;
2. if collectives are pending, meet all replicas of their groups and compare (see meeting.py). XLA ends the
   process when participants of a collective arrive more than some seconds apart, so nobody may start while
   others still trace, and a replica that never comes has to be noticed here;
3. trace, compile and schedule. Holding the turn, only one replica does so at a time: the first one compiles,
   the others find the executable in the shared cache;
4. meet again, so that a replica which goes on to read a result can't wait for one that needs the turn.

[Note: a TPU's rules] Threads of one process can do much that the chips of a pod can't. Under these rules replicas can't
either:

- objects go through device collectives, among all ranks at once; the process's memory is no way from one to another;
- a program with collectives is one of all ranks: who brings others, over other groups or in another order is refused;
- the ranks are on several hosts, with a process a chip: ``xr.local_ordinal`` and ``xm.is_master_ordinal`` tell.
"""

from __future__ import annotations

import abc
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime

from shardkit.backend import Group
from shardkit.errors import ConfigurationError, OutOfStepError

from .meeting import SEED, ReplicaCall, ReplicaMeeting, Turns

# ------------------------------------------------------------ collectives
# The four XLA collectives everything else is made of, as functions from tensor to tensor.
# Legend: W size of the group, S numel of one rank's part, all tensors 1-D.
#
# :class:`NativeCollectives` is what a TPU runs. :class:`ChannelCollectives` is the same for replicas that are
# threads of one process on a CPU:
#
# [Note: channels] XLA:CPU matches the participants of a collective by the id of the compiled module, which
# differs between replicas unless they share one executable; those without share would wait for ever. With a
# channel id and ``use_global_device_ids`` it matches by (devices, kind of operation, channel id) instead, so
# that replicas need not even run the same graph.
#
# [Note: one order] All collectives may then carry the same channel id, and equal graphs get equal hashes at
# once, if every replica runs them one after the other in the order they were issued. The compiler is free to
# reorder what does not depend on each other. On a TPU, two collectives that ranks run in different orders wait for
# each other for ever. So each collective is made to depend on the one before, of whichever group:
# ``where(never, previous, input)``, with ``never`` a value that the compiler can't know. Unlike adding zero
# times the previous result (what torch_xla's own token does) this keeps NaN and infinity where they are. The order ends
# with the program: the next one would run these collectives again for the sake of it, or start with an input that the
# first one did not have.
Groups = list[list[int]]  # a partition of all replicas; the own group's rank order is the order of the list

_CHANNEL = 2  # 1 is what the all-reduce below always uses
_RUNTIME = torch_xla._XLAC
# As they are before torch_xla_api.py replaces them in a process with replicas.
_NATIVE = SimpleNamespace(
    all_gather=xm.all_gather,
    all_reduce=xm.all_reduce,
    all_to_all=xm.all_to_all,
    reduce_scatter=xm.reduce_scatter,
)


class Collectives(abc.ABC):
    """Collectives over the group of ``groups`` that the calling replica is in. ``op``: "sum", "max", "min".

    Each depends on the one before; see [Note: one order]. One object a replica.
    """

    def __init__(self) -> None:
        self._previous: torch.Tensor | None = None  # [1]
        # not a scalar: the compiler would be told its value
        self._never = torch.zeros(1, dtype=torch.bool).to(torch_xla.device())

    def synced(self) -> None:
        """Starts a new order: what was issued has been handed to the device."""
        self._previous = None

    @abc.abstractmethod
    def all_gather(self, value: torch.Tensor, groups: Groups, size: int) -> torch.Tensor:
        """[S] -> [W * S]"""

    @abc.abstractmethod
    def reduce_scatter(self, value: torch.Tensor, op: str, groups: Groups, size: int) -> torch.Tensor:
        """[W * S] -> [S]"""

    @abc.abstractmethod
    def all_reduce(self, value: torch.Tensor, op: str, groups: Groups) -> torch.Tensor: ...

    @abc.abstractmethod
    def all_to_all(self, value: torch.Tensor, groups: Groups, size: int, rank: torch.Tensor) -> torch.Tensor:
        """[W * S] -> [W * S]; ``rank`` within the group as an int64 tensor [1] on the device."""

    def _after_previous(self, value: torch.Tensor) -> torch.Tensor:
        # torch_xla adds 0 * (a previous result) to each collective's input to order them: one NaN or infinity
        # would spread to every later collective of the graph.
        _RUNTIME._set_all_reduce_token(_RUNTIME._xla_get_default_device(), None)
        previous = self._previous
        if previous is None or not _RUNTIME._check_tensor_need_materialization([previous])[0]:
            return value
        return torch.where(self._never, previous.to(value.dtype), value)

    def _issued(self, result: torch.Tensor) -> torch.Tensor:
        self._previous = result[:1].clone()  # a view would keep the whole result alive
        return result


class NativeCollectives(Collectives):
    """torch_xla's own. Layouts are not pinned: the pinned all-gather is an all-reduce of padded inputs."""

    def all_gather(self, value: torch.Tensor, groups: Groups, size: int) -> torch.Tensor:
        return self._issued(_NATIVE.all_gather(self._after_previous(value), 0, groups, pin_layout=False))

    def reduce_scatter(self, value: torch.Tensor, op: str, groups: Groups, size: int) -> torch.Tensor:
        value = self._after_previous(value)
        return self._issued(_NATIVE.reduce_scatter(op, value, 1.0, 0, size, groups, pin_layout=False))

    def all_reduce(self, value: torch.Tensor, op: str, groups: Groups) -> torch.Tensor:
        value = self._after_previous(value)
        return self._issued(_NATIVE.all_reduce(op, value, 1.0, groups, pin_layout=False))

    def all_to_all(self, value: torch.Tensor, groups: Groups, size: int, rank: torch.Tensor) -> torch.Tensor:
        value = self._after_previous(value)
        return self._issued(_NATIVE.all_to_all(value, 0, 0, size, groups, pin_layout=False))


class ChannelCollectives(Collectives):
    """Serves replicas on a CPU; see [Note: channels]."""

    def all_gather(self, value: torch.Tensor, groups: Groups, size: int) -> torch.Tensor:
        if not _uniform(groups):  # XLA wants groups of one size, except in all-reduce
            position = _position(groups)
            parts = [value if i == position else torch.zeros_like(value) for i in range(size)]
            return self.all_reduce(torch.cat(parts), "sum", groups)
        value = self._after_previous(value)
        return self._issued(_RUNTIME._xla_all_gather(value, 0, size, groups, False, _CHANNEL, True))

    def reduce_scatter(self, value: torch.Tensor, op: str, groups: Groups, size: int) -> torch.Tensor:
        if not _uniform(groups):
            part = value.numel() // size
            return self.all_reduce(value, op, groups).narrow(0, _position(groups) * part, part)
        value = self._after_previous(value)
        token, _ = xm._get_all_reduce_token()
        result, _ = _RUNTIME._xla_reduce_scatter(
            op, value, token, 1.0, 0, size, groups, False, _CHANNEL, True
        )
        return self._issued(result)

    def all_reduce(self, value: torch.Tensor, op: str, groups: Groups) -> torch.Tensor:
        return self._issued(_RUNTIME._xla_spmd_all_reduce(op, self._after_previous(value), 1.0, groups))

    def all_to_all(self, value: torch.Tensor, groups: Groups, size: int, rank: torch.Tensor) -> torch.Tensor:
        # XLA's all-to-all takes no channel through torch_xla: gather everything and keep this rank's column.
        return self.all_gather(value, groups, size).view(size, size, -1).index_select(1, rank).reshape(-1)


def _uniform(groups: Groups) -> bool:
    return len({len(group) for group in groups}) == 1


def _position(groups: Groups) -> int:
    me = _RUNTIME._xla_get_default_device_ordinal()
    return next(group.index(me) for group in groups if me in group)


def replica_groups(members: Sequence[int], siblings: Sequence[Sequence[int]], world_size: int) -> Groups:
    """Returns all replicas, partitioned so that ``members`` is one group and the others are ``siblings`` if they fit.

    XLA wants every replica in exactly one group. Siblings (groups made beside this one) give all of them the
    same partition and so the same graph; if they don't cover the rest, the rest is cut into pieces of the
    same size where that is possible.
    """
    size, mine = len(members), set(members)
    rest = [r for r in range(world_size) if r not in mine]
    others = [list(s) for s in siblings if mine.isdisjoint(s)]
    if sorted(r for group in others for r in group) != rest:
        step = size if rest and len(rest) % size == 0 else max(len(rest), 1)
        others = [rest[i : i + step] for i in range(0, len(rest), step)]
    # In one order, whichever group asks: the order is part of the graph.
    return sorted([list(members), *others], key=min)


# ------------------------------------------------------------ exchange of bytes
_FIELDS = struct.Struct("<qiii8s8sH")
_TEXT = 200  # bytes of the call's name that are shown where ranks differ
_SHOWN = 4  # ranks in a message
ROW = 512  # bytes; most payloads fit, so that one collective of one size is all
ROOM = ROW - _FIELDS.size - _TEXT


@dataclass(frozen=True)
class Row:
    """Said first by each rank that exchanges bytes.

    Attributes:
        length: of its payload.
        first, size, place: global rank of its group's first member, number of members, its own place.
        members: digest of the group's ranks.
        call: digest of what it does; ``text`` is how that begins.
        payload: if it has room here.
    """

    length: int
    first: int
    size: int
    place: int
    members: bytes
    call: bytes
    text: str
    payload: bytes


def written(rank: int, ranks: Sequence[int], what: str, label: str, payload: bytes) -> bytes:
    """Returns a row of :data:`ROW` bytes. The label is shown, but not compared."""
    text = (f"{what} {label!r}" if label else what).encode()
    fields = _FIELDS.pack(
        len(payload),
        ranks[0],
        len(ranks),
        ranks.index(rank),
        _digest(repr(tuple(ranks)).encode()),
        _digest(what.encode()),
        min(len(text), _TEXT),
    )
    room = payload if len(payload) <= ROOM else b""
    return (fields + text[:_TEXT].ljust(_TEXT, b"\0") + room).ljust(ROW, b"\0")


def read(data: bytes) -> Row:
    length, first, size, place, members, call, shown = _FIELDS.unpack_from(data)
    rest = data[_FIELDS.size :]
    text = rest[:shown].decode(errors="replace")
    return Row(length, first, size, place, members, call, text, rest[_TEXT : _TEXT + length])


def partition(rows: Sequence[Row]) -> list[list[int]]:
    """Returns the groups of all ranks, in the order of their smallest members."""
    if len({row.call for row in rows}) > 1:
        raise OutOfStepError(_differ("ranks are out of step; all must exchange at the same point:", rows))
    groups: dict[int, list[int]] = {}
    for rank, row in sorted(enumerate(rows), key=lambda pair: pair[1].place):
        groups.setdefault(row.first, []).append(rank)
    for first, ranks in groups.items():
        mine = {(rows[r].size, rows[r].members) for r in ranks}
        if (
            len(mine) > 1
            or rows[first].size != len(ranks)
            or [rows[r].place for r in ranks] != [*range(len(ranks))]
        ):
            raise OutOfStepError(
                _differ(
                    f"{rows[first].text} among a part of the ranks: on a TPU all ranks exchange at once, each with the "
                    "group it is in, but these don't divide the ranks:",
                    rows,
                )
            )
    if len({len(ranks) for ranks in groups.values()}) > 1:
        raise ConfigurationError(
            _differ(f"{rows[0].text} among parts of different sizes; XLA wants parts of one size:", rows)
        )
    return sorted(groups.values(), key=min)


def _differ(begin: str, rows: Sequence[Row]) -> str:
    kinds: dict[tuple[object, ...], int] = {}
    for rank, row in enumerate(rows):
        kinds.setdefault((row.call, row.members), rank)
    lines = [
        f"  rank {rank}: {rows[rank].text} in its group of {rows[rank].size}, whose first is rank {rows[rank].first}"
        for rank in [*kinds.values()][:_SHOWN]
    ]
    more = [f"  and {len(kinds) - _SHOWN} more"] if len(kinds) > _SHOWN else []
    return "\n".join([begin, *lines, *more])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def room_for(length: int) -> int:
    """Counts bytes that travel for a payload: a power of two, so that few sizes are compiled."""
    return 1 << max(length - 1, ROW).bit_length()


class RuntimeHost:
    """Exchange between ranks by device collectives. Recorded collectives are not checked: that would cost a step.

    See [Note: exchange among all].
    """

    def __init__(self, rank: int, world_size: int, collectives: Collectives) -> None:
        self._rank, self._world_size, self._collectives = rank, world_size, collectives
        self._everyone = list(range(world_size))
        self._parts: dict[tuple[int, ...], Groups] = {}  # how the ranks are divided while this group is used

    def issued(self, call: ReplicaCall) -> None:
        """Notes that a collective was added to the graph."""

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        """Returns each rank's payload, in group order."""
        if len(ranks) == 1:
            return [payload]
        # each sync draws a new one: what a training draws would depend on our exchanges
        seed = xm.get_rng_state()
        try:
            return self._exchange_among_all(ranks, what, label, payload)
        finally:
            xm.set_rng_state(seed)

    def _exchange_among_all(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        torch_xla.sync()  # what is pending runs on its own, so that what follows is the same program each time
        call = ReplicaCall(tuple(self._everyone), what, label)
        mine = written(self._rank, ranks, what, label, payload)
        rows = [read(data) for data in self._gather(mine, ROW, [self._everyone], call)]
        groups = self._parts[tuple(ranks)] = partition(rows)
        longest = max(row.length for row in rows)
        if longest <= ROOM:
            return [rows[rank].payload for rank in ranks]
        # the groups each on their own: what the others exchange would need memory here
        sent = self._gather(payload, room_for(longest), groups, call)
        return [data[: rows[rank].length] for rank, data in zip(ranks, sent, strict=True)]

    def partition(self, ranks: Sequence[int], siblings: Sequence[Sequence[int]]) -> Groups:
        """Returns the groups of all ranks while this one uses ``ranks``; siblings are those that were made beside it.

        Where all ranks have to say so, it is an exchange.
        """
        if len(ranks) == 1:
            return [[rank] for rank in self._everyone]
        if len(ranks) == self._world_size:
            return [list(ranks)]
        if sum(map(len, siblings)) == self._world_size:
            if len({*map(len, siblings)}) > 1:
                raise ConfigurationError(
                    f"ranks are divided into {[list(part) for part in siblings]}: XLA wants parts of one size"
                )
            return replica_groups(ranks, siblings, self._world_size)
        known = tuple(ranks)
        if known not in self._parts:
            self.exchange(ranks, "use of a part of the ranks", "", b"")
        return self._parts[known]

    def abort(self) -> None:
        """Drops what this replica has recorded and not run."""
        _RUNTIME._clear_pending_irs(_RUNTIME._xla_get_default_device())

    def _gather(self, data: bytes, width: int, groups: Groups, call: ReplicaCall) -> list[bytes]:
        """Returns each member's bytes, padded to the width."""
        size = len(groups[0])
        padded = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        self.issued(call)
        rows = self._collectives.all_gather(padded.to(torch_xla.device()), groups, size)
        torch_xla.sync()  # a read alone would run what rows depend on, and leave what orders collectives to run again
        whole = rows.cpu().numpy().tobytes()
        return [whole[start : start + width] for start in range(0, size * width, width)]


@dataclass(frozen=True)
class Replica:
    """One rank of the job: its global rank, and its ways to the others."""

    rank: int
    world_size: int
    collectives: Collectives
    host: RuntimeHost
    root: list[Group] = field(default_factory=list)  # the group of all ranks, once it was asked for
    # Those of torch.distributed, by ranks: thousands of ranks are not to be listed again for each unit of a model.
    parts: dict[tuple[int, ...], Group] = field(default_factory=dict)


def runtime_replica() -> Replica:
    """Returns the calling thread's rank, as the runtime knows it."""
    size = torch_xla.runtime.world_size()
    rank = torch_xla.runtime.global_ordinal() if size > 1 else 0
    collectives = NativeCollectives()
    return Replica(rank, size, collectives, RuntimeHost(rank, size, collectives))


# ------------------------------------------------------------ replicas
# Who they are, how they meet, and when their graphs run.
_RULES, _HOSTS = "SHARDKIT_XLA_RULES", "SHARDKIT_XLA_HOSTS"


@dataclass(frozen=True)
class Rules:
    """Rules that the replicas of a process keep.

    Attributes:
        pod: whether they are those of a pod of TPUs.
        hosts: on how many hosts it has its chips.
    """

    pod: bool = False
    hosts: int = 1


def rules_here(world_size: int) -> Rules:
    """Reads the rules from the environment."""
    rules = os.environ.get(_RULES, "")
    if rules not in ("", "tpu"):
        raise ConfigurationError(f"{_RULES}={rules}: there are the rules of a 'tpu', or none (unset)")
    if not rules:
        return Rules()
    given = os.environ.get(_HOSTS, "2" if world_size % 2 == 0 else "1")
    if not given.isdecimal() or not int(given) or world_size % int(given):
        raise ConfigurationError(
            f"{_HOSTS}={given}: {world_size} replicas can't be on so many hosts with the same number each"
        )
    return Rules(True, int(given))


def ordinals(rules: Rules, world_size: int, rank: Callable[[], int]) -> dict[str, Callable[[], int]]:
    """Returns functions of torch_xla.runtime as a pod has them, with a process a chip."""
    here = world_size // rules.hosts
    return {
        "local_ordinal": lambda: rank() % here,
        "host_index": lambda: rank() // here,
        "process_index": rank,
        "process_count": lambda: world_size,
        "local_process_count": lambda: here,
        "local_device_count": lambda: here,
        "addressable_device_count": lambda: 1,
    }


class ReplicaState(RuntimeHost):
    """One replica. Under [Note: a TPU's rules] it exchanges as a TPU does, else through the process's memory."""

    def __init__(self, world: World, rank: int, device: str, real_device: str) -> None:
        self.world = world
        self.rank = rank
        self.device = device
        self.real_device = real_device
        self.calls: list[ReplicaCall] = []
        self.replica: Replica | None = None

    def enter(self) -> Replica:
        """Makes the calling thread this replica's; starts from a clean state."""
        _RUNTIME._xla_set_default_device(self.device)
        self.calls.clear()
        _RUNTIME._clear_pending_irs(self.device)
        xm.set_rng_state(SEED + self.rank, self.device)
        issue = ChannelCollectives()
        super().__init__(self.rank, self.world.size, issue)  # anew for each job
        self.replica = Replica(self.rank, self.world.size, issue, self)
        torch_xla.sync(wait=True)
        return self.replica

    def issued(self, call: ReplicaCall) -> None:
        self.calls.append(call)

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        if self.world.rules.pod:
            return super().exchange(ranks, what, label, payload)
        payloads = self.meet(what, [ReplicaCall(tuple(ranks), what, label)], payload)
        return [payloads[rank] for rank in ranks]

    def partition(self, ranks: Sequence[int], siblings: Sequence[Sequence[int]]) -> Groups:
        if self.world.rules.pod:
            return super().partition(ranks, siblings)
        return replica_groups(ranks, siblings, self.world.size)

    def meet(self, where: str, calls: Sequence[ReplicaCall], payload: bytes = b"") -> dict[int, bytes]:
        with self.world.turns.given():
            return self.world.meeting.arrive(self.rank, where, calls, payload)

    def abort(self) -> None:
        self.calls.clear()
        _RUNTIME._clear_pending_irs(self.device)
        self._forget_order()

    def wait(self) -> None:
        """Blocks until what was scheduled on this replica's device is done."""
        with self.world.turns.given():
            _RUNTIME._xla_wait_device_ops(devices=[self.real_device])

    def run(self, schedule: Callable[[], None], *, wait: bool, where: str) -> None:
        """Schedules everything recorded; see [Note: when a graph runs]."""
        self.wait()
        calls, self.calls = self.calls, []
        members: dict[int, bytes] = {}
        if calls:
            try:
                members = self.meet(where, calls)
            except Exception:
                self.abort()  # what can't run now would hang in the next sync
                raise
        schedule()
        self._forget_order()
        if members:
            self.meet("scheduling", [ReplicaCall(tuple(members), "schedule")])
        if wait:
            self.wait()

    def _forget_order(self) -> None:
        _RUNTIME._set_all_reduce_token(self.device, None)
        if self.replica is not None:
            self.replica.collectives.synced()


class World:
    def __init__(self, size: int) -> None:
        from torch_xla._internal import pjrt

        self.rules = rules_here(size)
        pjrt.initialize_multiprocess(0, 1)
        self.size = size
        devices = xm.get_xla_supported_devices()
        if len(devices) != size:
            raise RuntimeError(f"wanted {size} XLA:CPU devices, the runtime made {devices}")
        self._states: dict[int, ReplicaState] = {}
        for device in devices:
            rank = _RUNTIME._xla_get_device_ordinal(device)
            self._states[rank] = ReplicaState(self, rank, device, f"CPU:{rank}")
        self.job = 0
        self.renew()

    def renew(self) -> None:
        """Begins a new job: nobody has arrived or left, and random states start anew."""
        self.job += 1
        self.meeting = ReplicaMeeting(self.size, one_program=self.rules.pod)
        self.turns = Turns()

    @property
    def states(self) -> list[ReplicaState]:
        return [self._states[rank] for rank in range(self.size)]

    def here(self) -> ReplicaState:
        """Returns the replica whose device is the calling thread's default device."""
        return self._states[_RUNTIME._xla_get_default_device_ordinal()]


_world: World | None = None


def current_world() -> World | None:
    """Returns this process's replicas, if it has any."""
    return _world


def make_world(size: int) -> World:
    global _world
    torch.set_num_threads(1)
    _world = World(size)
    return _world
