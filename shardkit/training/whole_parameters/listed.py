"""The model's parameters as they were written, and how an optimizer over sharded ones lists them.

[Note: listed] ``param_groups`` list a stand-in for each sharded parameter. It has the name, shape and dtype that the
parameter was written with, so that rules by name and by dimension work, and no values: those lie on all ranks. Its
``grad`` is the part of the gradient that this rank has, a view, so that what scales, clips and clears the gradients of
an optimizer's parameters does what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, SupportsIndex

import torch
from torch import nn

from ...errors import ConfigurationError, LifecycleError
from ...fsdp.construct import wake
from ...fsdp.flat_param import FlatParam
from ...fsdp.originals import refuse_split
from ...fsdp.state import state_of
from ...fsdp.state_dict import place_of, written_parameters
from ...layout import Piece
from ...optimizers.shards import note_stand_in
from ...torch_seams.tensors import ALIKE, FACTS, SHAPE, as_plain, name_of
from ...types import AnyCallable, Args, Kwargs, Memo, Tree

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
        return (self.listed if self.flat is None else self.flat.param).requires_grad

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

    @classmethod
    def of(cls, part: Part, flat: FlatParam) -> ListedParameter:
        """Makes one with one element's memory, whatever the shape."""
        shape = part.shape
        values = torch.empty((1,) * len(shape), dtype=flat.param.dtype, device=flat.param.device).expand(
            shape
        )
        made: ListedParameter = torch.Tensor._make_subclass(cls, values, flat.param.requires_grad)
        made.part = part
        note_stand_in(made, flat.param)
        return made

    @property
    def _shard(self) -> torch.Tensor:
        flat = self.part.flat
        if flat is None:
            raise LifecycleError(f"parameter {self.part.name!r} is not sharded any more")
        return flat.param

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Returns the part of the gradient on this rank, [n]; None if no rank has a gradient."""
        gradient, part = self._shard.grad, self.part
        if gradient is None or (part.here is not None and not part.may_have_gradient):
            return None
        flat = part.flat
        # ranks cut alike: the first has the shard's
        if flat is not None and flat.group.backend.even_shards_only:
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
        flat = self.part.flat
        if flat is None or flat.param.grad is None:
            return
        flat.unused.originals[self.part.number] = self.part.set_to_none = True
        if False not in flat.unused.originals:
            flat.param.grad = None
        else:
            self.part.cut(flat.param.grad).zero_()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._shard.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ListedParameter:
        """Sets whether the shard requires a gradient."""
        self._shard.requires_grad_(requires_grad)
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
        state = state_of(module)
        if state is not None:
            wake(state)
    found, seen = [], set()
    pieces: dict[int, list[list[Piece]]] = {}  # of each flat parameter, by item
    for name, param in written_parameters(model):
        flat, number = place_of(param)
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
    without = [p.name for p in found if (p.listed if p.flat is None else p.flat.param).is_meta]
    if not found or without:
        raise ConfigurationError(
            f"parameters {without[:3]} are on the meta device and have no values; call to_empty() or load a state dict "
            "before making the optimizer"
            if without
            else "the model has no parameters to optimize"
        )
    return found
