"""Shards as slots of optimizer state; the state of optimizers over them in the form in which one process has it.

That form is ``optimizer.state_dict()`` of the same optimizer over the same parameters, not sharded: by index, in full
shapes. A file of it is read and written at any world size, and without this library. It needs a shard for each
parameter (``fully_shard``, or ``FSDP(flatten=False)``).
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..optimizer_state.forms import Held, gather_by_index, shard_by_index
from ..optimizer_state.marking import note_whole_states
from ..optimizer_state.slots import Slot, Span
from ..optimizers.shards import refuse_stand_ins, shard_behind
from ..types import StateDict
from .flat_values import taken_apart
from .originals import managing
from .registered import Registered
from .state import dotted, named_units, plain_name
from .state_dict import name_at


def slot_of(listing: Registered) -> Slot:
    """Returns the slot that stands for original parameters in the state of an optimizer with this listing's shard."""
    rank = listing.group.rank
    here = {p.item: p for p in listing.layout.pieces() if p.rank == rank}
    spans = []
    for item, (name, original) in enumerate(zip(listing.names, listing.originals, strict=True)):
        piece, is_empty = here.get(item), not original.shape.numel()
        answers = rank == 0 if is_empty else piece is not None and piece.start == 0
        full = dotted(listing.flat.path_of(listing.first + item), name)
        spans.append(Span(full, original.shape, piece, answers))
    join = functools.partial(gather_parts, listing)
    return Slot(listing.param, tuple(spans), True, group=listing.group, join=join)


@torch.no_grad()
def gather_parts(listing: Registered, value: torch.Tensor, keep: bool = True) -> list[torch.Tensor]:
    """Returns the original parameters' parts of a state, on the CPU (collective)."""
    shard = value.detach().as_subclass(torch.Tensor).contiguous().view(-1).to(listing.flat.compute_device)
    full = shard
    if listing.group.world_size > 1:
        full = shard.new_empty(listing.layout.padded_numel)
        listing.group.channel("parameters").all_gather_into(
            full, shard, listing.layout.sizes, label=f"optimizer state of {listing.label}"
        )
    # where execution is lazy, ranks that keep nothing take part only if they wait for it
    pieces = taken_apart(full[: listing.layout.numel].cpu(), listing.layout)
    return [p.view(m.shape).clone() for p, m in zip(pieces, listing.originals, strict=True)]


# ------------------------------------------------------------ by index
def gather_plain(optimizer: Optimizer, keep_on: bool, saved: StateDict | None = None) -> StateDict | None:
    """Returns state (``saved``, else ``optimizer.state_dict()``) as one process has it, on the CPU (collective).

    None where not ``keep_on``.

    Raises:
        ConfigurationError: a shard has several parameters in it.
    """
    saved = optimizer.state_dict() if saved is None else saved
    return gather_by_index(_slots_of(optimizer), saved, keep_on)


def shard_plain(optimizer: Optimizer, full: StateDict) -> StateDict:
    """Returns this rank's part of such a state, for ``optimizer.load_state_dict``; the argument is not changed.

    Raises:
        ConfigurationError: it is of another model.
    """
    return shard_by_index(_slots_of(optimizer), full)


def _slots_of(optimizer: Optimizer) -> list[Slot | None]:
    """Finds what each parameter is a shard of, if it is one."""
    found = [shard_behind(p) for g in optimizer.param_groups for p in g["params"]]
    return [None if listing is None else slot_of(_of_one(listing)) for listing in found]


def _of_one(listing: Registered) -> Registered:
    if len(listing.originals) != 1:
        raise ConfigurationError(
            f"a shard has {len(listing.originals)} parameters in it ({', '.join(listing.names[:3])}, ...), so that "
            "optimizer state has no place for each: shard by fully_shard(module), or FSDP(module, flatten=False)"
        )
    return listing


def follow_shards(optimizer: Optimizer) -> None:
    """Gives an optimizer that was made before its parameters were sharded the shards in their places.

    Raises:
        ConfigurationError: it has state, which is of whole parameters; or a shard has several parameters in it.
    """
    for group in optimizer.param_groups:
        for k, param in enumerate(group["params"]):
            flat = managing(param) if shard_behind(param) is None else None
            if flat is None:
                continue
            if optimizer.state.get(param):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has stepped, or loaded state, before its model was sharded; shard "
                    "the model first, and load the state afterwards"
                )
            here = [one for one in flat.listings if any(o.param is param for o in one.originals)]
            group["params"][k] = _of_one(here[0]).param


# ------------------------------------------------------------ by name
def parameters_of(model: nn.Module, optimizer: Optimizer) -> dict[int, Held]:
    """Returns all parameters of a model by identity, shards as the core lists them first, the same order on all ranks.

    Raises:
        ConfigurationError: the optimizer has others.
    """
    refuse_stand_ins(optimizer, "state by names")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    position = {id(p): i for i, p in enumerate(params)}
    found: dict[int, Held] = {}
    for path, state in named_units(model):
        for listing in state.listings:
            names = [name_at(path, n) for n in listing.names]
            found[id(listing.param)] = Held(names, slot_of(listing), position.get(id(listing.param), -1))
    for name, param in model.named_parameters():
        found.setdefault(id(param), Held([plain_name(name)], None, position.get(id(param), -1)))
    for param in params:
        if id(param) not in found:
            raise ConfigurationError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that the model does not list; make "
                "it of model.parameters() after the model was wrapped, and pass the outermost model here"
            )
    return found


note_whole_states(lambda optimizer, saved: gather_plain(optimizer, True, saved) or {}, shard_plain)
