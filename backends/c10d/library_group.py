"""Groups over any library of collectives that torch.distributed has for a device.

A channel is a process group of its own, made as torch makes it: by what the library's package has registered, or by
torch's own class for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardkit.backend import Backend
from shardkit.errors import ConfigurationError

from ..torch_types import Store
from .connections import Connected, process_group_over
from .group import MAIN, C10dGroup
from .stream_group import StreamGroup


class LibraryGroup(StreamGroup):
    """Ranks of a process group whose library works on the device's streams."""

    def __init__(
        self, backend: Backend, process_group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int,
        name: str = MAIN, parent: C10dGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backend, process_group, ranks, rank, name, parent)
        self._library = ""
        if isinstance(parent, LibraryGroup):
            self._library = parent._library
        elif process_group is not None:
            config = dist.get_backend_config(process_group)
            self._library = dict(pair.split(":") for pair in config.split(","))[backend.device_type]

    def _connect(self, store: Store, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """Connections of these group ranks, known to them alone (as for gloo: see the base)."""
        rank, size = members.index(self.rank), len(members)
        global_ranks = [self.ranks[r] for r in members]
        full_name = f"shardkit/{self._library}/{name}"
        kind, connected = _connected(self._library, store, rank, size, self._timeout, global_ranks, full_name)
        if isinstance(connected, dist.ProcessGroup):  # of a library that is written in Python
            return connected
        return process_group_over(connected, kind, store, rank, size, torch.device(self.backend.device_type))

    def close(self) -> None:
        own = self.process_group if self._root is not self else None
        super().close()
        if isinstance(own, dist.ProcessGroup):
            with contextlib.suppress(RuntimeError):  # not every library has it
                own.shutdown()


def _connected(
    library: str, store: Store, rank: int, size: int, timeout: timedelta, global_ranks: Sequence[int], name: str
) -> tuple[dist.ProcessGroup.BackendType, Connected]:  # fmt: skip
    """What torch.distributed.new_group makes, for the ranks that call this alone.

    Raises:
        ConfigurationError: it can't be made so.
    """
    plugin = dist.Backend._plugins.get(library.upper())
    if plugin is None:
        kind = getattr(dist.ProcessGroup.BackendType, library.upper(), None)
        made = getattr(dist, f"ProcessGroup{library.upper()}", None)
        if kind is None or made is None:
            raise ConfigurationError(
                f"torch.distributed does not say how connections of {library!r} are made; use a library that is "
                "registered with torch.distributed.Backend.register_backend"
            )
        options = made.Options()
        options._timeout = timeout
        return kind, made(store, rank, size, options)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    if not plugin.extended_api:
        return custom, plugin.creator_fn(store, rank, size, timeout)
    options = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.global_ranks_in_group = timeout, list(global_ranks)
    options.group_id = name
    return custom, plugin.creator_fn(options, None)
