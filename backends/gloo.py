"""CPU tensors over gloo: the default backend; needs nothing but torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.errors import ConfigurationError

from .c10d.group import C10dBackend, C10dGroup
from .connections import connect_gloo, timeout_of
from .eager import Host


class GlooBackend(Host, C10dBackend):
    """CPU tensors, one process a rank."""

    name = "gloo"
    process_group_backend = "gloo"

    def is_available(self) -> bool:
        return dist.is_available() and dist.is_gloo_available()

    def _make_group(self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> C10dGroup:
        try:
            process_group._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            if dist.get_backend(process_group) == "threaded":
                # threads, torch's tests' ranks: by connections of our own, for theirs carry no CPU tensors
                world = dist.distributed_c10d._world
                store = PrefixStore(
                    f"shardkit/{world.pg_names[process_group]}", world.pg_map[process_group][1]
                )
                connected = connect_gloo(store, rank, len(ranks), timeout_of(process_group, "cpu"))
                group = C10dGroup(self, connected, ranks, rank)
                group.process_group = connected  # nobody else has it
                return group
            raise ConfigurationError(
                f"rank {rank}: the process group can't carry CPU tensors ({error}), and nothing here is on another "
                "device; move the module to the device before it is wrapped, or pass device= or backend= where there "
                "is such an argument, or make the group with backend 'cpu:gloo,cuda:nccl'"
            ) from error
        return C10dGroup(self, process_group, ranks, rank)
