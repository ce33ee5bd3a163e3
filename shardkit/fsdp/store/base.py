"""What every store of a flat parameter's values does.

Legend: W world size, S shard numel, N numel of all original parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from ...backend import Work
from ..flat_values import taken_apart, unpacked
from ..originals import FlatParamLike, ReleasedParameter
from .states import FULL, GATHERED, GATHERING, LOCKED, RELEASED, SUMMONED, State

_version_of = attrgetter("param._version")


class Gather(NamedTuple):
    """An all-gather in flight."""

    work: Work
    output: torch.Tensor  # [W * S]


def is_whole(flat: FlatParamLike) -> bool:
    """Whether this rank's shard has all values, as they are computed with."""
    p = flat.param
    return flat.group.world_size == 1 and p.dtype == flat.compute_dtype and p.device == flat.compute_device


class Store(ABC):
    """Where the values of one flat parameter are, and what its original parameters see of them.

    Attributes:
        state: see ``states.py``.
        memory: identifies what original parameters are views of, where that is given back after use; else 0.
        in_flight: the gathering that nobody has waited for.
        keeps_shapes: original parameters have their shapes while they have no values.
        is_whole: this rank's shard has all values, as they are computed with.
        summoned: all values in full precision, [W * S], while they are what original parameters are views of.
    """

    keeps_shapes = True

    def __init__(self, flat: FlatParamLike) -> None:
        self._flat = flat
        self._originals = flat.originals
        self._layout = flat.layout
        self._group = flat.group
        self._backend = flat.group.backend
        self._channel = flat.group.channel("parameters")
        self._dtype, self._device = flat.compute_dtype, flat.compute_device
        self._versions: list[int] = []  # of original parameters, when they got their values
        self.is_whole = is_whole(flat)
        self.state: State = RELEASED
        self.memory = 0
        self.summoned: torch.Tensor | None = None
        self.in_flight: Gather | None = None

    def _gather(
        self, full: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False, label: str = ""
    ) -> Work:
        """All ranks' shards, over the channel for parameters."""
        if self._flat.hears is not None:
            self._flat.hears(full, shard)
        return self._channel.all_gather_into(full, shard, async_op=async_op, label=label)

    def fits(self) -> bool:
        """Whether it can serve on after the shard's device or dtype, or the group, may have changed."""
        return False

    @property
    @abstractmethod
    def gathered(self) -> torch.Tensor:
        """What original parameters are views of, [W * S]; it may have no memory now."""

    # ------------------------------------------------------------ transitions
    @abstractmethod
    def attach(self) -> None:
        """Original parameters are this store's from now on, and released."""

    @abstractmethod
    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        """From released or kept to gathering (collective), or to gathered where there is nothing to wait for."""

    def finish(self) -> None:
        """From gathering to gathered."""
        gather, self.in_flight = self.in_flight, None
        if gather is not None:  # else it has failed, and there are no values
            with self._flat.ranges.gather_wait():
                gather.work.wait()
            self.state = GATHERED
            self._arrive(gather.output)

    def lock(self) -> None:
        """From gathered to locked."""
        if self.state is GATHERED:
            self.state = LOCKED
            self._conceal()

    def unlock(self) -> None:
        """From locked to gathered."""
        self.state = GATHERED
        self._reveal()

    def release(self, until_backward: bool = False) -> None:
        """To released, from wherever values are in use; to kept, with ``until_backward``, if there is a mesh for it."""
        if self.state not in FULL:
            return
        if self.state is GATHERING:
            self.finish()  # its memory is in use until it is through
        self.state = self._free(until_backward and self.state is not GATHERING)

    def forget_kept(self) -> None:
        """From kept to released: the shards may have changed."""
        self.state = RELEASED

    @abstractmethod
    def _arrive(self, values: torch.Tensor) -> None:
        """These have been gathered, [W * S]: original parameters have their values."""

    @abstractmethod
    def _free(self, keep: bool) -> State:
        """Nobody needs the values here; with ``keep``, a mesh may keep them. Returns the state that it is then."""

    # ------------------------------------------------------------ what original parameters see
    def show(self, values: torch.Tensor) -> None:
        """Original parameters become views of this, [N] or more."""
        for original, piece in zip(self._originals, taken_apart(values, self._layout), strict=True):
            # a view less: where execution is lazy, this runs in each step
            original.param.data = piece if len(original.shape) == 1 else piece.view(original.shape)

    def _reveal(self) -> None:
        """They are parameters like any other."""
        for original in self._originals:
            original.param.__class__ = original.kind
        try:
            self._versions = list(map(_version_of, self._originals))
        except RuntimeError:  # of inference tensors
            self._versions = []

    def _conceal(self) -> None:
        """They have no values from now on (see ``originals.py``); notes which of them were written to meanwhile."""
        before = self._versions
        if before:
            now = list(map(_version_of, self._originals))
            self._flat.written = [k for k, v in enumerate(now) if v != before[k]] if now != before else []
            self._versions = []
        for original in self._originals:
            original.param.__class__ = ReleasedParameter

    # ------------------------------------------------------------ full precision
    def summon(self) -> torch.Tensor:
        """From released or kept to summoned (collective); returns the values, which are to be shown."""
        self.summoned = self.gather_full_precision()
        self.state = SUMMONED
        self._reveal()
        return self.summoned

    @torch.no_grad()
    def gather_full_precision(self) -> torch.Tensor:
        """All values in the shard's dtype, [W * S], on the compute device (collective)."""
        shard = self._flat.param.data.contiguous().view(-1).to(self._device)
        if self._group.world_size == 1 or shard.is_meta:
            return shard.new_empty(self._layout.padded_numel) if shard.is_meta else shard.clone()
        full = shard.new_empty(self._layout.padded_numel)
        with self._flat.ranges.summon():
            self._gather(full, shard, label=f"{self._flat.label} in full precision")
        return unpacked(full, self._layout)

    @torch.no_grad()
    def collect(self, values: torch.Tensor) -> None:
        """Copies original parameters to where they belong in [N or more], unless they are views of it."""
        for original, start in zip(self._originals, self._layout.offsets(), strict=True):
            data = original.param.data
            mine = values[start : start + original.shape.numel()]
            if not self._backend.has_storage or data.data_ptr() != mine.data_ptr():
                mine.copy_(data.reshape(-1))
