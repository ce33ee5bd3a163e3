"""Parameters of an optimizer, each owned whole by one rank, and how owners publish what they updated.

Legend: W world size, N numel of a flat buffer, S numel of one rank's segment.

[Note: flat parameters] Where tensors have storage, all trainable parameters of one dtype become views
into one flat buffer, grouped by owner. The optimizer of a rank works on its own parameters in place; the
all-gather that follows writes straight into everybody's parameters, and nothing is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .backend import Group, Work
from .errors import ConfigurationError, RankMismatchError
from .facts import all_gather_facts, as_fact
from .layout import segment_layout


def by_dtype(params: Iterable[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    """Parameters in order, grouped by dtype."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in params:
        groups.setdefault(p.dtype, []).append(p)
    return groups


def strided_view(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A view of ``flat`` at ``offset`` with the shape of ``like``, and its strides where they are dense."""
    return flat.as_strided(like.shape, dense_strides(like), flat.storage_offset() + offset)


def dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides where its elements fill their memory (channels-last, say), else contiguous ones."""
    return like.stride() if _is_dense(like) else _contiguous_strides(like.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


class FlatParameters:
    """Trainable parameters of one dtype as views into one buffer [N] grouped by owner."""

    def __init__(self, params: Sequence[nn.Parameter], owners: Sequence[int], group: Group) -> None:
        self.params = list(params)
        self._group = group
        self._layout = segment_layout([p.numel() for p in params], owners, group.world_size)
        self._pointers: list[int] = []
        self._build()

    @torch.no_grad()
    def _build(self) -> None:
        first = self.params[0]
        self._buffer = torch.empty(self._layout.numel, dtype=first.dtype, device=first.device)
        for p, slot in zip(self.params, self._layout.slots, strict=True):
            view = strided_view(self._buffer, p, slot.offset)
            view.copy_(p)
            p.data = view
        self._own = self.segment(self._group.rank)
        self._pointers = [p.data_ptr() for p in self.params]

    def segment(self, rank: int) -> torch.Tensor:
        """A rank's part of the buffer, [S]."""
        start = self._layout.start(rank)
        return self._buffer[start : start + self._layout.sizes[rank]]

    def publish(self, wire_dtype: torch.dtype | None) -> Work | None:
        """Starts the all-gather of every owner's segment into everybody's parameters."""
        if [p.data_ptr() for p in self.params] != self._pointers:
            # somebody moved the module or put new tensors in: take their values, then share them
            self._build()
        if self._group.world_size == 1 and wire_dtype is None:
            return None
        if wire_dtype is None or self._buffer.dtype != torch.float32:
            return self._group.all_gather_into(
                self._buffer, self._own, self._layout.sizes, async_op=True, label="updated parameters"
            )
        wire = torch.empty_like(self._buffer, dtype=wire_dtype)
        start = self._layout.start(self._group.rank)
        own = wire[start : start + self._own.numel()]
        own.copy_(self._own)
        work = self._group.all_gather_into(
            wire, own, self._layout.sizes, async_op=True, label=f"updated parameters in {wire_dtype}"
        )
        return _CopyAfter(work, wire, self._buffer)


class _CopyAfter:
    """Work whose result is copied (and cast) into another tensor."""

    def __init__(self, work: Work, source: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._source, self._target = work, source, target

    def is_done(self) -> bool:
        return self._work.is_done()

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            self._target.copy_(self._source)


def check_same_everywhere(group: Group, facts: list[tuple[str, Any]], what: str) -> None:
    """Compares a list of (name, value) facts between ranks; raises on all of them at the first difference.

    Raises:
        RankMismatchError: names the first differing fact and each rank's value.
    """
    if group.world_size == 1:
        return
    facts = [(name, as_fact(value)) for name, value in facts]
    everybody = all_gather_facts(group.channel("control"), facts, label=f"check of {what}")
    reference = everybody[0]
    for rank, other in enumerate(everybody):
        if other == reference:
            continue
        for i in range(max(len(reference), len(other))):
            mine = reference[i] if i < len(reference) else ("nothing", "-")
            theirs = other[i] if i < len(other) else ("nothing", "-")
            if mine != theirs:
                remedy = "Build the same model in the same order on every rank"
                if _OPTION in (mine[0].partition(" ")[0], theirs[0].partition(" ")[0]):
                    remedy = "Pass the same options on every rank"
                raise RankMismatchError(
                    f"{what} differ between ranks: at position {i} rank {group.ranks[0]} has {mine[0]} "
                    f"{mine[1]}, rank {group.ranks[rank]} has {theirs[0]} {theirs[1]}. {remedy} (this rank is "
                    f"{group.ranks[group.rank]})."
                )


def shape_fact(tensor: torch.Tensor) -> Any:
    """A shape as a fact for :func:`check_same_everywhere`; lazy modules have none before their first forward."""
    return "no shape yet" if is_lazy(tensor) else tuple(tensor.shape)


def refuse_lazy(facts: list[tuple[str, Any]], what: str) -> None:
    """Raises ConfigurationError if one of these facts, alike on all ranks, is a tensor without a shape."""
    lazy = [n for n, value in facts if isinstance(value, tuple) and value[0] == "no shape yet"]
    if lazy:
        raise ConfigurationError(
            f"{what} was given {', '.join(lazy[:3])}{', ...' if len(lazy) > 3 else ''}, which have no shape before "
            "their module's first forward (lazy modules). Run one forward on example inputs, alike on all ranks, first"
        )


_OPTION = "option"


def option_facts(**options: Any) -> list[tuple[str, Any]]:
    """Options as facts for :func:`check_same_everywhere`, in text; those of a dataclass one by one."""
    facts: list[tuple[str, Any]] = []
    for name, value in options.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f"{name}.{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
            facts += option_facts(**parts)
        else:
            facts.append((f"{_OPTION} {name}", _in_words(value)))
    return facts


def _in_words(value: Any) -> str:
    """A value as text that is the same on all ranks if the value is."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.device.type == "cpu" else f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join([_in_words(v) for v in value])})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_in_words(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return str(value)
    plain = getattr(value, "func", value)  # functools.partial
    kind = plain if callable(plain) and hasattr(plain, "__qualname__") else type(plain)
    return f"{kind.__module__}.{kind.__qualname__}"


def check_one_device(params: Iterable[nn.Parameter]) -> None:
    """Raises ConfigurationError unless all parameters are on one device."""
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ConfigurationError(
            f"the parameters are on several devices: {', '.join(devices)}. Move the module to one device before "
            "sharding it; a model spread over devices needs one optimizer for each."
        )
