"""Parameters in flat segments, one for each rank: where all ranks run one compiled graph ([Note: flat segments])."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from ...backend import Group
from ...errors import ConfigurationError
from ...reduction.norms import Portion
from ...reduction.unused import PutAside
from ...tracing.ranges import PublishRanges
from ...types import Kwargs, ParamGroup, Tree
from .base import Closure, Placement, State, by_dtype, gradients_of, published_between
from .flat_segment import FlatSegment
from .segment_state import gathered_state


@final
class InSegments(Placement):
    """A rank's optimizer updates one tensor for each group and dtype: the parameters that the rank owns, end to end.

    Args:
        update_dtype: what is updated is a copy of this dtype; None for the parameters' own.
        kind: of the segments.
    """

    def __init__(
        self, group: Group, owner: Mapping[nn.Parameter, int], wire_dtype: torch.dtype | None,
        update_dtype: torch.dtype | None = None, kind: type[FlatSegment] = FlatSegment,
    ) -> None:  # fmt: skip
        super().__init__(group, owner, wire_dtype)
        self._update_dtype, self._kind = update_dtype, kind

    def lay_out(self, groups: Sequence[ParamGroup]) -> None:
        """Puts parameters that became trainable into segments of their own; those that exist stay as they are."""
        known = {p for s in self.segments for p in s.params}
        channel = self.group.channel("parameters")
        for index, group in enumerate(groups):
            new = by_dtype(p for p in group["params"] if p.requires_grad and p not in known)
            for params in new.values():
                owners = [self._owner[p] for p in params]
                segment = self._kind(params, owners, channel, index, self._update_dtype)
                self.segments.append(segment)
        self.ranges = PublishRanges("updated parameters", self.group.ranks)

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [s.own for s in self.segments if s.param_group == index]

    # ------------------------------------------------------------ stepping
    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        """Parameters without a gradient keep values and state."""
        aside: list[PutAside | None] = []

        def put_aside() -> None:
            for segment in self.segments:
                if segment.was_written():
                    segment.take_values()
                segment.take_gradient()
            aside[:] = [_put_aside(s, optimizer) for s in self.segments]

        def put_back() -> None:
            for segment, before in zip(self.segments, aside, strict=False):
                if before is not None:
                    before.put_back(segment.own, optimizer.state[segment.own])
            aside.clear()

        if closure is None:
            put_aside()
            loss = optimizer.step(**kwargs)
        else:
            published = published_between(self.publish, closure)

            def evaluated() -> Tree:
                put_back()
                with torch.enable_grad():
                    loss = published()
                put_aside()
                return loss

            loss = optimizer.step(evaluated, **kwargs)
        put_back()
        for segment in self.segments:
            segment.mark_used_up()
        self.publish()
        return loss

    def publish(self) -> None:
        """See :meth:`Placement.publish`."""
        with self.ranges.gather():
            for segment in self.segments:
                segment.publish(self._wire_dtype)

    # ------------------------------------------------------------ gradients
    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        for segment in self.segments:
            segment.take_gradient()
        return gradients_of(optimizer)

    def clear_gradients(self) -> None:
        for segment in self.segments:
            segment.clear_gradient()

    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        if norm_type <= 0:
            raise ConfigurationError(
                f"norm_type={norm_type} is changed by zeros, which pad gradients on {self.group.backend.name}; take "
                "one above 0"
            )
        gradients = self.gradients(optimizer)
        return Portion(gradients, (self.group,)), gradients

    # ------------------------------------------------------------ state
    def keeps_state_of(self, param: nn.Parameter) -> bool:
        return self._kind.has_parts or self._owner[param] == self.group.rank

    def state_of_owned(self, optimizer: Optimizer) -> dict[nn.Parameter, State]:
        if self._kind.has_parts:
            whole = self.state_of_all(optimizer, True)
            return {p: state for p, state in whole.items() if self._owner[p] == self.group.rank}
        owned: dict[nn.Parameter, State] = {}
        for segment in self.segments:
            owned.update(split_state(segment, optimizer.state.get(segment.own, {})))
        return owned

    def state_of_all(self, optimizer: Optimizer, is_kept: bool) -> dict[nn.Parameter, State]:
        return gathered_state(self.segments, optimizer, self.group, is_kept)

    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        segments = {s.own: s for s in self.segments}
        params = [p for g in optimizer.param_groups for p in g["params"]]
        joined = [_joined_state(segments[p], loaded) for p in params]
        return {i: s for i, s in enumerate(joined) if s}


def _put_aside(segment: FlatSegment, optimizer: Optimizer) -> PutAside | None:
    used = segment.used()
    return None if used is None else PutAside(segment.own, optimizer.state.get(segment.own, {}), used)


def split_state(segment: FlatSegment, state: State) -> dict[nn.Parameter, State]:
    """What an optimizer has for a segment, as views that belong to the parameters here."""
    pieces: dict[nn.Parameter, State] = {p: {} for p in segment.split_own(segment.own.detach())}
    for key, value in state.items():
        spread = isinstance(value, torch.Tensor) and value.shape == segment.own.shape
        views = segment.split_own(value) if spread else dict.fromkeys(pieces, value)
        for p, piece in pieces.items():
            piece[key] = views[p]
    return {p: piece for p, piece in pieces.items() if piece}


def _joined_state(segment: FlatSegment, loaded: Mapping[nn.Parameter, State]) -> State:
    owned = list(segment.split_own(segment.own.detach()))
    have = {p: loaded[p] for p in owned if loaded.get(p)}
    if not have:
        # a rank that owns nothing still takes part in every step, so its state has to have the same shape
        example: State = next((s for s in loaded.values() if s), {})
        return {
            k: torch.zeros_like(segment.own) if isinstance(v, torch.Tensor) and v.dim() > 0 else v
            for k, v in example.items()
        }
    first = next(iter(have.items()))
    joined: State = {}
    for key, value in first[1].items():
        if isinstance(value, torch.Tensor) and value.shape == first[0].shape and value.dim() > 0:
            pieces = {p: have[p][key] if p in have else torch.zeros_like(p) for p in owned}
            joined[key] = segment.join_own(pieces)
        else:
            joined[key] = value
    return joined
