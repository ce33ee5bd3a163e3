"""Common parts of device families; most are of those whose tensors own memory and whose operations run when called."""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.backend import DONE, Backend, Group, ReduceOp, Sizes, Work, check_member, check_members
from shardkit.errors import ConfigurationError
from shardkit.types import StateDict, T, Tree


class Host(Backend):
    """CPU tensors: nothing that overlaps, torch's default generator."""

    device_type = "cpu"

    def device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        return

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# ------------------------------------------------------------ torch.distributed's record of a process's groups
# ``_world``, where a process has several ranks: each its own.
def worlds_of_ranks(here: Callable[[], StateDict | None]) -> Tree:
    """Makes what takes the place of ``_world``: a rank begins without groups, as a process does.

    Args:
        here: returns what the calling rank has of it, which is filled; None for a caller that is no rank and has the
            process's own.
    """
    outside = dist.distributed_c10d._world

    def private(name: str) -> property:
        def get(_: object) -> Tree:
            values = here()
            if values is None:
                return getattr(outside, name)
            if name not in values:
                now = getattr(outside, name)
                values[name] = type(now)() if isinstance(now, int | dict | list) else None
            return values[name]

        def set_(_: object, value: object) -> None:
            values = here()
            if values is None:
                setattr(outside, name, value)
            else:
                values[name] = value

        return property(get, set_)

    kept = [name for name, value in vars(type(outside)).items() if isinstance(value, property)]
    # pg_config_info is computed from the others
    own = {name: private(name) for name in kept if name != "pg_config_info"}
    return type("WorldsOfRanks", (type(outside),), own)()


class ObjectsOverBytes(Group):
    """Exchanges objects as pickled bytes, so that ranks of one process share nothing."""

    @abc.abstractmethod
    def _exchange(self, what: str, label: str, data: bytes) -> list[bytes]:
        """Returns each rank's bytes, in group order; ``what`` has to be equal on all ranks."""

    def _pack(self, obj: object) -> bytes:
        return pickle.dumps(obj)

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        return list(self._exchange("all_gather_bytes", label, bytes(data)))

    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        return [pickle.loads(data) for data in self._exchange("all_gather_object", label, self._pack(obj))]

    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        check_member(self, "gather_object", dst)
        everything = self._exchange(f"gather_object(dst={dst})", label, self._pack(obj))
        return [pickle.loads(data) for data in everything] if self.rank == dst else None

    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T:
        check_member(self, "broadcast_object", src)
        data = self._pack(obj) if self.rank == src else b""
        return pickle.loads(self._exchange(f"broadcast_object(src={src})", label, data)[src])


# ------------------------------------------------------------ imagined ranks
# Rank 0 of as many as one likes, of which the others don't exist: for plans of models whose tensors have no values.
class ImaginedGroup(Group):
    """Carries nothing; what ranks say about themselves is the same on all."""

    def __init__(self, backend: Backend, ranks: Sequence[int]) -> None:
        self.backend = backend
        self.ranks = tuple(ranks)
        self.rank, self.world_size = 0, len(self.ranks)

    def _carry(self, operation: str, tensor: Tensor, async_op: bool, label: str) -> Work:
        """Does what each collective does."""
        return DONE

    def channel(self, name: str) -> ImaginedGroup:
        return self

    def channels(self) -> list[ImaginedGroup]:
        return []

    def new_group(self, ranks: Sequence[int]) -> ImaginedGroup | None:
        members = check_members(self, ranks)
        if self.rank not in members:
            return None
        return type(self)(self.backend, [self.ranks[r] for r in members])

    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        return self._carry("all_gather", output, async_op, label)

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        return self._carry("reduce_scatter", input, async_op, label)

    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        return self._carry("all_to_all", input, async_op, label)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        return self._carry("all_reduce", tensor, async_op, label)

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        return self._carry("reduce", tensor, async_op, label)

    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        return self._carry("broadcast", tensor, async_op, label)

    def barrier(self, *, label: str = "") -> None:
        return

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        return [data] * self.world_size

    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        return [obj] * self.world_size

    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        check_member(self, "gather_object", dst)
        return [obj] * self.world_size if dst == self.rank else None

    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T:
        check_member(self, "broadcast_object", src)
        return obj

    def agree(self, what: str) -> None:
        return

    def abort(self, why: str = "") -> None:
        return


class OneRank(ImaginedGroup):
    """A rank by itself: what it sends is what arrives."""

    def _keep(self, received: Tensor, sent: Tensor, *terms: object) -> Work:
        received.detach().copy_(sent.detach())
        return DONE

    _all_gather = _reduce_scatter = _all_to_all = _keep  # type: ignore[assignment]


@dataclass(frozen=True)
class RanksInName:
    """Stands for a process group whose other ranks can't be reached, where only FSDP's structure is wanted."""

    own_rank: int
    count: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.count


class GroupInName(ImaginedGroup):
    """One of several ranks, without the others: it is built with its own values, and all that needs theirs raises."""

    def __init__(self, backend: Backend, ranks: RanksInName) -> None:
        super().__init__(backend, range(ranks.count))
        self.rank = ranks.own_rank

    def _carry(self, operation: str, tensor: object, async_op: bool = False, label: str = "") -> NoReturn:
        raise ConfigurationError(
            f"rank {self.rank}: {operation}: this process group has {self.world_size} ranks in name only, for an FSDP "
            "module's structure, and can't communicate; pickle the module and load it in ranks of a process group, or "
            "give it one (module.process_group = group) of each FSDP module"
        )

    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        return DONE

    def all_gather_object(self, obj: T, *, label: str = "") -> NoReturn:
        self._carry("all_gather_object", obj)
