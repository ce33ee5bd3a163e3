"""Collectives of the XLA backend: functional XLA operations whose results are copied into the outputs.

Everything is lazy: a call records operations, and nothing is sent before the graph runs. The returned work
is therefore always done, and ``async_op`` changes nothing.

Sizes: even ones keep the graph the same on all ranks. Uneven ones are padded to the largest; ranks then cut
pieces of different sizes out of the results, so their graphs differ, which only replicas on a CPU tolerate.

Legend: W world size of the group, S numel of one rank's part, P largest part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardkit.backend import DONE, Backend, Group, ReduceOp, Sizes, Work, check_members, is_group, size_of
from shardkit.errors import ConfigurationError
from shardkit.types import ProcessGroup

from ..eager import ObjectsOverBytes
from .meeting import ReplicaCall
from .pool import pack
from .runtime import Groups, Replica

_OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min"}


class XlaGroup(ObjectsOverBytes):
    """Ranks that communicate through XLA. See :class:`shardkit.backend.Group` for the methods."""

    def __init__(self, backend: Backend, replica: Replica, ranks: Sequence[int]) -> None:
        self.backend = backend
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(replica.rank)
        self.world_size = len(self.ranks)
        self._replica = replica
        self._position = torch.tensor([self.rank]).to(backend.device())  # data: graphs don't differ by it
        self._is_source: dict[int, Tensor] = {}  # for broadcasts; data as well
        self._siblings: list[tuple[int, ...]] = [self.ranks]
        self._cut: tuple[int, Groups] = (0, [])  # the groups of all replicas when there were so many siblings
        self._partitions: list[list[tuple[int, ...]]] = []  # of the sub-groups, see new_group

    def channel(self, name: str) -> XlaGroup:
        """Returns this group: the graph orders the collectives, there are no connections that could mix them."""
        return self

    def channels(self) -> list[XlaGroup]:
        return []

    def new_group(self, ranks: Sequence[int]) -> XlaGroup | None:
        """See :meth:`shardkit.backend.Group.new_group`.

        Members have the order that is given. On a TPU all ranks run the same program, so sub-groups must come as
        partitions (make ``[0, 1]`` and ``[2, 3]``, and use both at the same points).
        """
        check_members(self, ranks)
        self._exchange(f"new_group({list(ranks)})", "", b"")
        members = tuple(self.ranks[r] for r in ranks)
        # The first partition that has room: every rank of this group sees the same calls, so all agree.
        for partition in self._partitions:
            if not any(set(members) & set(other) for other in partition):
                break
        else:
            partition = []
            self._partitions.append(partition)
        partition.append(members)
        if self._replica.rank not in members:
            return None
        group = XlaGroup(self.backend, self._replica, members)
        group._siblings = partition
        return group

    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        self._check_device("all_gather_into", output, shard)
        widest = max(parts)
        if not widest:
            return DONE
        self._issue(f"all_gather_into({_describe(shard.dtype, parts)})", label)
        with torch.no_grad():
            sent = _pad(_flat(shard), widest)
            gathered = self._replica.collectives.all_gather(sent, self._groups(), self.world_size)
            _store(output, _cut(gathered, parts, widest))
        return DONE

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        self._check_device("reduce_scatter_into", shard, input)
        widest = max(parts)
        if not widest:
            return DONE
        self._issue(f"reduce_scatter_into({_describe(input.dtype, parts)}, {op.value})", label)
        with torch.no_grad():
            sent = _spread(_flat(input), parts, widest)
            reduce_scatter = self._replica.collectives.reduce_scatter
            reduced = reduce_scatter(sent, _OPS[op], self._groups(), self.world_size)
            _store(shard, self._averaged(_first(reduced, shard.numel()), op))
        return DONE

    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        """Exchanges the largest size on the host, where sizes are given."""
        self._check_device("all_to_all", output, input)
        widest = max(go)
        if not even:
            widest = max(int(w) for w in self.all_gather_bytes(str(widest).encode(), label=label))
        if not widest:
            return DONE
        self._issue(f"all_to_all({input.dtype}, {widest} each)".replace("torch.", ""), label)
        with torch.no_grad():
            sent, all_to_all = _spread(_flat(input), go, widest), self._replica.collectives.all_to_all
            received = all_to_all(sent, self._groups(), self.world_size, self._position)
            _store(output, _cut(received, come, widest))
        return DONE

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        return self._sum(f"all_reduce({_shape(tensor)}, {op.value})", tensor, op, label)

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        """Runs an all-reduce: XLA has no reduce to one rank, and all ranks have to run the same graph."""
        return self._sum(f"reduce({_shape(tensor)}, {op.value}, dst={dst})", tensor, op, label)

    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        """Issues a sum to which the other ranks add zero: XLA has no broadcast. The sign of a zero is lost."""
        self._check_device("broadcast", tensor)
        if tensor.numel():
            self._issue(f"broadcast({_shape(tensor)}, src={src})", label)
            if src not in self._is_source:
                self._is_source[src] = torch.tensor([self.rank == src]).to(tensor.device)
            with torch.no_grad():
                # where, not a product: what other ranks hold may be NaN
                sent = _flat(tensor).where(self._is_source[src], 0)
                _store(tensor, self._replica.collectives.all_reduce(sent, "sum", self._groups()))
        return DONE

    def barrier(self, *, label: str = "") -> None:
        """Runs what was recorded, then waits for all ranks."""
        self.backend.mark_step(wait=True)
        self._exchange("barrier", label, b"")

    def agree(self, what: str) -> None:
        """Lets all ranks compare it along with the program that they run next; on a TPU nothing does."""
        if self.world_size > 1:
            self._issue(f"agreement on {what}", "")

    def abort(self, why: str = "") -> None:
        """Drops the graph recorded since the last step: its tensors can't be read any more."""
        self._replica.host.abort()

    # -- helpers

    def _sum(self, what: str, tensor: Tensor, op: ReduceOp, label: str) -> Work:
        self._check_device(what, tensor)
        if tensor.numel():
            self._issue(what, label)
            with torch.no_grad():
                reduced = self._replica.collectives.all_reduce(_flat(tensor), _OPS[op], self._groups())
                _store(tensor, self._averaged(reduced, op))
        return DONE

    def _averaged(self, value: Tensor, op: ReduceOp) -> Tensor:
        return value / self.world_size if op is ReduceOp.AVG else value

    def _groups(self) -> Groups:
        siblings = len(self._siblings)
        if self._cut[0] != siblings:
            self._cut = siblings, self._replica.host.partition(self.ranks, self._siblings)
        return self._cut[1]

    def _issue(self, what: str, label: str) -> None:
        self._replica.host.issued(ReplicaCall(self.ranks, what, label, self._groups()))

    def _exchange(self, what: str, label: str, payload: bytes) -> list[bytes]:
        return self._replica.host.exchange(self.ranks, what, label, payload)

    def _pack(self, obj: object) -> bytes:
        """Pickles it; XLA tensors in it arrive on the receiver's device."""
        return pack(obj)

    def _check_device(self, what: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != "xla":
                raise ConfigurationError(
                    f"rank {self.rank}: {what} got a tensor on {tensor.device}; move it to "
                    f"{self.backend.device()} or use the backend of its device"
                )


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    if flat.dim() != 1:  # each operation costs while Python records a step
        flat = flat.reshape(-1)
    return flat.to(torch.uint8) if flat.dtype is torch.bool else flat


def _store(target: Tensor, flat: Tensor) -> None:
    target.detach().copy_(flat if target.dim() == 1 else flat.view(target.shape))


def _first(flat: Tensor, numel: int) -> Tensor:
    return flat if flat.numel() == numel else flat.narrow(0, 0, numel)


def _pad(flat: Tensor, numel: int) -> Tensor:
    missing = numel - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def _spread(flat: Tensor, sizes: Sequence[int], widest: int) -> Tensor:
    """[sum(sizes)] -> [W * P]: each part at the start of its slot."""
    if len(set(sizes)) == 1:
        return flat
    return torch.cat([_pad(part, widest) for part in flat.split(list(sizes))])


def _cut(slots: Tensor, sizes: Sequence[int], widest: int) -> Tensor:
    """[W * P] -> [sum(sizes)]: the inverse of :func:`_spread`."""
    if sum(sizes) == slots.numel():
        return slots
    return torch.cat([slots.narrow(0, i * widest, size) for i, size in enumerate(sizes)])


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")


def _describe(dtype: torch.dtype, sizes: Sequence[int]) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{name}[{sum(sizes)}]" if len(set(sizes)) == 1 else f"{name}{list(sizes)}"


def as_group(backend: Backend, replica: Replica, process_group: ProcessGroup) -> Group:
    """Returns the group for None, a torch.distributed group, or an object with ``rank()`` and ``size()``."""
    if process_group is None:
        if not replica.root:
            replica.root.append(XlaGroup(backend, replica, range(replica.world_size)))
        return replica.root[0]
    if is_group(process_group):
        return process_group
    ranks = _ranks_of(process_group, replica)
    if ranks == list(range(replica.world_size)):
        return as_group(backend, replica, None)
    if replica.rank not in ranks:
        raise ConfigurationError(
            f"rank {replica.rank} is no member of the process group with ranks {ranks}; "
            "build the wrapper on member ranks only, or pass a group that this rank is in"
        )
    key = tuple(ranks)
    if key not in replica.parts:
        replica.parts[key] = XlaGroup(backend, replica, ranks)
    return replica.parts[key]


def _ranks_of(process_group: ProcessGroup, replica: Replica) -> list[int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError(
                f"rank {replica.rank} is no member of the process group that was passed (torch.distributed "
                "gives non-members a placeholder); pass a group that this rank is in"
            )
        if isinstance(process_group, distributed.ProcessGroup):
            return distributed.get_process_group_ranks(process_group)
    size, rank = size_of(process_group), getattr(process_group, "rank", None)
    if size is None or rank is None:
        raise ConfigurationError(
            f"rank {replica.rank}: expected a process group, got {type(process_group).__name__}; pass None, a "
            "torch.distributed group, a shardkit Group, or an object with rank() and size()"
        )
    if size == 1:
        return [replica.rank]
    if size == replica.world_size and rank() == replica.rank:
        return list(range(size))
    raise ConfigurationError(
        f"rank {replica.rank}: can't tell the members of a {type(process_group).__name__} with size {size} and "
        f"rank {rank()} among {replica.world_size} replicas; pass a shardkit Group "
        "(Group.new_group) for a part of them"
    )
