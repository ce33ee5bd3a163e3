"""shardkit's backend for ranks of a rehearsal: what the script asks of gloo or NCCL comes here."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from shardkit.backend import Group
from shardkit.backends.checked_group import is_group
from shardkit.backends.simulated.backend import SimulatedBackend
from shardkit.backends.simulated.process_group import ProcessGroupOfThreads
from shardkit.errors import ConfigurationError
from shardkit.types import Args, ProcessGroup, T

from .ranks import current


class RehearsalBackend(SimulatedBackend):
    """CPU tensors, one thread a rank, over the process groups that the script has made.

    It has gloo's name: scripts that look at it do what they do there.
    """

    name = "gloo"
    process_group_backend = "gloo"

    def group(self, process_group: ProcessGroup = None) -> Group:
        if is_group(process_group) or current() is None:
            return super().group(process_group)
        if process_group is None and not dist.is_initialized():
            raise ConfigurationError(
                "no process group exists yet: call torch.distributed.init_process_group(...) first; the script would "
                "fail the same way under torchrun"
            )
        chosen = dist.group.WORLD if process_group is None else process_group
        if isinstance(chosen, ProcessGroupOfThreads):
            return chosen.below
        if chosen is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError("this rank is no member of the process group that it passes")
        return super().group(chosen)

    def launch(
        self, fn: Callable[..., T], world_size: int, args: Args = (), *, timeout: float | None = None,
        start_timeout: float | None = None,
    ) -> list[T]:  # fmt: skip
        """A rank of a rehearsal is started already, so that launch does not come here."""
        raise ConfigurationError(
            "ranks can't be launched from a thread that is no rank while a rehearsal runs"
        )
