"""Devices and what they reach: a table with its sources, and files for others.

Peaks are those of data sheets. ``efficiency``, the part of it that matrix products reach, is fitted or assumed as each
device's source says. ``memory_share`` and ``link_share`` are what large copies and large all-gathers reach; they are
taken to be the same on all devices and were not fitted. The latencies of GPUs are those by which NCCL itself chooses
its algorithms (``src/graph/tuning.cc``, rings of its Simple protocol): a ring passes through all ranks in turn.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ...errors import ConfigurationError
from .tape import Kernel


@dataclass(frozen=True)
class Device:
    """One rank's, and its links. Bytes, seconds, operations a second.

    Attributes:
        name: what it is called.
        flops: peak of dense matrix products in bfloat16.
        flops_fp32: the same in float32, as frameworks set it by default.
        memory: its size.
        memory_bandwidth: peak.
        link: to the ranks of a host, in each direction.
        network: a rank's part of what its host has to other hosts, in each direction.
        per_host: ranks of a host (of what ``link`` joins).
        axes: ranks of a host are a ring, or a torus of so many axes.
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
        """Seconds of a kernel: it computes and moves bytes at the same time."""
        flops = self.flops if kernel.itemsize <= 2 else self.flops_fp32 * 4 / kernel.itemsize
        moving = kernel.moved / (self.memory_bandwidth * self.memory_share)
        return max(kernel.flops / (flops * self.efficiency), moving, self.launch)

    def communicating(self, operation: str, nbytes: float, ranks: int) -> float:
        """Seconds of a collective on so many bytes of all ranks together.

        Everything passes each rank once: on its link, and where there are several hosts on the network, which the ranks
        of a host share. Of an all-to-all a rank passes on only its own part.
        """
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
        Device(
            "h100", 989e12, 67e12, 80 * 2**30, 3.35e12, 450e9, 50e9, efficiency=0.418,
            source=f"{_NVIDIA.format('H100 SXM', 400)}; efficiency fitted on {_TORCHTITAN}",
        ),
        Device(
            "a100", 312e12, 19.5e12, 80 * 2**30, 2.04e12, 300e9, 25e9, efficiency=0.65,
            source=f"{_NVIDIA.format('A100 SXM 80GB', 200)}; efficiency by torchtitan's Llama 3 8B on 64 A100 (2,904 "
            "to 2,973 tokens/s a GPU), whose batch and checkpointing were assumed",
        ),
        Device(
            "b200", 2250e12, 75e12, 180e9, 8e12, 900e9, 50e9, efficiency=0.418,
            source=f"{_NVIDIA.format('DGX B200', 400)}; efficiency assumed to be H100's",
        ),
        Device(
            "tpu-v5p", 459e12, 459e12, 95e9, 2.765e12, 540e9, 6.25e9, per_host=6144, axes=3, hop=1e-6, efficiency=0.6,
            source="Google Cloud's page of TPU v5p (slices of up to 6,144 chips; six links of 90 GB/s in each "
            "direction); efficiency, latencies and the network between slices assumed",
        ),
    )
}  # fmt: skip


def device_named(name: str) -> Device:
    """One of the table, or of a JSON file with the attributes of a :class:`Device`; ``like`` names one to start from.

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
