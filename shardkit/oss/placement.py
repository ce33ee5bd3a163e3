"""Placements: where an optimizer's parameters are updated, and how all ranks get the result.

Legend: W world size, N numel of a flat buffer, S numel of one rank's segment.

[Note: flat parameters] Where tensors have storage, all trainable parameters of one dtype become views
into one flat buffer, grouped by owner. The optimizer of a rank works on its own parameters in place; the
all-gather that follows writes straight into everybody's parameters, and nothing is copied.
"""

from __future__ import annotations

import copy
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import nn, optim
from torch.optim import Optimizer

from ..backend import Group, ReduceOp, Work, WorkThen, callees_compiled, not_compiled
from ..errors import ConfigurationError
from ..layout import alignment, segment_layout
from ..optimizer_state.forms import gather_states
from ..optimizer_state.kinds import PutAside, Slot, Span, is_elementwise
from ..optimizers.elementwise import is_known_elementwise, names_of_elementwise
from ..reduction.compression import ChangedParts
from ..reduction.shard_gradients import Portion
from ..torch_seams.tensors import alike, strided_view
from ..tracing.ranges import Ranges
from ..tracing.tracer import training_begins
from ..types import Kwargs, ParamGroup, StateDict, Tree
from .segments import MASTER, FlatSegment

Closure = Callable[[], Tree]
State = StateDict
logger = logging.getLogger("shardkit")


class Placement(ABC):
    """Says which tensors the optimizer of this rank updates; chosen once, when the OSS is built.

    Args:
        owner: the rank that owns each parameter; it grows with the optimizer.
        wire_dtype: dtype in which updated fp32 parameters travel; None for their own.
        update_dtype: what is updated is a copy of this dtype; None for the parameters' own.
        kind: of segments, where there are any.
        sends_changes: of what was updated, only what has changed travels.

    Attributes:
        name: of the optimizer, among all of these ranks; before :meth:`lay_out`.
        runs_whole: every rank updates all parameters.
        segments: the flat segments that stand in for parameters, if any.
    """

    runs_whole = False

    def __init__(
        self,
        group: Group,
        owner: Mapping[nn.Parameter, int],
        wire_dtype: torch.dtype | None,
        update_dtype: torch.dtype | None,
        kind: type[FlatSegment],
        sends_changes: bool,
    ) -> None:
        self.group, self.name = group, ""
        self.segments: list[FlatSegment] = []
        self._owner, self._kind, self.sends_changes = owner, kind, sends_changes
        self._wire_dtype, self._update_dtype = wire_dtype, update_dtype
        training_begins(group)

    # ------------------------------------------------------------ values
    @abstractmethod
    def lay_out(self, groups: Sequence[ParamGroup], pending: Collection[nn.Parameter]) -> None:
        """Takes what the next step updates into buffers: trainable or ``pending`` gradients; again where it changes."""

    @abstractmethod
    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Returns what the optimizer of this rank updates of a param group."""

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        """Steps this rank's optimizer and lets all ranks have the result (collective); what that step returns."""

    def publish(self) -> None:
        """Lets all ranks have what this rank's optimizer has changed outside of a step (collective)."""
        return

    # ------------------------------------------------------------ gradients
    @abstractmethod
    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Returns the gradients that the step of this rank will read."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Clears gradients that parameters themselves don't show."""

    @abstractmethod
    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        """Returns the gradients whose norm counts, and those that are scaled by it."""

    # ------------------------------------------------------------ state
    @abstractmethod
    def keeps_state_of(self, param: nn.Parameter) -> bool:
        """Says whether this rank's optimizer needs the state of a parameter."""

    @abstractmethod
    def state_of_owned(self, optimizer: Optimizer) -> dict[nn.Parameter, State]:
        """Returns the state of each parameter that this rank answers for: each is answered for by one rank."""

    def state_of_all(self, optimizer: Optimizer, is_kept: bool) -> dict[nn.Parameter, State] | None:
        """Returns the same of all parameters, where it ``is_kept``, without Python objects that ranks send each other
        (collective); None if there is no such way."""
        return None

    @abstractmethod
    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        """Does the reverse: returns state by the index that it has in this rank's optimizer."""


class OfParameters(Placement):
    """The optimizer of this rank updates parameters themselves, which show all gradients and have all state."""

    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return gradients_of(optimizer)

    def clear_gradients(self) -> None:
        """Clears all that parameters show."""

    def state_of_owned(self, optimizer: Optimizer) -> dict[nn.Parameter, State]:
        state: Tree = optimizer.state
        # AdaScale's state is under a name
        return {
            p: s
            for p, s in state.items()
            if not isinstance(p, str) and s and self._owner.get(p, self.group.rank) == self.group.rank
        }

    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        return {i: _laid_out_like(p, loaded[p]) for i, p in enumerate(params) if loaded.get(p)}


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the gradients of what an optimizer updates."""
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def _laid_out_like(param: nn.Parameter, state: State) -> State:
    """Returns state with the parameter's strides: fused optimizers walk memory, whatever order a checkpoint had."""
    fitted = dict(state)
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.shape == param.shape
            and value.stride() != param.stride()
        ):
            fitted[key] = torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
    return fitted


def published_between(publish: Callable[[], None], closure: Closure) -> Closure:
    """Returns the closure, which sees what all ranks have updated since it was last evaluated in the same step."""
    is_first = True

    def evaluated() -> Tree:
        nonlocal is_first
        if not is_first:
            publish()
        is_first = False
        return closure()

    return evaluated


class FlatParameters:
    """Trainable parameters of one dtype as views into one buffer [N] grouped by owner."""

    def __init__(self, params: Sequence[nn.Parameter], owners: Sequence[int], of: OwnedParameters) -> None:
        self.params, self._sends_changes = list(params), of.sends_changes
        self._group, self._label = of.group.channel("parameters"), f"updated parameters of {of.name}"
        step = alignment(params[0].element_size())
        self._layout = segment_layout([p.numel() for p in params], owners, of.group.world_size, step=step)
        self._pointers: list[int] = []
        self._build()

    @torch.no_grad()
    def _build(self) -> None:
        first = self.params[0]
        self._buffer = torch.empty(self._layout.numel, dtype=first.dtype, device=first.device)
        for p, piece in zip(self.params, self._layout.pieces, strict=True):
            view = strided_view(self._buffer, p, self._layout.start(piece.rank) + piece.offset)
            view.copy_(p)
            p.data = view
        self._own = self.segment(self._group.rank)
        self._pointers = [p.data_ptr() for p in self.params]
        self._changed = ChangedParts(self._group, self._buffer, self._layout.sizes)

    def segment(self, rank: int) -> torch.Tensor:
        """Returns a rank's part of the buffer, [S]."""
        start = self._layout.start(rank)
        return self._buffer[start : start + self._layout.sizes[rank]]

    def publish(self, wire_dtype: torch.dtype | None) -> Work | None:
        """Starts the all-gather of every owner's segment into everybody's parameters."""
        if [p.data_ptr() for p in self.params] != self._pointers:
            # somebody moved the module or put new tensors in: take their values, then share them
            self._build()
        if self._group.world_size == 1 and wire_dtype is None:
            return None
        if self._sends_changes:
            return self._changed.send(self._label)
        if wire_dtype is None or self._buffer.dtype != torch.float32:
            return self._group.all_gather_into(
                self._buffer, self._own, self._layout.sizes, async_op=True, label=self._label, with_own=False
            )
        wire = torch.empty_like(self._buffer, dtype=wire_dtype)
        start = self._layout.start(self._group.rank)
        own = wire[start : start + self._own.numel()]
        own.copy_(self._own)
        work = self._group.all_gather_into(
            wire, own, self._layout.sizes, async_op=True, label=f"{self._label} in {wire_dtype}"
        )
        return WorkThen(work, lambda: self._buffer.copy_(wire))


@final
class OwnedParameters(OfParameters):
    """A rank's optimizer updates the parameters that the rank owns.

    Attributes:
        buffers: what the trainable parameters are views of, one for each dtype.
    """

    buffers: Sequence[FlatParameters] = ()
    ranges: Ranges

    def lay_out(self, groups: Sequence[ParamGroup], pending: Collection[nn.Parameter]) -> None:
        trainable = list(alike(p for g in groups for p in g["params"] if p.requires_grad or p in pending))
        self.buffers = [FlatParameters(ps, [self._owner[p] for p in ps], self) for ps in trainable]
        nbytes = sum(p.numel() * p.element_size() for ps in trainable for p in ps)
        self.ranges = Ranges("updated parameters", self.group.ranks, gather=nbytes)

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in params if self._owner[p] == self.group.rank]

    @callees_compiled
    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        with self.ranges.update():
            if closure is None:
                loss = optimizer.step(**kwargs)
            else:
                loss = optimizer.step(published_between(self.publish, closure), **kwargs)
        self.publish()
        return loss

    @not_compiled
    def publish(self) -> None:
        with self.ranges.gather():
            works = [buffer.publish(self._wire_dtype) for buffer in self.buffers]
        with self.ranges.gather_wait():
            for work in works:
                if work is not None:
                    work.wait()

    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        everywhere = [p.grad for p in params if p.grad is not None]
        return Portion(gradients_of(optimizer), (self.group,)), everywhere

    def keeps_state_of(self, param: nn.Parameter) -> bool:
        return self._owner[param] == self.group.rank


@final
class OnEveryRank(OfParameters):
    """Every rank's optimizer updates all parameters; owners only answer for the state that is saved.

    LBFGS couples all parameters. Where ranks have to run one compiled graph (``even_shards_only``), optimizers work on
    flat segments, so there everything that is not known to be element-wise runs whole as well.
    """

    runs_whole = True

    def lay_out(self, groups: Sequence[ParamGroup], pending: Collection[nn.Parameter]) -> None:
        """Leaves parameters as they are."""

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return list(params)

    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        """Steps with the mean of all ranks' losses, so that all ranks take the same decisions."""
        if closure is None:
            return optimizer.step(**kwargs)

        def mean_loss() -> Tree:
            loss = closure()
            if not isinstance(loss, torch.Tensor):
                return loss
            mean = loss.detach().clone()
            self.group.channel("parameters").all_reduce(mean, op=ReduceOp.AVG, label="loss of the closure")
            return mean

        return optimizer.step(mean_loss, **kwargs)

    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        return Portion(gradients_of(optimizer), ()), [p.grad for p in params if p.grad is not None]

    def keeps_state_of(self, param: nn.Parameter) -> bool:
        return True

    def state_of_all(self, optimizer: Optimizer, is_kept: bool) -> dict[nn.Parameter, State]:
        # where that is a collective, ranks that do not read take part
        self.group.backend.mark_step(wait=True)
        state: Tree = optimizer.state
        return {p: s for p, s in state.items() if not isinstance(p, str) and s} if is_kept else {}


@torch.no_grad()
def gathered(segment: FlatSegment, own: torch.Tensor, is_kept: bool) -> list[torch.Tensor]:
    """Gathers what ranks have, [S], of each parameter, on the CPU where it ``is_kept`` (collective)."""
    group, full = segment.group, own
    if group.world_size > 1:
        full = own.new_empty(segment.layout.numel)
        group.all_gather_into(full, own, label="optimizer state")
        group.backend.mark_step(wait=True)  # ranks that do not read it take part, too
    return segment.split(full.cpu()) if is_kept else []


@final
class InSegments(Placement):
    """A rank's optimizer updates one tensor for each group and dtype: the parameters that the rank owns, end to end."""

    def lay_out(self, groups: Sequence[ParamGroup], pending: Collection[nn.Parameter]) -> None:
        """Puts parameters that became trainable into segments of their own; those that exist stay as they are."""
        known = {p for s in self.segments for p in s.params}
        channel = self.group.channel("parameters")
        for index, group in enumerate(groups):
            moved = (p for p in group["params"] if p not in known and (p.requires_grad or p in pending))
            for params in alike(moved):
                owners = [self._owner[p] for p in params]
                self.segments.append(self._kind(params, owners, channel, index, self._update_dtype))
        self.ranges = Ranges("updated parameters", self.group.ranks)

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [s.own for s in self.segments if s.param_group == index]

    # ------------------------------------------------------------ stepping
    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        """Steps; parameters without a gradient keep values and state."""
        aside: list[PutAside | None] = []

        def put_aside() -> None:
            for segment in self.segments:
                segment.take_values(if_written=True)
                segment.take_gradient()
                segment.check_counts(optimizer)
                used, state = segment.used(), optimizer.state.get(segment.own, {})
                aside.append(None if used is None else PutAside(segment.own, state, used))

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
        self.publish()
        return loss

    def publish(self) -> None:
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
            owned.update(split_state(segment, self._state_of(segment, optimizer)))
        return owned

    def state_of_all(self, optimizer: Optimizer, is_kept: bool) -> dict[nn.Parameter, State]:
        slots = []
        for segment in self.segments:
            spans = tuple(Span("", p.shape, None, False) for p in segment.params)
            join = functools.partial(gathered, segment)
            slots.append(Slot(segment.own, spans, True, (), self.group, join, segment.owners))
        states = gather_states(slots, [self._state_of(s, optimizer) for s in self.segments], is_kept)
        return {
            p: state
            for segment, found in zip(self.segments, states, strict=True)
            for p, state in zip(segment.params, found, strict=True)
            if state
        }

    def _state_of(self, segment: FlatSegment, optimizer: Optimizer) -> State:
        state: State = optimizer.state.get(segment.own, {})
        return {**state, MASTER: segment.own.detach()} if segment.has_masters else state

    @torch.no_grad()
    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        for s in self.segments:
            if s.has_masters:
                masters = s.split_own(s.own.detach())
                masters = {p: loaded.get(p, {}).pop(MASTER, value) for p, value in masters.items()}
                s.own.copy_(s.join_own(masters))
        segments = {s.own: s for s in self.segments}
        params = [p for g in optimizer.param_groups for p in g["params"]]
        joined = [_joined_state(segments[p], loaded) for p in params]
        return {i: s for i, s in enumerate(joined) if s}


def split_state(segment: FlatSegment, state: State) -> dict[nn.Parameter, State]:
    """Cuts an optimizer's state of a segment into views that belong to the parameters here."""
    pieces: dict[nn.Parameter, State] = {p: {} for p in segment.split_own(segment.own.detach())}
    for key, value in state.items():
        spread = is_elementwise(key, value, segment.own.shape)
        views = segment.split_own(value) if spread else dict.fromkeys(pieces, value)
        for p, piece in pieces.items():
            piece[key] = views[p]
    return {p: piece for p, piece in pieces.items() if piece}


def _joined_state(segment: FlatSegment, loaded: Mapping[nn.Parameter, State]) -> State:
    owned = list(segment.split_own(segment.own.detach()))
    have = {p: loaded[p] for p in owned if loaded.get(p)}
    if not have:
        # a rank that owns nothing still takes part in every step, so its state has to have the same shape
        like, example = next(((p, s) for p, s in loaded.items() if s), (segment.own, {}))
        return {
            k: torch.zeros_like(segment.own) if is_elementwise(k, v, like.shape) else copy.deepcopy(v)
            for k, v in example.items()
        }
    first = next(iter(have.items()))
    joined: State = {}
    for key, value in first[1].items():
        if is_elementwise(key, value, first[0].shape):
            pieces = {p: have[p][key] if p in have else torch.zeros_like(p) for p in owned}
            joined[key] = segment.join_own(pieces)
        else:
            joined[key] = copy.deepcopy(value)  # counted by itself, whoever else has it
    return joined


def placement_for(
    optimizer_class: object,
    even_shards_only: bool,
    update_dtype: torch.dtype | None = None,
    kind: type[FlatSegment] = FlatSegment,
    sends_changes: bool = False,
) -> type[Placement]:
    """Chooses the placement of an optimizer's parameters; warns if state is not sharded though the class might shard.

    Args:
        optimizer_class: the inner optimizer's.
        even_shards_only: all ranks run one compiled graph.
        update_dtype, kind, sends_changes: what it will be made with.
    """
    plain = optimizer_class.func if isinstance(optimizer_class, functools.partial) else optimizer_class
    name = plain.__name__ if isinstance(plain, type) else plain
    is_known = is_known_elementwise(plain)
    if update_dtype is not None and not is_known:
        raise ConfigurationError(
            f"parameters are to be updated in {update_dtype}, and {name} is not known to be element-wise; update "
            "them in their own dtype, or tell shardkit with declare_elementwise if it is. Known are "
            f"{names_of_elementwise()}"
        )
    in_segments = is_known and (even_shards_only or kind.has_parts or update_dtype is not None)
    couples = isinstance(plain, type) and issubclass(plain, optim.LBFGS)
    is_owned = not (in_segments or even_shards_only or couples)
    if sends_changes and not is_owned:
        raise ConfigurationError(
            "sends_changes=True is for optimizers that update whole parameters on their owners, and this one's "
            "results travel otherwise on this backend; leave it out"
        )
    if in_segments or is_owned:
        return InSegments if in_segments else OwnedParameters
    if not couples:
        logger.warning(
            "%s is not known to be element-wise, so each rank runs it on all parameters and its state is not sharded",
            name,
        )
    return OnEveryRank
