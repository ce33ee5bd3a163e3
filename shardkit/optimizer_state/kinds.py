"""States of an optimizer: their kinds, which of them fit, tensors of a checkpoint (leaves), what is listed (slots)."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..backend import Group
from ..checks import facts_of_all
from ..errors import ConfigurationError, RankMismatchError
from ..layout import Box, Piece, boxes_of_piece, whole_box
from ..optimizers.shards import options_of
from ..torch_seams.tensors import INTEGERS, MarkedTensor, is_dtensor
from ..types import SavedState, StateDict, T, Tree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# What torch's optimizers keep as one number for a parameter, were the parameter one number itself.
NUMBERS = ("step", "mu", "eta", "mu_product")


def is_elementwise(key: object, value: object, shape: Sequence[int]) -> bool:
    """Says whether a state has one element for each of a parameter's, or of a shard's, of this shape.

    Every decision to gather, cut or reshape a state is this one.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape):
        return False
    return value.dim() > 0 or (len(shape) == 0 and key not in NUMBERS)


def with_leaves(change: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Returns nested dicts, lists and tuples (and what derives from these) with what ``change`` makes of the rest."""
    if isinstance(value, dict):
        return {k: with_leaves(change, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_leaves(change, v) for v in value)
    return change(value)


def to_cpu(value: object) -> Tree:
    """Copies tensors inside nested containers to the CPU, detached; everything else stays as it is."""
    return with_leaves(lambda v: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v, value)


class StateKind(NamedTuple):
    """The description of a state that ranks send each other.

    Attributes:
        spread: it has one element for each of the shard's.
        shape: of a tensor of one number.
        value: of all else that is not spread: the number, or what it is.
    """

    spread: bool
    dtype: torch.dtype | None
    shape: Sequence[int] | None
    value: Any

    @classmethod
    def of(cls, key: object, value: object, shape: Sequence[int]) -> StateKind:
        """Describes a state of a shard of this shape."""
        if not isinstance(value, torch.Tensor):
            return cls(False, None, None, value)
        if is_elementwise(key, value, shape):
            return cls(True, value.dtype, None, None)
        if value.numel() == 1:
            return cls(False, value.dtype, tuple(value.shape), value.item())
        return cls(False, None, None, to_cpu(value))

    def made(self) -> Tree:
        """Returns the value, a tensor again if it was one."""
        if self.shape is None:
            return copy.deepcopy(self.value)
        return torch.tensor(self.value, dtype=self.dtype, device="cpu").view(self.shape)


# ------------------------------------------------------------ what does not fit is refused, before any of it is taken
# ``torch.optim.Optimizer.load_state_dict`` takes any shapes; a state of another model then fails in the middle of a
# step, or is broadcast. Ranks that were given different states would each go on from another step.
def check_state(
    states: Iterable[tuple[str, torch.Size, SavedState]],
    own: Iterable[SavedState] | None,
    is_elementwise: bool,
) -> None:
    """Compares the shapes of saved state with those of parameters.

    Args:
        states: of each parameter its name, its shape, and its saved state.
        own: the state that the optimizer has of each, in the same order; None for none.
        is_elementwise: whether each tensor of state but :data:`NUMBERS` has one element for each of the parameter's.
    """
    mine_of = iter(own) if own is not None else itertools.repeat({})
    for (name, shape, saved), mine in zip(states, mine_of, strict=False):
        for key, value in saved.items():
            if not isinstance(value, torch.Tensor):
                continue
            known = mine.get(key)
            expected: torch.Size | None = None
            if isinstance(known, torch.Tensor):
                expected = known.shape
            elif is_elementwise and key not in NUMBERS:
                expected = shape
            if (
                expected is not None
                and value.shape != expected
                and not (value.numel() == expected.numel() == 1)
            ):
                raise ConfigurationError(
                    f"optimizer state {key!r} of parameter {name} has shape {tuple(value.shape)}, expected "
                    f"{tuple(expected)}; nothing was loaded. This state is of another model, or its parameters were in "
                    "another order: build model and param groups as they were when it was saved"
                )


def check_form(state_dict: object) -> None:
    """Raises ConfigurationError for what is no state dict of an optimizer."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        raise ConfigurationError(
            "this is no optimizer state: expected a dict with 'state' and 'param_groups', as state_dict() gives it on "
            "all ranks, and gather_full_optim_state_dict on rank 0: load its file on every rank"
        )


def check_same_state(group: Group, state_dict: StateDict, problem: ConfigurationError | None) -> None:
    """Raises on all ranks what is wrong on one (collective).

    Args:
        state_dict: torch's form; parameters may have no state on some ranks.
        problem: what this rank has found wrong with it.
    """
    prints = _fingerprints(state_dict) if group.world_size > 1 and problem is None else {}
    fact = None if problem is None else str(problem), prints
    everybody = facts_of_all([group], fact, label="check of loaded state")
    if problem is not None:
        raise problem
    for rank, (what, _) in zip(group.ranks, everybody, strict=True):
        if what is not None:
            raise ConfigurationError(
                f"rank {rank} can't load this optimizer state: {what}. Nothing was loaded on any"
            )
    first: dict[str, tuple[int, str]] = {}
    for rank, (_, theirs) in zip(group.ranks, everybody, strict=True):
        for name, found in theirs.items():
            other, known = first.setdefault(name, (rank, found))
            if found != known:
                raise RankMismatchError(
                    f"ranks load different optimizer state: {name} on rank {other} is not what it is on rank {rank}. "
                    "Nothing was loaded on any; read the same file on all ranks"
                )


def _fingerprints(state_dict: StateDict) -> dict[str, str]:
    """Returns a short text for each parameter that has state, and for each group."""
    found = {}
    position = 0
    for index, group in enumerate(state_dict["param_groups"]):
        found[f"group {index}"] = _digest(options_of(group))
        for param in group["params"]:
            state = state_dict["state"].get(param)
            if state:
                found[f"the state of parameter {position}"] = _digest(state)
            position += 1
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:16]


def _plain(value: object) -> Tree:
    """Returns something whose text is the same where the values are."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), _sum_of_bits(value))
    if isinstance(value, dict):
        return sorted((str(k), _plain(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def _sum_of_bits(value: torch.Tensor) -> int | None:
    """Sums bits, exactly in whatever order threads add; None where reading it would cost more than loading it."""
    kind = INTEGERS.get(value.element_size())
    if value.device.type != "cpu" or value.layout != torch.strided or kind is None or value.is_quantized:
        return None
    return int(value.detach().contiguous().view(kind).sum(dtype=torch.int64))


# ------------------------------------------------------------ elements without a gradient, though others had one
# A plain process skips a parameter whose ``grad`` is None: no weight decay, no momentum, no change of state. Where
# parameters share a tensor, such elements have zeros for gradients, which the optimizer can't tell from real ones. So
# before a step their values and their state are put aside, and put back after it.

# State that a first step makes from the optimizer's options; all other state starts from zero.
_STARTS_FROM_OPTIONS = ("step_size",)  # Rprop


class UnusedRanges(NamedTuple):
    """Holds them as (start, end) in the tensor seen as one dimension."""

    ranges: Sequence[tuple[int, int]]

    def saved(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat.view(-1)[a:b].clone() for a, b in self.ranges]

    def put_back(self, flat: torch.Tensor, saved: list[torch.Tensor] | None) -> None:
        for k, (a, b) in enumerate(self.ranges):
            flat.view(-1)[a:b] = 0 if saved is None else saved[k]


class UsedMask(NamedTuple):
    """Holds them as data, [S] (False: unused), where values are not known yet and all ranks build one program."""

    used: torch.Tensor

    def saved(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the whole tensor, [S]."""
        return flat.view(-1).clone()

    def put_back(self, flat: torch.Tensor, saved: torch.Tensor | None) -> None:
        now = flat.view(-1)
        before = torch.zeros_like(now) if saved is None else saved
        flat.copy_(torch.where(self.used, now, before).view(flat.shape))


Unused = UnusedRanges | UsedMask


class PutAside:
    """Holds what was put aside of one flat tensor before a step.

    Args:
        flat: the values that the step is going to change.
        state: what the optimizer keeps of them.
        unused: which of them are to stay.
    """

    @torch.no_grad()
    def __init__(self, flat: torch.Tensor, state: SavedState, unused: Unused) -> None:
        self._unused = unused
        self._values: Tree = unused.saved(flat)
        self._state: dict[str, Tree] = {k: unused.saved(v) for k, v in state_by_element(flat, state).items()}

    @torch.no_grad()
    def put_back(self, flat: torch.Tensor, state: SavedState) -> None:
        """Puts them back after the step; state that it has made starts as it would in a plain process."""
        self._unused.put_back(flat, self._values)
        for key, now in state_by_element(flat, state).items():
            if key in self._state or key not in _STARTS_FROM_OPTIONS:
                self._unused.put_back(now, self._state.get(key))


def state_by_element(flat: torch.Tensor, state: SavedState) -> dict[str, torch.Tensor]:
    """Returns what of an optimizer's state has one element for each of the tensor's."""
    return {k: v for k, v in state.items() if is_elementwise(k, v, flat.shape)}


# ------------------------------------------------------------ counts of steps
# [Note: counts] State that is one number for a tensor of several parameters, such as Adam's count of steps, is that of
# all: a parameter that was put aside in some steps and takes part again has another bias correction than in a plain
# process. All ranks warn of that when it happens, also those that have no part of the parameter, or raise where the
# order of sums is fixed. Where execution is lazy, a rank knows of its own gradients alone, and says so.
_NO_COUNTS = (torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)  # have one, and don't use it


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Says whether the update of a tensor depends on one number for it."""
    if isinstance(optimizer, _NO_COUNTS):
        return False
    if isinstance(optimizer, torch.optim.Adagrad):
        return any(g["lr_decay"] for g in optimizer.param_groups)
    return any(
        isinstance(v, int | float) or (isinstance(v, torch.Tensor) and v.numel() == 1)
        for param, state in optimizer.state.items()
        for k, v in state.items()
        if k not in state_by_element(param, state)
    )


def wrong_count(optimizer: object, group: Group, what: str, of: str, remedy: str) -> str:
    """Says that a parameter (``what``) takes part again in the steps of a tensor, whose count is not its own."""
    here = "" if group.backend.has_storage else " on this rank"
    return (
        f"rank {group.rank}: {what} had no gradient{here} in some steps (it was frozen, or unused) and has one again. "
        f"{type(optimizer).__name__} counts the steps of the whole {of} that it is in, so that its bias correction (or "
        f"whatever depends on that count) is not what it is in one process. {remedy}"
    )


# ------------------------------------------------------------ tensors of a checkpoint, as one rank has them: leaves
# Tensors of a checkpoint as one rank has them, and what an optimizer's parameter stands for.
#
# A *leaf* is boxes of a whole tensor, and the ranks that have the same ones. A *slot* is what an optimizer lists: which
# of the model's parameters, and which elements of them. An optimizer over flat shards has state that is laid out as the
# shard: of each parameter in it a piece. Everything else that an optimizer keeps is a parameter's as a whole.
#
# [Note: copies] Each box is written once. Every rank knows without asking which ranks have the same boxes: layouts of
# shards, replicas and placements are known everywhere. Such ranks take turns, so that all write about the same number
# of bytes.
@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor of a state dict.

    Attributes:
        shape: of the whole tensor.
        base: what this rank has of it, with other things beside where boxes say so.
        boxes: parts of the whole; each one's elements lie in ``base``, from ``start`` on.
        copies: ranks of the group that have the same boxes, this one among them.
    """

    shape: torch.Size
    base: torch.Tensor
    boxes: tuple[Box, ...]
    copies: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Counts the elements that this rank has."""
        return sum(box.numel for box in self.boxes)

    def values(self, box: Box) -> torch.Tensor:
        """Returns a view of the base, in the box's shape; a copy of one whose elements lie scattered."""
        if box.sizes == tuple(self.base.shape):
            return self.base
        return self.base.reshape(-1)[box.start : box.start + box.numel].view(box.sizes)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A value that is no tensor, or is stored as one record whatever it is.

    Attributes:
        copies: ranks that have the same.
    """

    value: object
    copies: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that write or read a checkpoint together.

    Attributes:
        group: None for one process alone.
        rank: this one's place.
        world: of each member the number in the whole job.
    """

    group: Group | None
    rank: int
    world: tuple[int, ...]

    @classmethod
    def of(cls, group: Group | None) -> Ranks:
        return cls(None, 0, (0,)) if group is None else cls(group, group.rank, group.ranks)

    @property
    def size(self) -> int:
        return len(self.world)

    @property
    def everybody(self) -> tuple[int, ...]:
        """Lists the places of all of them."""
        return tuple(range(self.size))

    @property
    def alone(self) -> tuple[int, ...]:
        return (self.rank,)

    def places(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Finds the places among these of ranks of the whole job."""
        place = {rank: k for k, rank in enumerate(self.world)}
        return tuple(sorted(place[rank] for rank in ranks if rank in place))

    def refuse_others(self, name: str, ranks: Sequence[int]) -> None:
        """Raises where a tensor is spread over other ranks than these."""
        if set(ranks) == set(self.world):
            return
        raise ConfigurationError(
            f"{name!r} is spread over ranks {sorted(ranks)}, and ranks {sorted(self.world)} take part in this "
            "checkpoint: others may hold something else under the same name (experts, stages of a pipeline, tensor "
            "parallelism). Pass group= with the ranks that the model is sharded over, and a folder of its own for each "
            "such group; or replicas= when sharding, if they hold the same"
        )


def noted(name: str, facts: str | None) -> dict[str, Fixed]:
    """Says in a name what one is beside the tensors that it is made of: names are compared where they are read."""
    return {f"{name} is {facts}": Fixed(facts)} if facts else {}


def add_named(found: dict[str, T], named: Mapping[str, T]) -> None:
    """Adds what is saved; raises ConfigurationError where something else has one of its names."""
    for name in found.keys() & named.keys():
        raise ConfigurationError(
            f"two things would be saved as {name!r}: give one another name. (What a weight consists of is named after "
            'it: "0._weight_scale")'
        )
    found.update(named)


def whole(name: str, tensor: torch.Tensor, copies: tuple[int, ...]) -> Leaf:
    """Returns a tensor that this rank has all of."""
    return Leaf(tensor.shape, plain_values(name, tensor), (whole_box(tensor.shape),), copies)


def piece_of(shape: torch.Size, shard: torch.Tensor, piece: Piece | None, copies: tuple[int, ...]) -> Leaf:
    """Returns a parameter's part in a shard [S], or in something that is laid out as one.

    Args:
        piece: None if nothing of it lies there; what has no elements at all lies nowhere, and is written too.
    """
    if not shape.numel():
        return Leaf(shape, shard.new_empty(shape), (whole_box(shape),), copies)
    return Leaf(shape, shard, () if piece is None else tuple(boxes_of_piece(shape, piece)), copies)


def of_dtensor(name: str, tensor: DTensor, ranks: Ranks) -> Leaf:
    """Returns this rank's part of a DTensor."""
    from torch.distributed._functional_collectives import wait_tensor  # of redistribute(async_op=True)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, values = tensor.device_mesh, plain_values(name, wait_tensor(tensor.to_local()))
    ranks.refuse_others(name, mesh.mesh.flatten().tolist())
    if any(p.is_partial() for p in tensor.placements):
        raise ConfigurationError(f"{name!r} is a DTensor of partial sums; redistribute() it first")
    mine = mesh.get_coordinate()
    if mine is None:
        raise ConfigurationError(f"{name!r} is a DTensor over a mesh that this rank is not in")
    same = mesh.mesh
    for dim, (placement, at) in enumerate(zip(tensor.placements, mine, strict=True)):
        if not placement.is_replicate():
            same = same.narrow(dim, at, 1)
    # torch asks tensors on the default device, which may be another one or have no values
    with torch.device("cpu"):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    box = Box(tuple(offsets), tuple(sizes))
    boxes = () if 0 in box.sizes and tensor.numel() else (box,)
    return Leaf(tensor.shape, values, boxes, ranks.places(same.flatten().tolist()))


def plain_values(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor for a checkpoint; raises for a class that one has no place for."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach()
    refuse_class(name, tensor)


def refuse_class(name: str, tensor: torch.Tensor) -> NoReturn:
    """Raises for a class of tensors that a checkpoint has no place for."""
    raise ConfigurationError(
        f"{name!r} is a {type(tensor).__name__}, which is more than one plain tensor, and checkpoints hold plain ones: "
        "save what it consists of in extra=, or let torch.distributed.checkpoint save what get_state_dict() gives"
    )


# ------------------------------------------------------------ what an optimizer lists: slots
class Span(NamedTuple):
    """One of the model's parameters in a slot.

    Attributes:
        name: as the model was written.
        piece: what of it lies in the slot; None for nothing.
        answers: this rank (and its copies) keeps what is one number for the parameter.
    """

    name: str
    shape: torch.Size
    piece: Piece | None
    answers: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A parameter as an optimizer lists it.

    Attributes:
        param: what is listed.
        spans: what it stands for.
        is_shard: a flat tensor with pieces of parameters; else one parameter as a whole, or a DTensor of it.
        copies: ranks that have the same.
        group: ranks that have the other parts of a shard.
        join: gathers a tensor that is laid out as the shard into one of each parameter (collective); on the CPU, and
            empty where its second argument is False.
        owners: of each parameter the rank in the group whose numbers count; None: they are the same on all.
    """

    param: torch.Tensor
    spans: tuple[Span, ...]
    is_shard: bool
    copies: tuple[int, ...] = ()
    group: Group | None = None
    join: Callable[[torch.Tensor, bool], list[torch.Tensor]] | None = None
    owners: Sequence[int] | None = None

    @property
    def names(self) -> list[str]:
        """Returns the names of the parameters in this slot."""
        return [span.name for span in self.spans]

    @property
    def world_size(self) -> int:
        """Counts the ranks that have parts of it."""
        return 1 if self.group is None else self.group.world_size

    # ------------------------------------------------------------ whole states
    def cut(self, have: Mapping[str, SavedState]) -> StateDict:
        """Cuts this slot's state out of whole parameters' states, by name; where one has none, zeros."""
        if not self.is_shard:
            return copy.deepcopy(dict(have[self.spans[0].name]))
        there = [(span, have[span.name]) for span in self.spans if have.get(span.name)]
        self._check_cut(there)
        made: StateDict = {}
        for key, value in there[0][1].items():
            if not all(is_elementwise(key, state[key], span.shape) for span, state in there):
                made[key] = copy.copy(value)
                continue
            laid = value.new_zeros(self.param.numel())
            for (_, _, piece, _), state in there:
                if piece is not None:
                    own = state[key].detach().reshape(-1)[piece.start : piece.start + piece.numel]
                    laid[piece.offset : piece.offset + piece.numel] = own
            made[key] = laid.view(self.param.shape)
        return made

    def _check_cut(self, there: Sequence[tuple[Span, SavedState]]) -> None:
        keys = {key for _, state in there for key in state}
        for span, state in there:
            for key in sorted(keys - set(state), key=str):
                raise ConfigurationError(
                    f"the optimizer state of {span.name!r} lacks {key!r}, which others of its flat parameter have"
                )
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != span.shape:
                    raise ConfigurationError(
                        f"optimizer state {key!r} of {span.name!r} has shape {tuple(value.shape)}, expected "
                        f"{tuple(span.shape)}; nothing was loaded. This state is of another model: wrap the model as "
                        "it was when the state was saved"
                    )

    # ------------------------------------------------------------ what is there
    def leaves(self, state: StateDict, ranks: Ranks) -> dict[str, dict[str, Leaf | Fixed]]:
        """Returns a state by the parameters' names."""
        found: dict[str, dict[str, Leaf | Fixed]] = {span.name: {} for span in self.spans}
        for key, value in state.items():
            if isinstance(value, MarkedTensor):
                value = value.as_subclass(torch.Tensor)
            if is_dtensor(value):
                found[self.spans[0].name][key] = of_dtensor(f"optimizer state {key!r}", value, ranks)
            elif self.is_shard and is_elementwise(key, value, self.param.shape):
                value = value.detach()  # one object: what lies together is copied together
                for span in self.spans:
                    found[span.name][key] = self._piece(span, value)
            else:
                many = isinstance(value, torch.Tensor) and value.numel() != 1
                if self.is_shard and (many or isinstance(value, dict | list | tuple)):
                    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                    raise ConfigurationError(
                        f"optimizer state {key!r} of the shard of {', '.join(self.names[:3])} is a "
                        f"{type(value).__name__}{shape}, neither laid out as the shard ({tuple(self.param.shape)}) "
                        "nor one number: what it says of which parameter is not known here. Use "
                        "shardkit.WholeParameters for this optimizer, whose state is kept by whole parameters"
                    )
                for span in self.spans:
                    if span.answers:
                        found[span.name][key] = self._whole(key, value)
        return found

    def _piece(self, span: Span, value: torch.Tensor) -> Leaf:
        copies = self.copies if span.shape.numel() or span.answers else ()
        return piece_of(span.shape, value.detach(), span.piece, copies)

    def _whole(self, key: str, value: object) -> Leaf | Fixed:
        if not isinstance(value, torch.Tensor):
            return Fixed(value, self.copies)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            refuse_class(f"optimizer state {key!r} of {self.names[0]}", value)
        return whole(key, value, self.copies)

    # ------------------------------------------------------------ what is to come
    def is_cut(self, key: str, span: Span, shape: torch.Size) -> bool:
        """Says whether a state that was saved in a shape has one element for each of a parameter's, and is cut here."""
        if not self.is_shard and not is_dtensor(self.param):
            return False
        return shape == span.shape and is_elementwise(key, torch.empty(shape, device="meta"), span.shape)

    def zeros(self, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.zeros_like(self.param.detach(), dtype=dtype)

    def wanted(self, span: Span, value: torch.Tensor, ranks: Ranks) -> Leaf:
        """Returns the leaf that fills what :meth:`zeros` has made, of one parameter."""
        if is_dtensor(value):
            return of_dtensor(f"optimizer state of {span.name}", value, ranks)
        return self._piece(span, value)
