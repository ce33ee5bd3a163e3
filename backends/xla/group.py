"""Collectives of the XLA backend: functional XLA operations whose results are copied into the outputs.

Everything is lazy: a call records operations, and nothing is sent before the graph runs. The returned work
is therefore always done, and ``async_op`` changes nothing.

Sizes: even ones keep the graph the same on all ranks. Uneven ones are padded to the largest; ranks then cut
pieces of different sizes out of the results, so their graphs differ, which only replicas on a CPU tolerate.

Legend: W world size of the group, S numel of one rank's part, P largest part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardkit.backend import Group, ReduceOp, Work
from shardkit.errors import ConfigurationError

from .collectives import Collectives, replica_groups
from .meeting import Call
from .objects import pack, unpack

if TYPE_CHECKING:
    from .backend import XlaBackend


class Host(Protocol):
    """What a replica's group needs besides XLA's collectives."""

    def issued(self, call: Call) -> None:
        """A collective was added to the graph."""
        ...

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        """Each rank's payload, in group order."""
        ...

    def abort(self) -> None:
        """Drops what this replica has recorded and not run."""
        ...


@dataclass(frozen=True)
class Replica:
    """One rank of the job: its global rank, and its ways to the others."""

    rank: int
    world_size: int
    collectives: Collectives
    host: Host
    root: list[XlaGroup] = field(default_factory=list)  # the group of all ranks, once it was asked for


class _Done:
    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


_DONE = _Done()
_OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min"}


class XlaGroup:
    """Ranks that communicate through XLA. See :class:`shardkit.backend.Group` for the methods."""

    def __init__(self, backend: XlaBackend, replica: Replica, ranks: Sequence[int]) -> None:
        self._backend = backend
        self._replica = replica
        self._ranks = tuple(ranks)
        self._rank = self._ranks.index(replica.rank)
        self._position = torch.tensor([self._rank]).to(backend.device())  # data: graphs don't differ by it
        self._is_source: dict[int, torch.Tensor] = {}  # for broadcasts; data as well
        self._siblings: list[tuple[int, ...]] = [self._ranks]
        self._partitions: list[list[tuple[int, ...]]] = []  # of the sub-groups, see new_group

    @property
    def backend(self) -> XlaBackend:
        return self._backend

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def channel(self, name: str) -> XlaGroup:
        """This group: the graph orders the collectives, there are no connections that could mix them."""
        return self

    def new_group(self, ranks: Sequence[int]) -> XlaGroup | None:
        """See :meth:`shardkit.backend.Group.new_group`.

        On a TPU all ranks run the same program, so sub-groups must come as partitions (make
        ``[0, 1]`` and ``[2, 3]``, and use both at the same points).
        """
        ranks = list(ranks)
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.world_size)):
            raise ConfigurationError(
                f"rank {self._rank}: a sub-group of {self.world_size} ranks can't have the ranks {ranks}; "
                f"give distinct ranks of this group, 0 to {self.world_size - 1}"
            )
        self._exchange(f"new_group({ranks})", "", b"")
        members = tuple(self._ranks[r] for r in ranks)
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
        group = XlaGroup(self._backend, self._replica, members)
        group._siblings = partition
        return group

    def all_gather_into(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """[S] -> [N]"""
        parts = self._sizes("all_gather_into", output.numel(), sizes, shard.numel())
        self._check("all_gather_into", output, shard)
        widest = max(parts)
        if not widest:
            return _DONE
        self._issue(f"all_gather_into({_describe(shard.dtype, parts)})", label)
        with torch.no_grad():
            sent = _pad(_flat(shard), widest)
            gathered = self._replica.collectives.all_gather(sent, self._groups(), self.world_size)
            _store(output, _cut(gathered, parts, widest))
        return _DONE

    def reduce_scatter_into(
        self,
        shard: torch.Tensor,
        input: torch.Tensor,
        sizes: Sequence[int] | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """[N] -> [S]"""
        parts = self._sizes("reduce_scatter_into", input.numel(), sizes, shard.numel())
        self._check("reduce_scatter_into", shard, input)
        self._check_op(op, input.dtype)
        widest = max(parts)
        if not widest:
            return _DONE
        self._issue(f"reduce_scatter_into({_describe(input.dtype, parts)}, {op.value})", label)
        with torch.no_grad():
            sent = _spread(_flat(input), parts, widest)
            reduced = self._replica.collectives.reduce_scatter(
                sent, _OPS[op], self._groups(), self.world_size
            )
            _store(shard, self._averaged(_first(reduced, shard.numel()), op))
        return _DONE

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """[sum(input_sizes)] -> [sum(output_sizes)]. With sizes, ranks exchange the largest on the host."""
        given = output_sizes is not None or input_sizes is not None
        to = self._sizes("all_to_all (input)", input.numel(), input_sizes)
        come = self._sizes("all_to_all (output)", output.numel(), output_sizes)
        self._check("all_to_all", output, input)
        widest = max(to)
        if given:
            widest = max(int(w) for w in self.all_gather_bytes(str(widest).encode(), label=label))
        if not widest:
            return _DONE
        self._issue(f"all_to_all({input.dtype}, {widest} each)".replace("torch.", ""), label)
        with torch.no_grad():
            sent = _spread(_flat(input), to, widest)
            received = self._replica.collectives.all_to_all(
                sent, self._groups(), self.world_size, self._position
            )
            _store(output, _cut(received, come, widest))
        return _DONE

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Work:
        """In place, any shape."""
        return self._all_reduce(f"all_reduce({_shape(tensor)}, {op.value})", tensor, op, label)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """XLA has no reduce to one rank: an all-reduce, so that all ranks run the same graph."""
        self._member("reduce", dst)
        return self._all_reduce(f"reduce({_shape(tensor)}, {op.value}, dst={dst})", tensor, op, label)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False, label: str = "") -> Work:
        """A sum to which the other ranks add zero: XLA has no broadcast. The sign of a zero is lost."""
        self._member("broadcast", src)
        self._check("broadcast", tensor)
        if tensor.numel():
            self._issue(f"broadcast({_shape(tensor)}, src={src})", label)
            if src not in self._is_source:
                self._is_source[src] = torch.tensor([self._rank == src]).to(tensor.device)
            with torch.no_grad():
                # where, not a product: what other ranks hold may be NaN
                sent = _flat(tensor).where(self._is_source[src], 0)
                _store(tensor, self._replica.collectives.all_reduce(sent, "sum", self._groups()))
        return _DONE

    def barrier(self, *, label: str = "") -> None:
        """Runs what was recorded, then waits for all ranks."""
        self._backend.mark_step(wait=True)
        self._exchange("barrier", label, b"")

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        return [*self._exchange("all_gather_bytes", label, data)]

    def all_gather_object(self, obj: Any, *, label: str = "") -> list[Any]:
        """Each rank's picklable object. XLA tensors in it arrive on the receiver's device."""
        return [unpack(data) for data in self._exchange("all_gather_object", label, pack(obj))]

    def gather_object(self, obj: Any, dst: int, *, label: str = "") -> list[Any] | None:
        self._member("gather_object", dst)
        payloads = self._exchange(f"gather_object(dst={dst})", label, pack(obj))
        return [unpack(data) for data in payloads] if self._rank == dst else None

    def broadcast_object(self, obj: Any, src: int, *, label: str = "") -> Any:
        self._member("broadcast_object", src)
        payload = pack(obj) if self._rank == src else b""
        return unpack(self._exchange(f"broadcast_object(src={src})", label, payload)[src])

    def agree(self, what: str) -> None:
        """Nothing: all ranks compare what they are about to run anyway."""

    def abort(self, why: str = "") -> None:
        """Drops the graph recorded since the last step: its tensors can't be read any more."""
        self._replica.host.abort()

    # -- helpers

    def _all_reduce(self, what: str, tensor: torch.Tensor, op: ReduceOp, label: str) -> Work:
        self._check(what, tensor)
        self._check_op(op, tensor.dtype)
        if tensor.numel():
            self._issue(what, label)
            with torch.no_grad():
                reduced = self._replica.collectives.all_reduce(_flat(tensor), _OPS[op], self._groups())
                _store(tensor, self._averaged(reduced, op))
        return _DONE

    def _averaged(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        return value / self.world_size if op is ReduceOp.AVG else value

    def _groups(self) -> list[list[int]]:
        return replica_groups(self._ranks, self._siblings, self._replica.world_size)

    def _issue(self, what: str, label: str) -> None:
        self._replica.host.issued(Call(self._ranks, what, label))

    def _exchange(self, what: str, label: str, payload: bytes) -> list[bytes]:
        return self._replica.host.exchange(self._ranks, what, label, payload)

    def _member(self, what: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(
                f"rank {self._rank}: {what} with rank {rank}, but the group's ranks are 0 to "
                f"{self.world_size - 1} (ranks within the group, not global ones)"
            )

    def _check(self, what: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != "xla":
                raise ConfigurationError(
                    f"rank {self._rank}: {what} got a tensor on {tensor.device}; move it to "
                    f"{self._backend.device()} or use the backend of its device"
                )
        if len({t.dtype for t in tensors}) > 1:
            raise ConfigurationError(
                f"rank {self._rank}: {what} got input and output of different dtypes: "
                f"{[str(t.dtype) for t in tensors]}"
            )

    def _check_op(self, op: ReduceOp, dtype: torch.dtype) -> None:
        if op is ReduceOp.AVG and not dtype.is_floating_point:
            raise ConfigurationError(f"rank {self._rank}: AVG of {dtype} is not defined; use SUM and divide")

    def _sizes(self, what: str, numel: int, sizes: Sequence[int] | None, own: int | None = None) -> list[int]:
        """Each rank's numel, checked against the long side (``numel``) and this rank's part (``own``)."""
        parts = list(sizes) if sizes is not None else [numel // self.world_size] * self.world_size
        fits = len(parts) == self.world_size and sum(parts) == numel
        if not fits or (own is not None and parts[self._rank] != own):
            raise ConfigurationError(
                f"rank {self._rank}: {what} of {self.world_size} ranks got {numel} elements, "
                + (f"a shard of {own} elements and " if own is not None else "")
                + (f"sizes {list(sizes)}" if sizes is not None else "no sizes, so they must be even")
                + "; sizes must have one entry a rank, add up to all elements and fit this rank's shard"
            )
        return parts


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach()
    if flat.dim() != 1:  # each operation costs while Python records a step
        flat = flat.reshape(-1)
    return flat.to(torch.uint8) if flat.dtype is torch.bool else flat


def _store(target: torch.Tensor, flat: torch.Tensor) -> None:
    target.detach().copy_(flat if target.dim() == 1 else flat.view(target.shape))


def _first(flat: torch.Tensor, numel: int) -> torch.Tensor:
    return flat if flat.numel() == numel else flat.narrow(0, 0, numel)


def _pad(flat: torch.Tensor, numel: int) -> torch.Tensor:
    missing = numel - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def _spread(flat: torch.Tensor, sizes: Sequence[int], widest: int) -> torch.Tensor:
    """[sum(sizes)] -> [W * P]: each part at the start of its slot."""
    if len(set(sizes)) == 1:
        return flat
    return torch.cat([_pad(part, widest) for part in flat.split(list(sizes))])


def _cut(slots: torch.Tensor, sizes: Sequence[int], widest: int) -> torch.Tensor:
    """[W * P] -> [sum(sizes)]: the inverse of :func:`_spread`."""
    if sum(sizes) == slots.numel():
        return slots
    return torch.cat([slots.narrow(0, i * widest, size) for i, size in enumerate(sizes)])


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")


def _describe(dtype: torch.dtype, sizes: Sequence[int]) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{name}[{sum(sizes)}]" if len(set(sizes)) == 1 else f"{name}{list(sizes)}"


def as_group(backend: XlaBackend, replica: Replica, process_group: Any) -> Group:
    """The group for None, a torch.distributed group, or an object with ``rank()`` and ``size()``."""
    if process_group is None:
        if not replica.root:
            replica.root.append(XlaGroup(backend, replica, range(replica.world_size)))
        return replica.root[0]
    if callable(getattr(process_group, "all_gather_into", None)):
        return process_group  # a Group already: ours, or one that wraps it
    ranks = _ranks_of(process_group, replica)
    if ranks == list(range(replica.world_size)):
        return as_group(backend, replica, None)
    if replica.rank not in ranks:
        raise ConfigurationError(
            f"rank {replica.rank} is no member of the process group with ranks {ranks}; "
            "build the wrapper on member ranks only, or pass a group that this rank is in"
        )
    return XlaGroup(backend, replica, ranks)


def _ranks_of(process_group: Any, replica: Replica) -> list[int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError(
                f"rank {replica.rank} is no member of the process group that was passed (torch.distributed "
                "gives non-members a placeholder); pass a group that this rank is in"
            )
        if isinstance(process_group, distributed.ProcessGroup):
            return distributed.get_process_group_ranks(process_group)
    if not (hasattr(process_group, "rank") and hasattr(process_group, "size")):
        raise ConfigurationError(
            f"rank {replica.rank}: expected a process group, got {type(process_group).__name__}; pass None, a "
            "torch.distributed group, a shardkit Group, or an object with rank() and size()"
        )
    size = process_group.size()
    if size == 1:
        return [replica.rank]
    if size == replica.world_size and process_group.rank() == replica.rank:
        return list(range(size))
    raise ConfigurationError(
        f"rank {replica.rank}: can't tell the members of a {type(process_group).__name__} with size {size} and "
        f"rank {process_group.rank()} among {replica.world_size} replicas; pass a shardkit Group "
        "(Group.new_group) for a part of them"
    )
