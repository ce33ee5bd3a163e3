"""Groups over NCCL."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..torch_types import Store
from .stream_group import StreamGroup

_CUDA = torch.device("cuda")


class NcclGroup(StreamGroup):
    """Ranks of an NCCL process group."""

    ends_at_exit = False  # see _end_communicators

    def _connect(self, store: Store, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """An NCCL communicator of these group ranks, known to them alone (as for gloo: see the base)."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = [self.ranks[r] for r in members]
        options.group_name = f"shardkit/{name}"  # type: ignore[assignment]
        rank, size = members.index(self.rank), len(members)
        nccl = dist.ProcessGroupNCCL(store, rank, size, options)
        pg = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.NCCL
        pg._set_default_backend(kind)
        pg._register_backend(_CUDA, kind, nccl)
        pg._set_group_name(options.group_name)
        _communicators.add(nccl)
        return pg


# NCCL's threads have to end before the process does; torch ends only those of groups it made itself.
_communicators: weakref.WeakSet[dist.ProcessGroupNCCL] = weakref.WeakSet()


@atexit.register
def _end_communicators() -> None:
    for nccl in list(_communicators):
        with contextlib.suppress(RuntimeError):
            nccl.abort()  # nothing is in flight; unlike an orderly end it never waits for other ranks
