"""Kinds of states of an optimizer: one element for each of a parameter's, or anything else; and which of them fit."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..backend import Group
from ..checks import all_gather_facts
from ..errors import ConfigurationError, RankMismatchError
from ..optimizers.shards import options_of
from ..torch_seams.tensors import INTEGERS
from ..types import SavedState, StateDict, Tree

# What torch's optimizers keep as one number for a parameter, were the parameter one number itself.
NUMBERS = ("step", "mu", "eta", "mu_product")


def is_elementwise(key: object, value: object, shape: Sequence[int]) -> bool:
    """Says whether a state has one element for each of a parameter's, or of a shard's, of this shape.

    Every decision to gather, cut or reshape a state is this one.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape):
        return False
    return value.dim() > 0 or (len(shape) == 0 and key not in NUMBERS)


def to_cpu(value: object) -> Tree:
    """Copies tensors inside nested containers to the CPU, detached; everything else stays as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(v) for v in value)
    return value


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
        return torch.tensor(self.value, dtype=self.dtype).view(self.shape)


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
            "this is no optimizer state: expected a dict with 'state' and 'param_groups', as state_dict() gives it"
        )


def check_same_state(group: Group, state_dict: StateDict, problem: ConfigurationError | None) -> None:
    """Raises on all ranks what is wrong on one (collective).

    Args:
        state_dict: torch's form; parameters may have no state on some ranks.
        problem: what this rank has found wrong with it.
    """
    if group.world_size == 1:
        if problem is not None:
            raise problem
        return
    prints = _fingerprints(state_dict) if problem is None else {}
    everybody = all_gather_facts(
        group.channel("control"),
        (None if problem is None else str(problem), prints),
        label="check of loaded state",
    )
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
            now = flat.view(-1)[a:b]
            if saved is None:
                now.zero_()
            else:
                now.copy_(saved[k])


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
