"""Messages of a unit that an object of the user's sends, as torch's FSDPModule takes it: AllGather, ReduceScatter.

[Note: custom messages] Such an object gets the process group that the model is sharded over, as torch hands it over:
one for gathers and reductions. So all of them are in one order on all ranks, also where a backward has no plan. It sees
tensors of one dimension, rank by rank, in memory that it allocated itself, which costs a copy. What lies where in them
is ours alone: parameters as the unit's layout says, and flags for missing gradients behind the gradients of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, final

import torch

from ..backend import DONE, Group, ReduceOp, Work, WorkThen, not_compiled
from ..types import ProcessGroup, Tree

if TYPE_CHECKING:
    from torch.distributed import Work as TorchsWork

Hook: TypeAlias = Callable[[torch.Tensor], object]


class Comm(Protocol):
    """Sends messages as torch's AllGather and ReduceScatter do."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def __call__(self, **arguments: object) -> TorchsWork | None: ...


@dataclass(frozen=True)
class CustomComms:
    """Says what of a unit's messages is not sent here.

    Attributes:
        process_group: torch's, over which the others are sent.
        gather: sends values.
        scatter: sends gradients.
        sums: it forms sums, whose mean is formed here.
        hook: gets reduced gradients, and changes them in place.
    """

    process_group: ProcessGroup = None
    gather: Comm | None = None
    scatter: Comm | None = None
    sums: bool = False
    hook: Hook | None = None

    @property
    def are_custom(self) -> bool:
        """Whether any of it is sent, or changed, by somebody else."""
        return (self.gather, self.scatter, self.hook) != (None, None, None)

    def forms_means(self, dtype: torch.dtype) -> bool:
        """Whether torch asks for a mean of gradients of a dtype."""
        return dtype in (torch.float32, torch.bfloat16) and not self.sums


OWN = CustomComms()


def sent_by(comm: Comm, channel: Group, process_group: ProcessGroup) -> Group:
    """Returns what gathers or reduces by this in place of a channel."""
    return cast("Group", _CustomGroup(channel, comm, process_group))


@final
class _CustomGroup:
    """A unit's ranks, whose gathers or reductions are the user's; all else is the channel's."""

    def __init__(self, channel: Group, comm: Comm, process_group: ProcessGroup) -> None:
        self._channel, self._comm, self._process_group = channel, comm, process_group

    def __getattr__(self, name: str) -> Tree:
        return getattr(self._channel, name)

    @not_compiled
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """Gathers as :meth:`Group.all_gather_into`."""
        full, rank = self._like(output), self._channel.rank
        own = full[rank * shard.numel() : (rank + 1) * shard.numel()].copy_(shard)
        sent = self._comm(output_tensor=full, input_tensor=own, group=self._process_group, async_op=async_op)
        work = WorkThen(DONE if sent is None else _OfTorch(sent), lambda: output.copy_(full))
        if not async_op:
            work.wait()
        return work

    @not_compiled
    def reduce_scatter_into(
        self,
        shard: torch.Tensor,
        input: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Reduces as :meth:`Group.reduce_scatter_into`; at once, as torch calls it: it may add up what arrives."""
        given, result = self._like(input).copy_(input), self._like(shard)
        # names are the same
        sent = self._comm(
            output_tensor=result,
            input_tensor=given,
            group=self._process_group,
            op=getattr(torch.distributed.ReduceOp, op.name),
        )
        if sent is not None:
            sent.wait()
        shard.copy_(result)
        return DONE

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._comm.allocate((tensor.numel(),), dtype=tensor.dtype, device=tensor.device)
        return memory.view(-1)


@final
class _OfTorch(Work):
    """A work of torch's."""

    __slots__ = ("_work",)

    def __init__(self, work: TorchsWork) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def is_done(self) -> bool:
        return self._work.is_completed()
