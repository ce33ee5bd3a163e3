"""A tape of what a rank's device is given in a step, in order: kernels, collectives, and waits for collectives.

[Note: devices] How long a device takes for it is told by a table with its sources, and by files for others.
Peaks are those of data sheets. ``efficiency``, the part of it that matrix products reach, is fitted or assumed as each
device's source says. ``memory_share`` and ``link_share`` are what large copies and large all-gathers reach; they are
taken to be the same on all devices and were not fitted. ``bus`` is PCIe's, and ``host_bandwidth`` what data sheets say
of hosts with eight devices; neither was fitted. The latencies of GPUs are those by which NCCL itself chooses its
algorithms (``src/graph/tuning.cc``, rings of its Simple protocol): a ring passes through all ranks in turn.
"""

from __future__ import annotations

import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shardkit.backend import DONE, Copy, ReduceOp, Work
from shardkit.backends.c10d.group import PIECE, ReduceScatterPlan
from shardkit.backends.eager import Host, ImaginedGroup

from ...errors import ConfigurationError
from ...types import Args, Kwargs, ProcessGroup, Tree

_aten = torch.ops.aten
_ATTENTION = {  # matrix products, each as large as all queries by all keys; what meta tensors run: see as_on_devices
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
}
_FEW = {
    _aten.embedding.default,
    _aten.index_select.default,
    _aten.gather.default,
    _aten.nll_loss_forward.default,
}
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
}


class Kernel(NamedTuple):
    """Computation: operations on floating-point numbers of so many bytes, and bytes read and written."""

    flops: float
    itemsize: int
    moved: float
    on_host: bool = False


class Issue(NamedTuple):
    """A collective, or a copy, is given to its stream, where it follows those before it and what was computed so far.

    Attributes:
        number: of this one, from 0.
        after: follows the wait for this collective instead of what was computed so far; -1: nothing.
    """

    number: int
    operation: str
    nbytes: float
    label: str = ""
    after: int | None = None


class Wait(NamedTuple):
    """Computation from now on needs that collective, or copy; ``on_host`` the host goes on when it is through."""

    number: int
    on_host: bool = False


class Mark(NamedTuple):
    """A place in the program: "step" where one ends, "backward" where it begins."""

    name: str


Event: TypeAlias = "Kernel | Issue | Wait | Mark"


class TapedWork(Copy):
    """A collective or a copy whose wait is recorded, once."""

    def __init__(self, tape: Tape, number: int) -> None:
        self._tape, self._number, self._waits = tape, number, True

    def is_done(self) -> bool:
        return not self._waits

    def wait(self, on_host: bool = False) -> None:
        if self._waits:
            self._waits = False
            self._tape.add(Wait(self._number, on_host))

    def wait_on_host(self) -> None:
        self.wait(on_host=True)


class Tape:
    """Records them.

    Args:
        fuses: a compiler makes one kernel of what lies between two matrix products: it reads what was there before and
            writes what is there after.
    """

    def __init__(self, fuses: bool = False) -> None:
        self.events: list[Event] = []
        self._fuses = fuses
        self._issued = 0
        self._read: dict[int, int] = {}  # bytes by storage, of the kernel that is being fused
        self._written: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def add(self, event: Event) -> None:
        """Records an event, after the kernel that was being fused."""
        stay = sum(size for storage, size in self._written.values() if storage() is not None)
        moved = sum(self._read.values()) + stay
        self._read, self._written = {}, {}
        self.events += [Kernel(0, 4, moved), event] if moved else [event]

    def issue(self, operation: str, nbytes: float, label: str = "", after: int | None = None) -> Copy:
        """Notes that a collective on so many bytes, of all ranks together, is issued, or a copy of them."""
        self.add(Issue(self._issued, operation, nbytes, label, after))
        self._issued += 1
        return TapedWork(self, self._issued - 1)

    def operation(
        self, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs, result: Tree, on_host: bool = False
    ) -> None:
        """Notes that an operation of torch was run."""
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = {_key(t) for t in inputs}
        if func in _EMPTY or (not func._schema.is_mutable and all(_key(t) in before for t in outputs)):
            return
        flops = _flops(func, args, kwargs, result)
        reads = {_key(t): _nbytes(t) for t in inputs}
        if func in _FEW:  # not all of what they look into
            reads = {key: min(size, sum(map(_nbytes, outputs))) for key, size in reads.items()}
        if flops or on_host or not self._fuses:
            moved = sum(reads.values()) + sum(map(_nbytes, outputs))
            self.add(Kernel(flops, outputs[0].element_size() if outputs else 4, moved, on_host))
            return
        for key, size in reads.items():
            if key not in self._written:
                self._read[key] = max(size, self._read.get(key, 0))
        for t in outputs:
            self._written[_key(t)] = weakref.ref(t.untyped_storage()), _nbytes(t)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nbytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs, result: Tree) -> float:
    if func in _ATTENTION:
        first = func is not next(iter(_ATTENTION))  # the gradient comes before the queries
        query, key = args[first], args[first + 1]
        causal = next((a for a in args if isinstance(a, bool)), kwargs.get("is_causal", False))
        products = _ATTENTION[func] * 2 * query.numel() * key.shape[-2]
        return products / 2 if causal else products
    count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=result)


# ------------------------------------------------------------ a rank of many that don't exist
Resized = Callable[[torch.Tensor], None]


class Arriving(Work):
    """A reduction that holds memory until somebody waits for it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        self._memory = None


class CountingGroup(ImaginedGroup):
    """Counts what would be sent, and records it.

    Attributes:
        collectives: name -> number since :meth:`reset`.
        sent: bytes that a rank has to send for them, averaged over ranks.
        tape: records them, if there is one.
    """

    def __init__(self, backend: CountingBackend, world_size: int, rank: int, on_host: bool) -> None:
        super().__init__(backend, range(world_size))
        self.rank, self._on_host = rank, on_host
        self.tape: Tape | None = None
        self.reset()

    def reset(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.sent = 0.0

    def _reduce_scatter(
        self,
        shard: torch.Tensor,
        input: torch.Tensor,
        parts: list[int],
        op: ReduceOp,
        async_op: bool,
        label: str,
    ) -> Work:
        work = self._carry("reduce_scatter", input, async_op, label)
        if not self._on_host or self.world_size == 1:
            return work
        # gloo has no reduce-scatter of its own: what arrives may lie beside what it is added to
        exchange = ReduceScatterPlan(self.rank, tuple(parts))
        arrived = 0 if self.world_size == 2 else exchange.own * self.world_size  # two add where it arrives
        return Arriving(shard.new_empty(min(exchange.own, PIECE) if exchange.in_rounds else arrived))

    def _carry(self, operation: str, tensor: torch.Tensor, async_op: bool, label: str) -> Work:
        twice = 2 if operation == "all_reduce" else 1
        self.collectives[operation] += 1
        nbytes = tensor.numel() * tensor.element_size()
        self.sent += twice * nbytes * (self.world_size - 1) / self.world_size
        work = DONE if self.tape is None else self.tape.issue(operation, nbytes, label)
        if not async_op:
            work.wait()
        return work


class CountingBackend(Host):
    """Serves meta tensors.

    Args:
        rank: which of them this is.
        resized: is told of tensors whose memory was taken or given back; None: nobody is.
        on_host: ranks are processes on CPUs, over gloo; else on devices.

    Attributes:
        pinned_storages: memory of the host.
    """

    name = "counting"
    # device() is the host: what ranks tell each other has values, which no other rank changes
    device_type = "meta"

    def __init__(
        self, world_size: int, rank: int = 0, resized: Resized | None = None, on_host: bool = False
    ) -> None:
        self.counted = CountingGroup(self, world_size, rank, on_host)
        self._note = resized or (lambda tensor: None)
        self.pinned_storages: set[int] = set()

    def is_available(self) -> bool:
        return True

    def group(self, process_group: ProcessGroup = None) -> CountingGroup:
        return self.counted

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(numel, dtype=dtype, device="meta")
        self.pinned_storages.add(made.untyped_storage()._cdata)
        return made

    def copy_down(self, out: torch.Tensor, tensor: torch.Tensor) -> Copy:
        tape = self.counted.tape
        return DONE if tape is None else tape.issue("copy_down", out.nbytes)

    def copy_up(self, out: torch.Tensor, tensor: torch.Tensor, *, at_once: bool = False) -> Copy:
        tape = self.counted.tape
        return DONE if tape is None else tape.issue("copy_up", out.nbytes, after=-1 if at_once else None)

    def take_storage(self, tensor: torch.Tensor) -> None:
        super().take_storage(tensor)
        self._note(tensor)

    def release_storage(self, tensor: torch.Tensor) -> None:
        super().release_storage(tensor)
        self._note(tensor)


# ------------------------------------------------------------ devices
_COPIES = ("copy_up", "copy_down")  # over the bus


@dataclass(frozen=True)
class Device:
    """One rank's, and its links. Bytes, seconds, operations a second.

    Attributes:
        name: what it is called.
        flops: peak of dense matrix products in bfloat16.
        flops_fp32: the same in float32, as frameworks set it by default.
        memory_bandwidth: peak.
        link: to the ranks of a host, in each direction.
        network: a rank's part of what its host has to other hosts, in each direction.
        per_host: ranks of a host (of what ``link`` joins).
        axes: ranks of a host are a ring, or a torus of so many axes.
        bus: to the host's memory, in each direction.
        host_bandwidth: a rank's part of that of the host's memory.
        start: a collective takes as long whatever its size is.
        hop, far_hop: a collective takes as much more for each rank and for each host that it passes through.
        launch: a kernel takes at least as long.
        efficiency: part of the peak that matrix products reach.
        memory_share, link_share: part of the bandwidths that is reached.
        source: where this is from.
    """

    name: str
    flops: float
    flops_fp32: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    per_host: int = 8
    axes: int = 1
    bus: float = 64e9
    host_bandwidth: float = 77e9
    start: float = 8.4e-6
    hop: float = 3.4e-6
    far_hop: float = 14e-6
    launch: float = 4e-6
    efficiency: float = 0.5
    memory_share: float = 0.85
    link_share: float = 0.8
    source: str = ""

    def __post_init__(self) -> None:
        for fact in fields(self):
            value = getattr(self, fact.name)
            if not isinstance(value, str) and (not isinstance(value, (int, float)) or value <= 0):
                raise ConfigurationError(
                    f"device {self.name}: {fact.name} is {value!r}; it has to be above 0"
                )

    def computing(self, kernel: Kernel) -> float:
        """Returns seconds of a kernel: it computes and moves bytes at the same time."""
        if kernel.on_host:  # of optimizers, which move bytes
            return kernel.moved / (self.host_bandwidth * self.memory_share)
        flops = self.flops if kernel.itemsize <= 2 else self.flops_fp32 * 4 / kernel.itemsize
        moving = kernel.moved / (self.memory_bandwidth * self.memory_share)
        return max(kernel.flops / (flops * self.efficiency), moving, self.launch)

    def communicating(self, operation: str, nbytes: float, ranks: int) -> float:
        """Returns seconds of a collective on so many bytes of all ranks together.

        Everything passes each rank once: on its link, and where there are several hosts on the network, which the ranks
        of a host share. Of an all-to-all a rank passes on only its own part.
        """
        if operation in _COPIES:
            return nbytes / (self.bus * self.link_share)
        if ranks == 1:
            return 0.0
        hosts = math.ceil(ranks / self.per_host)
        times = 2 if operation == "all_reduce" else 1
        far = nbytes * (hosts - 1) / hosts / (self.network * min(ranks, self.per_host))
        near = nbytes * (ranks - 1) / ranks / self.link
        if operation == "all_to_all":
            far = nbytes * (hosts - 1) / hosts / self.network
        passing = max(near, far) / self.link_share
        hops = hosts * self.axes * ((ranks / hosts) ** (1 / self.axes) - 1)
        return self.start + times * (hops * self.hop + (hosts - 1) * self.far_hop + passing)


_NVIDIA = "NVIDIA's data sheet of {}, and {} Gbit/s of network for each GPU"
_TORCHTITAN = "torchtitan's Llama 3.1 8B on 8 H100 (FSDP2, not compiled: 5,762 tokens/s a GPU)"
DEVICES = {
    d.name: d
    for d in (
        # flops, flops_fp32, memory, memory_bandwidth, link, network
        Device(
            "h100",
            *(989e12, 67e12, 80 * 2**30, 3.35e12, 450e9, 50e9),
            efficiency=0.418,
            source=f"{_NVIDIA.format('H100 SXM', 400)}; efficiency fitted on {_TORCHTITAN}",
        ),
        Device(
            "a100",
            *(312e12, 19.5e12, 80 * 2**30, 2.04e12, 300e9, 25e9),
            bus=32e9,
            host_bandwidth=51e9,
            efficiency=0.65,
            source=f"{_NVIDIA.format('A100 SXM 80GB', 200)}; efficiency by torchtitan's Llama 3 8B on 64 A100 (2,904 "
            "to 2,973 tokens/s a GPU), whose batch and checkpointing were assumed",
        ),
        Device(
            "b200",
            *(2250e12, 75e12, 180e9, 8e12, 900e9, 50e9),
            efficiency=0.418,
            source=f"{_NVIDIA.format('DGX B200', 400)}; efficiency assumed to be H100's",
        ),
        Device(
            "tpu-v5p",
            *(459e12, 459e12, 95e9, 2.765e12, 540e9, 6.25e9),
            per_host=6144,
            axes=3,
            hop=1e-6,
            efficiency=0.6,
            source="Google Cloud's page of TPU v5p (slices of up to 6,144 chips; six links of 90 GB/s in each "
            "direction); efficiency, latencies and the network between slices assumed",
        ),
    )
}


def device_named(name: str) -> Device:
    """Finds one in the table, or in a JSON file with attributes of a :class:`Device`; ``like`` names one to begin with.

    Raises:
        ConfigurationError: there is none, or the file is not of this kind.
    """
    if name in DEVICES:
        return DEVICES[name]
    try:
        given = json.loads(Path(name).read_text())
        like = given.pop("like", None)
        return (
            Device(**{"name": Path(name).stem, **given}) if like is None else replace(DEVICES[like], **given)
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"--device {name}: neither one of {', '.join(DEVICES)} nor a JSON file with "
            f"{', '.join(f.name for f in fields(Device))} or 'like': {error}"
        ) from error


# ------------------------------------------------------------ the clock
# [Note: the clock] A device has two streams. What is computed runs in order on one of them. Collectives run on the
# other one in the order in which they were issued, one at a time, since they share the links; each begins when what
# was computed before it was issued is through. A wait holds computation up until a collective is through; that time
# is exposed. The host is taken to be ahead of the device, and all ranks to be alike. Where shards are on the host, the
# bus carries copies beside both, one at a time in each direction; the host waits for those that come down, computes,
# and gives the device nothing before it is through: that time is exposed, too, as far as the device is idle.
#
# [Note: FSDP2's schedule] torch's FSDP2 (``torch/distributed/fsdp/_fully_shard``) makes the same units' steps by
# other rules. In forward a unit's gather is issued when the unit is called, on a stream of its own, which waits for
# the copy out of the gather before the last one and not for computation. In backward a unit asks for the next one
# when it has its own. Each gather is copied out. The unit that was called last is gathered again. Each parameter is
# padded to a multiple of the ranks in its first dimension. What its Python costs is not counted, as ours is not.
@dataclass(frozen=True)
class Times:
    """Holds the times of a step.

    Attributes:
        step: seconds.
        exposed: seconds of that in which a collective, a copy or the host is waited for and nothing is computed.
        communicating: seconds that collectives and copies take, exposed or not.
        in_flight: most bytes of collectives that have been issued and not waited for.
    """

    step: float
    exposed: float
    communicating: float
    in_flight: float


def clocked(events: Iterable[Event], device: Device, ranks: int) -> Times:
    """Returns the last step of a tape; see [Note: the clock]."""
    now = host = exposed = busy = most = 0.0
    free = dict.fromkeys(("", *_COPIES), 0.0)  # when what carries them is: the links, and the bus
    ends: dict[int, float] = {}  # of collectives and copies, by number
    waited = {-1: 0.0}  # when computation went on after them
    flying: dict[int, float] = {}
    marks = [(0.0, 0.0, 0.0)]  # of the ends of steps: when, exposed so far, busy so far
    for event in events:
        if isinstance(event, Kernel) and event.on_host:
            host += device.computing(event)
        elif isinstance(event, Kernel):
            exposed += max(0.0, host - now)
            now = max(now, host) + device.computing(event)
        elif isinstance(event, Issue):
            ready = max(host, now if event.after is None else waited[event.after])
            time = device.communicating(event.operation, event.nbytes, ranks)
            carrier = event.operation if event.operation in _COPIES else ""
            ends[event.number] = free[carrier] = max(free[carrier], ready) + time
            busy += time
            if not carrier:
                flying[event.number] = event.nbytes
                most = max(most, sum(flying.values()))
        elif isinstance(event, Wait) and event.on_host:
            host = max(host, ends[event.number])
        elif isinstance(event, Wait):
            exposed += max(0.0, ends[event.number] - now)
            waited[event.number] = now = max(now, ends[event.number])
            flying.pop(event.number, None)
        elif event.name == "step":
            marks.append((now, exposed, busy))
    step, waits, communicating = (b - a for a, b in zip(marks[-2], marks[-1], strict=True))
    return Times(step, waits, communicating, most)


def as_fsdp2(events: Sequence[Event], padding: Mapping[str, float]) -> list[Event]:
    """Returns what FSDP2 would do in the steps of a tape of ``fsdp``; see [Note: FSDP2's schedule].

    Args:
        padding: by label, how much larger a unit is with FSDP2's padding.
    """
    for k, event in enumerate(events := list(events)):
        if isinstance(event, Issue):
            larger = padding.get(event.label.removeprefix("gradients of "), 1.0)
            events[k] = event._replace(nbytes=event.nbytes * larger)
    gathers = {e.number: e for e in events if isinstance(e, Issue) and e.operation == "all_gather"}
    number = -2  # of what is gathered again
    found: list[Event] = []
    waited: list[int] = []  # gathers of this step
    asked: list[Issue] = []
    again: Issue | None = None
    forward = True

    def issue(event: Issue, after: int | None) -> None:
        found.append(event._replace(after=after))

    def arrive(event: Issue) -> None:
        found.extend([Wait(event.number), Kernel(0, 2, 2 * event.nbytes)])
        waited.append(event.number)

    for event in events:
        if isinstance(event, Mark):
            forward = event.name == "step"
            found.append(event)
            if not forward and len(waited) > 1:
                again = gathers[waited[-1]]._replace(number=number)
                number -= 1
                issue(again, waited[-1])
            elif forward:
                waited = []
        elif isinstance(event, Issue):
            if again is not None:  # its backward begins here, or is over if there is none to gather after it
                arrive(again)
            if event.operation != "all_gather":
                issue(event, None)
            elif again is not None:
                issue(event, again.number)
            elif not forward:
                asked.append(event)
            again = None
        elif isinstance(event, Wait) and event.number in gathers:
            gather = gathers[event.number]
            if forward:
                issue(gather, None if not waited else waited[-2] if len(waited) > 1 else -1)
            arrive(gather)
            for a in asked:
                issue(a, gather.number)
            asked = []
        else:
            found.append(event)
    return found
