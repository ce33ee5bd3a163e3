"""State dicts that hold this rank's shards, as torch.distributed.checkpoint meets them.

``optimizer.state_dict()`` and ``local_state_dict()`` have shards under the same keys on all ranks. For a file of each
rank's own that is right. torch.distributed.checkpoint takes plain tensors for the same on all ranks, and would keep
one rank's for all. So what is a rank's own has a class of its own in state dicts, which refuses that and is a plain
tensor in all other respects; what is pickled is one.

[Note: requests] ``torch.distributed.checkpoint.state_dict`` (``get_model_state_dict`` and its kin) walks over the
modules of a model and asks each for ``_fqn_modifiers()``, names that are no part of a parameter's. It does so first,
and nobody else does. There a wrapper can see what is wanted, from the arguments of the function that was called, and
refuse what would be wrong, before anything is sent or changed. Nothing else tells it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import ClassVar, NoReturn

import torch
from torch.optim import Optimizer

from ..checks import problems_of_ranks
from ..errors import ConfigurationError, ShardkitError
from ..optimizers.elementwise import KNOWN
from ..optimizers.shards import listing_of, refuse_stand_ins, shard_behind
from ..torch_seams.hooks import callers
from ..torch_seams.tensors import MarkedTensor, as_plain, local_of, stays_marked
from ..torch_seams.wrappers import versions_of
from ..types import AnyCallable, Args, Kwargs, Memo, ParamGroup, SavedState, StateDict, Tree
from .kinds import is_elementwise

_TORCHS = "torch.distributed.checkpoint.state_dict"
_OF_MODELS = ("get_model_state_dict", "set_model_state_dict")
_OF_OPTIMIZERS = ("get_optimizer_state_dict", "set_optimizer_state_dict", "get_state_dict", "set_state_dict")


class OwnOfRank(MarkedTensor):
    """A tensor in a state dict that is another one on each rank. Copies of it are such, too."""

    remedy: ClassVar[str] = ""

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        with as_plain():
            result = func(*args, **(kwargs or {}))
            if stays_marked(result, args, cls):
                result.__class__ = cls
        return result

    def __deepcopy__(self, memo: Memo) -> torch.Tensor:
        copied: torch.Tensor = self.clone()
        memo[id(self)] = copied
        return copied

    def _refuse(self, *_: object) -> NoReturn:
        # no ConfigurationError: for a ValueError torch would put a message of its own
        raise ShardkitError(self.remedy)

    # What torch.distributed.checkpoint asks of a tensor that knows how it is spread.
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of one of torch's functions that get or set the state dicts of a model and its optimizers.

    Attributes:
        optimizers: what was passed; empty for functions of models alone.
        options: its StateDictOptions, None for the default.
        submodules: what was passed, of which alone a state dict is wanted.
    """

    function: str
    optimizers: tuple[Optimizer, ...]
    options: object
    submodules: object

    def wants(self, option: str) -> bool:
        """Says whether a flag of the options is set."""
        return bool(getattr(self.options, option, False))


def current_request() -> Request | None:
    """Tells what torch is being asked for at this moment; see [Note: requests]."""
    for frame in callers():
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == _TORCHS and name in _OF_MODELS + _OF_OPTIMIZERS:
            given = frame.f_locals
            optimizers = given.get("optimizers", ()) if name in _OF_OPTIMIZERS else ()
            optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
            return Request(name, optimizers, given.get("options"), given.get("submodules"))
    return None


def is_called_by(function: str) -> bool:
    """Says whether that function of torch's called the method that asks, through what torch puts around methods."""
    for frame in islice(callers(), 1, 5):
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == _TORCHS:
            return True
    return False


# ------------------------------------------------------------ shards in state dicts
# Of an optimizer and its state_dict() the state as one process has it, and of such a state this rank's part.
WholeStates = tuple[Callable[[Optimizer, StateDict], StateDict], Callable[[Optimizer, StateDict], StateDict]]
_whole_states: list[WholeStates] = []

# In the groups of a state dict: whose shards it is of. In an attribute of the dict, as torch notes versions of modules,
# which copies, files and optimizers that load it keep; in files of shardkit 0.2 an option among others.
NOTE = "shardkit_shards"

_GATHERED = (
    "FSDP.gather_full_optim_state_dict(optimizer) (on rank 0; load it by get_shard_from_optim_state_dict; after "
    "fully_shard these are methods of shardkit.sharding_of(model)), of shardkit.torch_fsdp "
    "FSDP.optim_state_dict(model, optimizer) or get_state_dict of shardkit.torch_fsdp.state_dict, or "
    "optimizer.state_dict() with torch.save for each rank"
)


class StateOfShard(OwnOfRank):
    """Optimizer state with one element for each of a shard."""

    remedy = (
        "this optimizer state is of FSDP's shards, another part on each rank, and torch.distributed.checkpoint "
        f"would keep one rank's for all. Save what comes from {_GATHERED}"
    )


class LocalShard(OwnOfRank):
    remedy = (
        "this local_state_dict() has FSDP's shards, another part on each rank, and torch.distributed.checkpoint would "
        "keep one rank's for all. Save FSDP.state_dict(), which is full on every rank, or local_state_dict() with "
        "torch.save for each rank"
    )


def note_whole_states(
    gather: Callable[[Optimizer, StateDict], StateDict], own_part: Callable[[Optimizer, StateDict], StateDict]
) -> None:
    """Lets torch's functions for state dicts get whole states from now on, where each shard is of one parameter."""
    _whole_states[:] = [(gather, own_part)]


def mark_state_dicts(optimizer: Optimizer, on_load: Callable[[Optimizer], None]) -> None:
    """Lets the optimizer's state dicts tell from now on whose state they hold; it still loads them.

    Args:
        on_load: called when another state is loaded.
    """

    def unmarked(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        on_load(optimizer)
        if _whole_states and _is_asked_for_whole(optimizer):
            return _whole_states[0][1](optimizer, state_dict)
        state = {i: {k: _plain(v) for k, v in values.items()} for i, values in state_dict["state"].items()}
        return {**state_dict, "state": state}

    optimizer.register_state_dict_post_hook(_marked)
    optimizer.register_load_state_dict_pre_hook(unmarked)


def _is_asked_for_whole(optimizer: Optimizer) -> bool:
    """Says whether torch's functions ask, who know nothing of shards; DTensors say themselves what they are."""
    params = (p for g in optimizer.param_groups for p in g["params"])
    return current_request() is not None and any(shard_behind(p) is not None for p in params)


def _marked(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    if _whole_states and _is_asked_for_whole(optimizer):
        return _whole_states[0][0](optimizer, state_dict)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    state = dict(state_dict["state"])
    for index, values in state.items():
        param = params[index] if isinstance(index, int) else None
        flat = None if param is None else shard_behind(param)
        if param is not None and flat is not None and flat.group.world_size > 1:
            state[index] = marked(values, param.shape)
    groups = [OrderedDict(saved) for saved in state_dict["param_groups"]]
    for saved, own in zip(groups if state else (), optimizer.param_groups, strict=False):
        note_shards(saved, own["params"])
    return {**state_dict, "state": state, "param_groups": groups}


def marked(state: SavedState, shape: torch.Size) -> StateDict:
    """Returns a shard's state that tells that it is one; the shape is the shard's."""
    return {k: v.as_subclass(StateOfShard) if is_elementwise(k, v, shape) else v for k, v in state.items()}


def options_in(group: ParamGroup) -> ParamGroup:
    """Copies what a group of a state dict says of its parameters."""
    return copy.deepcopy({k: v for k, v in group.items() if k not in ("params", NOTE)})


def note_shards(group: ParamGroup, params: Iterable[torch.Tensor]) -> None:
    """Makes a group of a state dict, an OrderedDict, tell of which shards it is."""
    group._metadata = {NOTE: _note(params)}  # type: ignore[attr-defined]


def _note(params: Iterable[torch.Tensor]) -> list[list[object]]:
    """Describes each flat parameter of a group: the rank, the world size, names and places of its originals."""
    flats = [f for f in map(listing_of, params) if f is not None]
    return [[f.group.rank, f.group.world_size, list(f.names), f.layout.described()] for f in flats]


# ------------------------------------------------------------ what was loaded
def check_loaded(optimizer: Optimizer, flats: Iterable[Tree]) -> None:
    """Refuses state of other shards on all ranks, before it steps (collective).

    Torch loads what it is given, and has no hook for optimizers that never stepped. It keeps what groups hold.
    """
    mine = _wrong_shards(optimizer) or _wrong_shapes(optimizer)
    for group in {f.group.ranks: f.group for f in flats}.values():
        for rank, wrong in problems_of_ranks(group, mine, "check of loaded optimizer state"):
            raise ConfigurationError(
                f"rank {rank} has loaded optimizer state {wrong}. No parameter was changed on any rank. "
                "optimizer.state_dict() of shards loads on the rank that saved it, with the same world size and "
                "wrapping; for others use gather_full_optim_state_dict and get_shard_from_optim_state_dict"
            )
    for param_group in optimizer.param_groups:
        param_group.pop(NOTE, None)
        (versions_of(param_group) or {}).pop(NOTE, None)
    for values in optimizer.state.values():  # loaded before there was a hook for it
        if isinstance(values, dict):
            values.update({k: _plain(v) for k, v in values.items()})


def _wrong_shards(optimizer: Optimizer) -> str | None:
    for group in optimizer.param_groups:
        saved, own = (versions_of(group) or group).get(NOTE), _note(group["params"])
        if saved is None or saved == own:
            continue
        if len(saved) != len(own):
            return f"of {len(saved)} shards in a group that has {len(own)}"
        a, b = next((a, b) for a, b in zip(saved, own, strict=True) if a != b)
        if a[1] != b[1]:
            return f"of world size {a[1]}, this is {b[1]}"
        if a[0] != b[0]:
            return f"of rank {a[0]}"
        return f"of a shard of {a[2]} with {a[3]} elements, here are {b[2]} with {b[3]}"
    return None


def _wrong_shapes(optimizer: Optimizer) -> str | None:
    """Compares shapes, of state that tells nothing about itself."""
    if type(optimizer) not in KNOWN:
        return None
    for param, state in optimizer.state.items():
        flat = listing_of(param) if isinstance(param, torch.Tensor) else None
        for key, value in state.items() if flat is not None else ():
            if (
                isinstance(value, torch.Tensor)
                and value.dim() > 0
                and local_of(value).shape != local_of(param).shape
            ):
                names, found, own = flat.names, tuple(local_of(value).shape), tuple(local_of(param).shape)
                return f"{key!r} of shape {found} for a shard of {names} of shape {own}"
    return None


def _plain(value: Tree) -> Tree:
    return value.as_subclass(torch.Tensor) if isinstance(value, StateOfShard) else value


def mark_shards(params: Iterable[torch.Tensor], state: StateDict) -> None:
    """Makes the shards in a local state dict tell that they are such."""
    shards = {p.data_ptr() for p in params if p.numel()}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type != "meta" and value.data_ptr() in shards:
            state[key] = value.as_subclass(LocalShard)


# ------------------------------------------------------------ asked by torch for a state dict
def check_request(flats: Callable[[], Iterable[Tree]] | None = None) -> None:
    """Refuses what torch's functions for state dicts would do wrong with shards; see [Note: requests].

    Args:
        flats: gives all flat parameters of the module that is asked; None where shards are listed under the
            parameters' names.
    """
    request = current_request()
    if request is None:
        return
    for optimizer in request.optimizers:
        refuse_stand_ins(optimizer, request.function)
    behind = [shard_behind(p) for o in request.optimizers for g in o.param_groups for p in g["params"]]
    if any(f is not None and not (flats is None and len(f.originals) == 1) for f in behind):
        raise ConfigurationError(
            f"{request.function}: this optimizer's state is of FSDP's shards, another part on each rank, and torch "
            f"would take it for whole parameters'. Use {_GATHERED}"
        )
    if flats is None:
        return  # torch leaves out what it is told to by these names
    if request.submodules:
        raise _not_possible(request, "submodules=")
    if request.wants("ignore_frozen_params") and any(
        not m.param.requires_grad for flat in flats() for m in flat.originals
    ):
        raise _not_possible(request, "ignore_frozen_params=True")


def _not_possible(request: Request, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{request.function}({what}) looks for parameters that FSDP has put into flat parameters; take what you want "
        "by name from FSDP.state_dict(), on all ranks"
    )
