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

[Note: a TPU's rules] Threads of one process can do much that the chips of a pod can't. Under these rules replicas can't
either:

- objects go through device collectives, among all ranks at once; the process's memory is no way from one to another;
- a program with collectives is one of all ranks: who brings others, over other groups or in another order is refused;
- the ranks are on several hosts, with a process a chip: ``xr.local_ordinal`` and ``xm.is_master_ordinal`` tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from shardkit.errors import ConfigurationError

from .meeting import SEED, ReplicaCall, ReplicaMeeting, Turns
from .runtime import ChannelCollectives, Groups, Replica, RuntimeHost, replica_groups

_RUNTIME = torch_xla._XLAC


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
        self.turns = Turns(self.size)

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
    """Makes the replicas of this process."""
    global _world
    torch.set_num_threads(1)
    _world = World(size)
    return _world
