"""Devices and what they reach: a table with its sources, and files for others.

Peaks are those of data sheets. ``efficiency``, the part of it that matrix products reach, is fitted or assumed as each
device's source says. ``memory_share`` and ``link_share`` are what large copies and large all-gathers reach; they are
taken to be the same on all devices and were not fitted. ``bus`` is PCIe's, and ``host_bandwidth`` what data sheets say
of hosts with eight devices; neither was fitted. The latencies of GPUs are those by which NCCL itself chooses its
algorithms (``src/graph/tuning.cc``, rings of its Simple protocol): a ring passes through all ranks in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ...errors import ConfigurationError
from .tape import Event, Issue, Kernel, Mark, Wait

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
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and (not isinstance(value, (int, float)) or value <= 0):
                raise ConfigurationError(
                    f"device {self.name}: {field.name} is {value!r}; it has to be above 0"
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
