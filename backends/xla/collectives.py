"""The four XLA collectives everything else is made of, as functions from tensor to tensor.

Legend: W size of the group, S numel of one rank's part, all tensors 1-D.

:class:`NativeCollectives` is what a TPU runs. :class:`ChannelCollectives` is the same for replicas that are
threads of one process on a CPU:

[Note: channels] XLA:CPU matches the participants of a collective by the id of the compiled module, which
differs between replicas unless they share one executable; those without share would wait for ever. With a
channel id and ``use_global_device_ids`` it matches by (devices, kind of operation, channel id) instead, so
that replicas need not even run the same graph.

[Note: one order] All collectives may then carry the same channel id, and equal graphs get equal hashes at
once, if every replica runs them one after the other in the order they were issued. The compiler is free to
reorder what does not depend on each other. On a TPU, two collectives that ranks run in different orders wait for
each other for ever. So each collective is made to depend on the one before, of whichever group:
``where(never, previous, input)``, with ``never`` a value that the compiler can't know. Unlike adding zero
times the previous result (what torch_xla's own token does) this keeps NaN and infinity where they are. The order ends
with the program: the next one would run these collectives again for the sake of it, or start with an input that the
first one did not have.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch_xla
import torch_xla.core.xla_model as xm

Groups = list[list[int]]  # a partition of all replicas; the own group's rank order is the order of the list

_CHANNEL = 2  # 1 is what the all-reduce below always uses
_RUNTIME = torch_xla._XLAC
# As they are before torch_xla_api.py replaces them in a process with replicas.
_NATIVE = SimpleNamespace(
    all_gather=xm.all_gather,
    all_reduce=xm.all_reduce,
    all_to_all=xm.all_to_all,
    reduce_scatter=xm.reduce_scatter,
)


class Collectives(abc.ABC):
    """Collectives over the group of ``groups`` that the calling replica is in. ``op``: "sum", "max", "min".

    Each depends on the one before; see [Note: one order]. One object a replica.
    """

    def __init__(self) -> None:
        self._previous: torch.Tensor | None = None  # [1]
        # not a scalar: the compiler would be told its value
        self._never = torch.zeros(1, dtype=torch.bool).to(torch_xla.device())

    def synced(self) -> None:
        """Starts a new order: what was issued has been handed to the device."""
        self._previous = None

    @abc.abstractmethod
    def all_gather(self, value: torch.Tensor, groups: Groups, size: int) -> torch.Tensor:
        """[S] -> [W * S]"""
        ...

    @abc.abstractmethod
    def reduce_scatter(self, value: torch.Tensor, op: str, groups: Groups, size: int) -> torch.Tensor:
        """[W * S] -> [S]"""
        ...

    @abc.abstractmethod
    def all_reduce(self, value: torch.Tensor, op: str, groups: Groups) -> torch.Tensor: ...

    @abc.abstractmethod
    def all_to_all(self, value: torch.Tensor, groups: Groups, size: int, rank: torch.Tensor) -> torch.Tensor:
        """[W * S] -> [W * S]; ``rank`` within the group as an int64 tensor [1] on the device."""
        ...

    def _after_previous(self, value: torch.Tensor) -> torch.Tensor:
        # torch_xla adds 0 * (a previous result) to each collective's input to order them: one NaN or infinity
        # would spread to every later collective of the graph.
        _RUNTIME._set_all_reduce_token(_RUNTIME._xla_get_default_device(), None)
        previous = self._previous
        if previous is None or not _RUNTIME._check_tensor_need_materialization([previous])[0]:
            return value
        return torch.where(self._never, previous.to(value.dtype), value)

    def _issued(self, result: torch.Tensor) -> torch.Tensor:
        self._previous = result[:1].clone()  # a view would keep the whole result alive
        return result


class NativeCollectives(Collectives):
    """torch_xla's own. Layouts are not pinned: the pinned all-gather is an all-reduce of padded inputs."""

    def all_gather(self, value: torch.Tensor, groups: Groups, size: int) -> torch.Tensor:
        return self._issued(_NATIVE.all_gather(self._after_previous(value), 0, groups, pin_layout=False))

    def reduce_scatter(self, value: torch.Tensor, op: str, groups: Groups, size: int) -> torch.Tensor:
        value = self._after_previous(value)
        return self._issued(_NATIVE.reduce_scatter(op, value, 1.0, 0, size, groups, pin_layout=False))

    def all_reduce(self, value: torch.Tensor, op: str, groups: Groups) -> torch.Tensor:
        value = self._after_previous(value)
        return self._issued(_NATIVE.all_reduce(op, value, 1.0, groups, pin_layout=False))

    def all_to_all(self, value: torch.Tensor, groups: Groups, size: int, rank: torch.Tensor) -> torch.Tensor:
        value = self._after_previous(value)
        return self._issued(_NATIVE.all_to_all(value, 0, 0, size, groups, pin_layout=False))


class ChannelCollectives(Collectives):
    """Serves replicas on a CPU; see [Note: channels]."""

    def all_gather(self, value: torch.Tensor, groups: Groups, size: int) -> torch.Tensor:
        if not _uniform(groups):
            return self._irregular_all_gather(value, groups, size)
        value = self._after_previous(value)
        return self._issued(_RUNTIME._xla_all_gather(value, 0, size, groups, False, _CHANNEL, True))

    def reduce_scatter(self, value: torch.Tensor, op: str, groups: Groups, size: int) -> torch.Tensor:
        if not _uniform(groups):
            part = value.numel() // size
            return self.all_reduce(value, op, groups).narrow(0, _position(groups) * part, part)
        value = self._after_previous(value)
        token, _ = xm._get_all_reduce_token()
        result, _ = _RUNTIME._xla_reduce_scatter(
            op, value, token, 1.0, 0, size, groups, False, _CHANNEL, True
        )
        return self._issued(result)

    def all_reduce(self, value: torch.Tensor, op: str, groups: Groups) -> torch.Tensor:
        return self._issued(_RUNTIME._xla_spmd_all_reduce(op, self._after_previous(value), 1.0, groups))

    def all_to_all(self, value: torch.Tensor, groups: Groups, size: int, rank: torch.Tensor) -> torch.Tensor:
        # XLA's all-to-all takes no channel through torch_xla: gather everything and keep this rank's column.
        everything = self.all_gather(value, groups, size).view(size, size, -1)
        return everything.index_select(1, rank).reshape(-1)

    def _irregular_all_gather(self, value: torch.Tensor, groups: Groups, size: int) -> torch.Tensor:
        # XLA wants groups of one size, except in all-reduce.
        position = _position(groups)
        parts = [value if i == position else torch.zeros_like(value) for i in range(size)]
        return self.all_reduce(torch.cat(parts), "sum", groups)


def _uniform(groups: Groups) -> bool:
    return len({len(group) for group in groups}) == 1


def _position(groups: Groups) -> int:
    me = _RUNTIME._xla_get_default_device_ordinal()
    return next(group.index(me) for group in groups if me in group)


def replica_groups(members: Sequence[int], siblings: Sequence[Sequence[int]], world_size: int) -> Groups:
    """Returns all replicas, partitioned so that ``members`` is one group and the others are ``siblings`` if they fit.

    XLA wants every replica in exactly one group. Siblings (groups made beside this one) give all of them the
    same partition and so the same graph; if they don't cover the rest, the rest is cut into pieces of the
    same size where that is possible.
    """
    size, mine = len(members), set(members)
    rest = [r for r in range(world_size) if r not in mine]
    others = [list(s) for s in siblings if mine.isdisjoint(s)]
    if sorted(r for group in others for r in group) != rest:
        step = size if rest and len(rest) % size == 0 else max(len(rest), 1)
        others = [rest[i : i + step] for i in range(0, len(rest), step)]
    # In one order, whichever group asks: the order is part of the graph.
    return sorted([list(members), *others], key=min)
