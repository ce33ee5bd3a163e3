"""Replicas as threads of one process: who they are, how they meet, and when their graphs run.

Runs in a child process of :class:`~shardkit.backends.xla.pool.ReplicaPool` only. Each XLA:CPU device has one
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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from . import collectives
from .meeting import Call, Meeting
from .replica import Replica
from .rules import rules_here
from .runtime import RuntimeHost
from .turn_taking import SEED, Turns

_RUNTIME = torch_xla._XLAC


class ReplicaState:
    """One replica's :class:`~shardkit.backends.xla.replica.ReplicaHost`."""

    def __init__(self, world: World, rank: int, device: str, real_device: str) -> None:
        self.world = world
        self.rank = rank
        self.device = device
        self.real_device = real_device
        self.calls: list[Call] = []
        self.replica: Replica | None = None

    def enter(self) -> Replica:
        """Makes the calling thread this replica's; starts from a clean state."""
        _RUNTIME._xla_set_default_device(self.device)
        self.calls.clear()
        _RUNTIME._clear_pending_irs(self.device)
        xm.set_rng_state(SEED + self.rank, self.device)
        issue = collectives.ChannelCollectives()
        host = HostOfPod(self, issue) if self.world.rules.pod else self
        self.replica = Replica(self.rank, self.world.size, issue, host)
        torch_xla.sync(wait=True)
        return self.replica

    def issued(self, call: Call) -> None:
        self.calls.append(call)

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        payloads = self.meet(what, [Call(tuple(ranks), what, label)], payload)
        return [payloads[rank] for rank in ranks]

    def partition(self, ranks: Sequence[int], siblings: Sequence[Sequence[int]]) -> collectives.Groups:
        return collectives.replica_groups(ranks, siblings, self.world.size)

    def meet(self, where: str, calls: Sequence[Call], payload: bytes = b"") -> dict[int, bytes]:
        with self.world.turns.given(self.rank):
            return self.world.meeting.arrive(self.rank, where, calls, payload)

    def abort(self) -> None:
        self.calls.clear()
        _RUNTIME._clear_pending_irs(self.device)
        self._forget_order()

    def wait(self) -> None:
        """Blocks until what was scheduled on this replica's device is done."""
        with self.world.turns.given(self.rank):
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
            self.meet("scheduling", [Call(tuple(members), "schedule")])
        if wait:
            self.wait()

    def _forget_order(self) -> None:
        _RUNTIME._set_all_reduce_token(self.device, None)
        if self.replica is not None:
            self.replica.collectives.synced()


class HostOfPod(RuntimeHost):
    """A TPU's own host, under :mod:`~shardkit.backends.xla.rules`: replicas have no other way to each other."""

    def __init__(self, state: ReplicaState, issue: collectives.Collectives) -> None:
        super().__init__(state.rank, state.world.size, issue)
        self._state = state

    def issued(self, call: Call) -> None:
        self._state.issued(call)

    def abort(self) -> None:
        self._state.abort()


class World:
    """All replicas of this process."""

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
        """For a new job: nobody has arrived or left, and random states start anew."""
        self.job += 1
        self.meeting = Meeting(self.size, one_program=self.rules.pod)
        self.turns = Turns(self.size)

    @property
    def states(self) -> list[ReplicaState]:
        return [self._states[rank] for rank in range(self.size)]

    def here(self) -> ReplicaState:
        """The replica whose device is the calling thread's default device."""
        return self._states[_RUNTIME._xla_get_default_device_ordinal()]


_world: World | None = None


def current_world() -> World | None:
    """This process's replicas, if it has any."""
    return _world


def make_world(size: int) -> World:
    """Makes the replicas of this process."""
    global _world
    torch.set_num_threads(1)
    _world = World(size)
    return _world
