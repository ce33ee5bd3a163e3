"""Brings parameters to an optimizer as a whole for the time of a step, and lets others be updated where they lie.

Legend: W world size, K number of pieces that one rank sends to another, S shard numel.

[Note: owners] Who updates which parameter, and which pieces of it travel, is integer arithmetic: every rank computes
the same plan from the same layouts. A parameter is cut where shards end (:meth:`~shardkit.layout.ShardLayout.pieces`),
and its owner needs the pieces that lie elsewhere. Owners are balanced by what an update costs, over all units together.
Where a parameter lies decides only between ranks that have room for it: the fewer parameters straddle
(``FSDP(align=...)``), the less travels.

[Note: one all-to-all] A rank sends to an owner the values of all pieces, their gradients, and a flag for each piece
that tells whether it has a gradient: an owner without a piece of a parameter can't know that by itself. What comes back
are values.

[Note: one program] Where all ranks run one compiled program no rank can have an owner's work. So values and gradients
are gathered, every rank runs the optimizer on all parameters with the same numbers, and keeps its shard of the result.
State is not sharded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, SupportsIndex

import torch
from torch import nn

from ...backend import DONE, Group, Work
from ...errors import ConfigurationError, LifecycleError
from ...fsdp.construct import wake
from ...fsdp.flat_param import FlatParam, own_part, put_together, taken_apart
from ...fsdp.originals import refuse_split
from ...fsdp.state import state_of
from ...fsdp.state_dict import written_parameters
from ...layout import Piece
from ...optimizers.shards import note_stand_in
from ...torch_seams.tensors import ALIKE, FACTS, SHAPE, as_plain, name_of
from ...tracing.ranges import Ranges
from ...types import AnyCallable, Args, Kwargs, Memo, Tree

# ------------------------------------------------------------ parameters that are listed
# The model's parameters as they were written, and how an optimizer over sharded ones lists them.
#
# [Note: listed] ``param_groups`` list a stand-in for each sharded parameter. It has the name, shape and dtype that the
# parameter was written with, so that rules by name and by dimension work, and no values: those lie on all ranks. Its
# ``grad`` is the part of the gradient that this rank has, a view, so that what scales, clips and clears the gradients
# of an optimizer's parameters does what it says.

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


class Part:
    """A parameter of the model, and what this rank has of it.

    Attributes:
        name: in the model as it was written.
        flat: the flat parameter that it lies in; None if it is not sharded.
        number: its number in that.
        shape: as it was written.
        pieces: how it is cut, over all ranks.
        here: the piece on this rank, if any.
        listed: what ``param_groups`` list.
        set_to_none: the program has cleared the gradient there.
    """

    def __init__(
        self, name: str, flat: FlatParam | None, number: int, param: nn.Parameter, pieces: Sequence[Piece]
    ) -> None:
        self.name, self.flat, self.number, self.pieces = name, flat, number, tuple(pieces)
        self.set_to_none = False
        self.shape = param.shape if flat is None else flat.originals[number].shape
        own = () if flat is None else (p for p in self.pieces if p.rank == flat.group.rank)
        self.here = next(iter(own), None)
        self.listed: nn.Parameter = param if flat is None else ListedParameter.of(self, flat)

    @property
    def trains(self) -> bool:
        return self.listed.requires_grad

    @property
    def is_cleared(self) -> bool:
        """Says whether the program has cleared the gradient, and no backward has come since."""
        return self.set_to_none and self.flat is not None and self.flat.unused.originals[self.number]

    @property
    def may_have_gradient(self) -> bool:
        """Says whether any rank has one; exact where :attr:`here` is a piece, else as far as it is known."""
        if self.flat is None:
            return self.listed.grad is not None
        return self.flat.param.grad is not None and not self.flat.unused.originals[self.number]

    def cut(self, flat_tensor: torch.Tensor) -> torch.Tensor:
        """Returns the piece here [n] of something that is laid out as the shard; none: [0]."""
        offset, numel = (0, 0) if self.here is None else (self.here.offset, self.here.numel)
        with as_plain():
            return flat_tensor.view(-1)[offset : offset + numel]


class ListedParameter(nn.Parameter):
    """Stands in for a sharded parameter; see [Note: listed]."""

    part: Part
    flat: FlatParam

    @classmethod
    def of(cls, part: Part, flat: FlatParam) -> ListedParameter:
        """Makes one with one element's memory, whatever the shape."""
        shape = part.shape
        values = torch.empty((1,) * len(shape), dtype=flat.param.dtype, device=flat.param.device).expand(
            shape
        )
        made: ListedParameter = torch.Tensor._make_subclass(cls, values, flat.param.requires_grad)
        made.part, made.flat = part, flat
        note_stand_in(made, flat.param)
        return made

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Returns the part of the gradient on this rank, [n]; None if no rank has a gradient."""
        gradient, part = self.flat.param.grad, self.part
        if gradient is None or (part.here is not None and not part.may_have_gradient):
            return None
        # ranks cut alike: the first has the shard's
        if self.flat.group.backend.even_shards_only:
            return gradient if part.number == 0 else None
        shown = part.cut(gradient)
        if type(gradient) is not torch.Tensor:
            shown.__class__ = type(gradient)
        return shown

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise LifecycleError(
                f"the gradient of parameter {self.part.name!r} can't be set: each rank has a part of it, which "
                "backward fills. Change the gradients of the FSDP module's parameters(), in place"
            )
        shard, unused = self.flat.param, self.flat.unused.originals
        if shard.grad is None:
            return
        unused[self.part.number] = self.part.set_to_none = True
        if False not in unused:
            shard.grad = None
        else:
            self.part.cut(shard.grad).zero_()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.flat.param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.flat.param.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ListedParameter:
        """Sets whether the shard requires a gradient."""
        self.flat.param.requires_grad_(requires_grad)
        return self

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        what = name_of(func)
        if what in _HOOKS:
            raise LifecycleError(
                f"{what} of an entry of param_groups: it stands for a parameter, and autograd never sees it. Register "
                "hooks on the FSDP module's parameters(), or on those of modules inside"
            )
        with as_plain():
            if what in FACTS or what in SHAPE or what in ALIKE:
                return func(*args, **(kwargs or {}))
        listed = next((a for a in args if isinstance(a, ListedParameter)), None)
        if what in ("__repr__", "__format__") and listed is not None:
            part = listed.part
            return f"<parameter {part.name!r} of shape {tuple(part.shape)}, sharded: listed without values>"
        named = "a parameter" if listed is None else f"parameter {listed.part.name!r}"
        raise LifecycleError(
            f"{what} needs the values of {named}, of which each rank has a part: param_groups of WholeParameters list "
            "names and shapes. Read values in `with module.summon_full_params():`, or change them in the module's "
            "parameters(), which are this rank's shards"
        )

    def _no_copy(self, *_: object) -> NoReturn:
        raise LifecycleError(
            f"parameter {self.part.name!r} in the param_groups of WholeParameters stands for what lies on all ranks "
            "and can't be copied or saved; save the optimizer's state_dict(), and make a new optimizer for a copy of "
            "the model"
        )

    def __deepcopy__(self, memo: Memo) -> nn.Parameter:
        self._no_copy()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        self._no_copy()


def parts_of(model: nn.Module) -> list[Part]:
    """Returns all parameters of a model, in the order and under the names that they were written with, each once."""
    for module in model.modules():
        if (state := state_of(module)) is not None:
            wake(state)
    found, seen = [], set()
    pieces: dict[int, list[list[Piece]]] = {}  # of each flat parameter, by item
    for name, param, flat, number in written_parameters(model):
        key = id(param) if flat is None else (id(flat), number)
        if key in seen:
            continue
        seen.add(key)
        if flat is not None and id(flat) not in pieces:
            refuse_split(
                flat.originals, "WholeParameters", "Take an optimizer that updates every element by itself"
            )
            pieces[id(flat)] = [[] for _ in flat.originals]
            for piece in flat.layout.pieces():
                if piece.runs > 1:
                    raise ConfigurationError(
                        f"{flat.names[piece.item]!r} is cut along a later dimension (shard_placement_fn), and "
                        "WholeParameters puts rows together: cut it along its first one"
                    )
                pieces[id(flat)][piece.item].append(piece)
        found.append(Part(name, flat, number, param, () if flat is None else pieces[id(flat)][number]))
    without = [p.name for p in found if p.listed.is_meta]
    if not found or without:
        raise ConfigurationError(
            f"parameters {without[:3]} are on the meta device and have no values; call to_empty() or load a state dict "
            "before making the optimizer"
            if without
            else "the model has no parameters to optimize"
        )
    return found


# ------------------------------------------------------------ bringing parameters to their owners


class OwnedParameter:
    """A parameter that this rank updates, and of which other ranks have pieces.

    Attributes:
        param: what the optimizer updates; it has values and memory during a step alone.
    """

    def __init__(self, part: Part, like: torch.Tensor) -> None:
        self.part = part
        self._nothing = like.new_empty((1,) * len(part.shape)).expand(part.shape)
        self.param = nn.Parameter(self._nothing, requires_grad=like.is_floating_point() or like.is_complex())

    def forget(self) -> None:
        """Lets the values go, which lie on all ranks again."""
        self.param.grad = None
        self.param.data = self._nothing


class Bringing(ABC):
    """Brings pieces to whoever updates parameters, and values back.

    Attributes:
        owned: the whole parameters that this rank updates, in order.
    """

    owned: list[OwnedParameter]

    @abstractmethod
    def start(self, gradients: bool) -> None:
        """Sends values, and gradients if asked for (collective)."""

    def finish(self) -> None:
        """Gives what this rank owns its values and gradients, if they are not there."""
        return

    def send_back(self) -> None:
        """Starts to bring updated values to the shards (collective), if they lie elsewhere."""
        return

    @abstractmethod
    def take_back(self) -> None:
        """Shards have the updated values."""

    def forget(self) -> None:
        """Gives the memory of whole parameters back."""
        for owned in self.owned:
            owned.forget()


def shard_of(part: Part) -> torch.Tensor:
    """Returns this rank's shard of the flat parameter that a parameter lies in, detached."""
    if part.flat is None:
        raise LifecycleError(f"parameter {part.name!r} is not sharded, and can't travel")
    return part.flat.param.detach()


ALLOWANCE = 1.1  # of the mean cost: so much may a rank have more, if that keeps pieces where they are


@dataclass(frozen=True)
class Bundle:
    """A parameter, or several that have to have one owner.

    Attributes:
        cost: of its update, in any unit.
        held: numel of it that each rank has, [W].
    """

    cost: float
    held: tuple[int, ...]


def owners_of(items: Sequence[Bundle], world_size: int) -> list[int]:
    """Returns the rank that updates each item.

    The costliest are placed first. An item goes to the rank that has most of it, if that one does not get more than
    the mean and the :data:`ALLOWANCE`; else to the rank with the least so far. So no rank gets more than the mean, the
    allowance and one item.
    """
    loads = [0.0] * world_size
    owners = [0] * len(items)
    room = ALLOWANCE * sum(i.cost for i in items) / world_size
    for index in sorted(range(len(items)), key=lambda i: (-items[i].cost, i)):
        item = items[index]
        ranks = range(world_size)
        rank = max(ranks, key=lambda r: (item.held[r], -loads[r], -r))
        if loads[rank] + item.cost > room:
            rank = min(ranks, key=lambda r: (loads[r], -item.held[r], r))
        loads[rank] += item.cost
        owners[index] = rank
    return owners


def held_by_ranks(pieces: Sequence[Piece], world_size: int) -> tuple[int, ...]:
    """Returns numel on each rank, [W]."""
    held = [0] * world_size
    for piece in pieces:
        held[piece.rank] += piece.numel
    return tuple(held)


@dataclass(frozen=True)
class TravelPlan:
    """The pieces that travel between a rank and the owners.

    Attributes:
        away: of other ranks' parameters, here, by owner, [W]; ``item`` counts the parameters of the plan.
        own: of this rank's parameters, elsewhere, by where they lie, [W].
        total: numel of what travels one way, of all ranks together.
    """

    away: list[list[Piece]]
    own: list[list[Piece]]
    total: int


def plan_of(
    pieces: Sequence[Sequence[Piece]], owners: Sequence[int], rank: int, world_size: int
) -> TravelPlan:
    away: list[list[Piece]] = [[] for _ in range(world_size)]
    own: list[list[Piece]] = [[] for _ in range(world_size)]
    total = 0
    for item, (cut, owner) in enumerate(zip(pieces, owners, strict=True)):
        for piece in cut:
            if piece.rank == owner:
                continue
            total += piece.numel
            if piece.rank == rank:
                away[owner].append(piece._replace(item=item))
            elif owner == rank:
                own[piece.rank].append(piece._replace(item=item))
    return TravelPlan(away, own, total)


def numels_of(pieces: Sequence[list[Piece]], times: int, flags: int) -> list[int]:
    """Returns numel of what travels for each rank, [W]: its pieces so many times, and so many flags of each."""
    return [times * sum([p.numel for p in some]) + flags * len(some) for some in pieces]


class Exchange(Bringing):
    """Between the ranks of one group, of parameters of one dtype on one device.

    Args:
        group: the ranks; a channel of its own.
        parts: all that don't lie on their owners as a whole, the same on all ranks.
        owners: the rank that updates each.
        device: where pieces travel from and to, if it is not where they lie.

    Attributes:
        owned: those that this rank updates, in order.
    """

    def __init__(
        self, group: Group, parts: Sequence[Part], owners: Sequence[int], device: torch.device
    ) -> None:
        self._group, self._parts, self._owners, self._device = group, list(parts), list(owners), device
        self._like = shard_of(self._parts[0]).view(-1)[:0]
        self.owned = [
            OwnedParameter(p, self._like)
            for p, owner in zip(parts, owners, strict=True)
            if owner == group.rank
        ]
        self._numbers = [n for n, owner in enumerate(owners) if owner == group.rank]  # of these
        self._flags: dict[tuple[bool, ...], torch.Tensor] = {}
        self._plans: dict[tuple[bool, ...], TravelPlan] = {}
        self._gradients = False  # travel, too
        self._traveling: tuple[torch.Tensor, torch.Tensor, Work] | None = None
        self._to_owners = Ranges("parameters to owners", group.ranks)
        self._to_shards = Ranges("updated parameters", group.ranks)

    def _plan(self) -> TravelPlan:
        """Plans what travels: no frozen parameters; all ranks know which are."""
        trains = tuple([p.trains for p in self._parts])
        if trains not in self._plans:
            cut = [p.pieces if t else () for p, t in zip(self._parts, trains, strict=True)]
            self._plans = {trains: plan_of(cut, self._owners, self._group.rank, self._group.world_size)}
        return self._plans[trains]

    def _send(
        self,
        chunks: Sequence[torch.Tensor],
        come: Sequence[int],
        go: Sequence[int],
        ranges: Ranges,
        label: str,
    ) -> None:
        """Starts to send these, so much to each rank, while so much comes from each."""
        sent = torch.cat([*chunks, self._like]).to(self._device)
        arrived = torch.empty(sum(come), dtype=sent.dtype, device=sent.device)
        work: Work = DONE
        if self._plan().total:
            with ranges.exchange():
                work = self._group.all_to_all(arrived, sent, come, go, async_op=True, label=label)
        self._traveling = sent, arrived, work

    def _received(self, ranges: Ranges) -> torch.Tensor | None:
        """Waits for what comes; None if nothing is on its way."""
        if self._traveling is None:
            return None
        _, arrived, work = self._traveling
        with ranges.exchange_wait():
            work.wait()
        self._traveling = None
        return arrived.to(self._like.device)

    # ------------------------------------------------------------ to the owners
    def start(self, gradients: bool) -> None:
        plan, self._gradients = self._plan(), gradients
        times, flags = (2, 1) if gradients else (1, 0)
        chunks = [self._sent(pieces, gradients) for pieces in plan.away]
        come, go = numels_of(plan.own, times, flags), numels_of(plan.away, times, flags)
        self._send([*chain(*chunks)], come, go, self._to_owners, "parameters for whole updates")

    def _sent(self, pieces: Sequence[Piece], gradients: bool) -> list[torch.Tensor]:
        parts = [self._parts[p.item] for p in pieces]
        chunks = [p.cut(shard_of(p)) for p in parts]
        if gradients:
            chunks += [_gradient(p) for p in parts]
            have = tuple([p.may_have_gradient for p in parts])
            if have not in self._flags:
                self._flags[have] = self._like.new_tensor(have)
            chunks.append(self._flags[have])
        return chunks

    def finish(self) -> None:
        if (arrived := self._received(self._to_owners)) is None:
            return
        plan, count = self._plan(), len(self.owned)
        values = self._put_together(plan, arrived, False, [True] * count)
        gradients: Sequence[torch.Tensor | None] = [None] * count  # a step that raised may have left some
        if self._gradients:
            gradients = self._put_together(plan, arrived, True, self._with_gradient(plan, arrived))
        for owned, value, gradient in zip(self.owned, values, gradients, strict=True):
            owned.param.grad = None
            if value is not None:
                owned.param.data = value
            owned.param.grad = gradient

    def _put_together(
        self, plan: TravelPlan, arrived: torch.Tensor, gradients: bool, there: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Returns values, or gradients, of the owned ones where they are there, of what came and what lies here."""
        numels = [o.part.shape.numel() if t else 0 for o, t in zip(self.owned, there, strict=True)]
        flat = self._like.new_empty(sum(numels)).split(numels)
        places = {n: place for n, place, t in zip(self._numbers, flat, there, strict=True) if t}
        pairs = [
            (places[n].narrow(0, piece.start, piece.numel), value)
            for n, piece, value in _arrived(plan, arrived, self._gradients, gradients)
            if n in places
        ]
        for n, part in zip(self._numbers, [o.part for o in self.owned], strict=True):
            if part.here is not None and n in places:
                own = _gradient(part) if gradients else part.cut(shard_of(part))
                pairs.append((places[n].narrow(0, part.here.start, part.here.numel), own))
        _copy(pairs)
        return [
            place.view(o.part.shape) if t else None
            for o, place, t in zip(self.owned, flat, there, strict=True)
        ]

    def _with_gradient(self, plan: TravelPlan, arrived: torch.Tensor) -> list[bool]:
        """Tells which of the owned ones have a gradient. What came is read only where this rank can't know."""
        known = [
            o.part.trains if o.part.may_have_gradient else None if o.part.here is None else False
            for o in self.owned
        ]
        if None not in known:
            return [bool(k) for k in known]
        flags: dict[int, torch.Tensor] = {}
        for pieces, block in zip(plan.own, arrived.split(numels_of(plan.own, 2, 1)), strict=True):
            for piece, flag in zip(pieces, block[block.numel() - len(pieces) :], strict=True):
                flags.setdefault(piece.item, flag)
        found = torch.stack([flags.get(n, arrived.new_zeros(())) for n in self._numbers]).tolist()
        return [bool(f) if k is None else k for k, f in zip(known, found, strict=True)]

    # ------------------------------------------------------------ back
    def send_back(self) -> None:
        plan = self._plan()
        values = {n: o.param.detach().reshape(-1) for n, o in zip(self._numbers, self.owned, strict=True)}
        _copy(
            [
                (o.part.cut(shard_of(o.part)), values[n].narrow(0, o.part.here.start, o.part.here.numel))
                for n, o in zip(self._numbers, self.owned, strict=True)
                if o.part.here is not None and o.part.trains
            ]
        )
        chunks = [values[p.item].narrow(0, p.start, p.numel) for p in chain(*plan.own)]
        come, go = numels_of(plan.away, 1, 0), numels_of(plan.own, 1, 0)
        self._send(chunks, come, go, self._to_shards, "updated parameters")

    def take_back(self) -> None:
        if (arrived := self._received(self._to_shards)) is None:
            return
        pieces = [*chain(*self._plan().away)]
        parts = [self._parts[p.item] for p in pieces]
        cut = arrived.split([p.numel for p in pieces])
        _copy([(part.cut(shard_of(part)), value) for part, value in zip(parts, cut, strict=False)])


def _gradient(part: Part) -> torch.Tensor:
    """Returns the piece of the gradient here; what stands for none is not looked at."""
    shard = shard_of(part)
    gradient = None if part.flat is None else part.flat.param.grad
    return torch.zeros_like(part.cut(shard)) if gradient is None else part.cut(gradient)


def _arrived(
    plan: TravelPlan, arrived: torch.Tensor, with_gradients: bool, gradients: bool
) -> Iterator[tuple[int, Piece, torch.Tensor]]:
    """Yields number, piece, and its values or its gradient, in the order in which they came."""
    sizes = numels_of(plan.own, 2, 1) if with_gradients else numels_of(plan.own, 1, 0)
    for pieces, block in zip(plan.own, arrived.split(sizes), strict=True):
        numels = [p.numel for p in pieces]
        cut = block.narrow(0, gradients * sum(numels), sum(numels)).split(numels) if pieces else ()
        for piece, value in zip(pieces, cut, strict=True):
            yield piece.item, piece, value


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class Gathered(Bringing):
    """Parameters of whole flat parameters, each updated by one optimizer.

    Args:
        parts: all parameters in these flat parameters.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.owned = [OwnedParameter(p, shard_of(p)) for p in parts]
        self._flats = [
            (flat, sorted((o for o in self.owned if o.part.flat is flat), key=lambda o: o.part.number))
            for flat in shards_of(parts)
        ]

    def start(self, gradients: bool) -> None:
        for flat, of_flat in self._flats:
            for owned, value in zip(of_flat, self._items(flat, flat.param.detach()), strict=True):
                owned.param.grad = None
                owned.param.data = value.view(owned.part.shape)
            gradient = flat.param.grad if gradients else None
            if gradient is None:
                continue
            if flat.unused.used is not None:
                raise LifecycleError(
                    f"some parameters of {flat.names[0]!r} and the others of its flat parameter had no gradient, and "
                    f"which is known to the device alone on {flat.group.backend.name}: an optimizer that updates "
                    "whole parameters can't skip them. Use fully_shard, or wrap with flatten=False"
                )
            for owned, value in zip(of_flat, self._items(flat, gradient), strict=True):
                owned.param.grad = value.view(owned.part.shape)

    def _items(self, flat: FlatParam, shard: torch.Tensor) -> list[torch.Tensor]:
        shard = shard.contiguous().view(-1).to(flat.compute_device)
        full = shard
        if flat.group.world_size > 1:
            full = shard.new_empty(flat.layout.padded_numel)
            flat.group.channel("parameters").all_gather_into(
                full, shard, label=f"whole parameters of {flat.label}"
            )
        # values of their own, as parameters are: views would be updated together, and be one graph's
        return [item.clone() for item in taken_apart(full, flat.layout)]

    @torch.no_grad()
    def take_back(self) -> None:
        for flat, of_flat in self._flats:
            rows = [owned.param.detach().reshape(-1) for owned in of_flat]
            values = own_part(put_together(rows, flat.layout), flat.group)
            flat.param.data.copy_(values.view(flat.param.shape))


class ShardInPlace(Bringing):
    """The parts of one shard that are updated where they lie, as parameters that are views of it; nothing is sent.

    Attributes:
        sizes: cuts the shard [S] into pieces, and what lies between them.
    """

    def __init__(self, flat: FlatParam) -> None:
        self.flat = flat
        self.owned = []
        self.parts: list[tuple[Part, nn.Parameter, torch.Size]] = []
        self.sizes: list[int] = []
        self.places: list[int] = []
        self._seen: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def add(self, part: Part, shape: torch.Size) -> nn.Parameter:
        """Makes the parameter of a part, in this shape; it has its values after :meth:`lay_out`."""
        empty = torch.empty(0, dtype=self.flat.param.dtype, device=self.flat.param.device)
        param = nn.Parameter(empty, requires_grad=empty.is_floating_point() or empty.is_complex())
        self.parts.append((part, param, shape))
        return param

    def lay_out(self) -> None:
        """Cuts the shard, once all parts are known."""
        self.parts.sort(key=lambda found: found[0].here.offset if found[0].here else 0)
        end = 0
        for part, _, _ in self.parts:
            if part.here is None:
                continue
            if part.here.offset > end:
                self.sizes.append(part.here.offset - end)
            self.places.append(len(self.sizes))
            self.sizes.append(part.here.numel)
            end = part.here.offset + part.here.numel
        if end < self.flat.param.numel():
            self.sizes.append(self.flat.param.numel() - end)
        self.show_values()

    def start(self, gradients: bool) -> None:
        self.show_values()
        if gradients:
            self._show_gradients()

    def show_values(self) -> None:
        """Makes parameters views of the shard, which may have got other memory."""
        shard = self.flat.param.detach()
        seen = self._seen
        if seen is None or seen.data_ptr() != shard.data_ptr() or seen.dtype != shard.dtype:
            self._seen = shard
            cut = shard.view(-1).split_with_sizes(self.sizes)
            self._views = [cut[k] for k in self.places]
            for (_, param, shape), view in zip(self.parts, self._views, strict=True):
                param.data = view.view(shape)

    def _show_gradients(self) -> None:
        gradient = self.flat.param.grad
        for _, param, _ in self.parts:
            param.grad = None  # a step that raised may have left one
        if gradient is None:
            return
        with as_plain():
            cut = gradient.view(-1).split_with_sizes(self.sizes)
        unused = self.flat.unused.originals
        for (part, param, shape), place in zip(self.parts, self.places, strict=True):
            if not unused[part.number]:
                param.grad = cut[place].view(shape)

    def take_back(self) -> None:
        """Keeps updated values: some optimizers put other tensors in place of ``param.data``."""
        for (_, param, shape), view in zip(self.parts, self._views, strict=True):
            param.grad = None
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.data.reshape(-1))
                param.data = view.view(shape)


def shards_of(parts: Sequence[Part]) -> list[FlatParam]:
    """Returns the flat parameters that parts lie in, each once."""
    return list({id(p.flat): p.flat for p in parts if p.flat is not None}.values())
