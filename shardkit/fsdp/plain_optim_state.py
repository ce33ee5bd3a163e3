"""Optimizer state over shards in the form in which one process has it, and back.

That form is ``optimizer.state_dict()`` of the same optimizer over the same parameters, not sharded: by index, in full
shapes. A file of it is read and written at any world size, and without this library. It needs a shard for each
parameter (``fully_shard``, or ``FSDP(flatten=False)``).
"""

from __future__ import annotations

import copy

from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..optimizers.shards import shard_behind
from ..oss.state import to_cpu
from ..types import StateDict, Tree
from .optim_state import gather_states, shard_state
from .originals import Listing, managing
from .state_of_shards import note_whole_states, options_in


def gather_plain(optimizer: Optimizer, keep_on: bool, saved: StateDict | None = None) -> StateDict | None:
    """The state (``saved``, by default ``optimizer.state_dict()``) as one process has it, on the CPU (collective).

    None where not ``keep_on``.

    Raises:
        ConfigurationError: a shard has several parameters in it.
    """
    saved = optimizer.state_dict() if saved is None else saved
    flats = _flats_of(optimizer)
    own_of = [saved["state"].get(index, {}) for index in range(len(flats))]
    shards = [(flat, own) for flat, own in zip(flats, own_of, strict=True) if flat is not None]
    whole = iter(gather_states([flat for flat, _ in shards], [own for _, own in shards], keep_on))
    state: dict[int, StateDict] = {}
    for index, (flat, own) in enumerate(zip(flats, own_of, strict=True)):
        found = to_cpu(own) if flat is None else next(whole)[0]
        if found:
            state[index] = found
    if not keep_on:
        return None
    groups = [{**options_in(g), "params": copy.copy(g["params"])} for g in saved["param_groups"]]
    others = {k: v for k, v in saved.items() if k not in ("state", "param_groups")}
    named = {k: v for k, v in saved["state"].items() if not isinstance(k, int)}
    return {"state": {**state, **named}, "param_groups": groups, **others}


def shard_plain(optimizer: Optimizer, full: StateDict) -> StateDict:
    """This rank's part of such a state, for ``optimizer.load_state_dict``; the argument is not changed.

    Raises:
        ConfigurationError: it is of another model.
    """
    flats = _flats_of(optimizer)
    ids = [i for g in full["param_groups"] for i in g["params"]]
    if len(ids) != len(flats):
        raise ConfigurationError(
            f"this optimizer state is of {len(ids)} parameters, this optimizer has {len(flats)}; nothing was loaded. "
            "Make it over the same parameters as when the state was saved"
        )
    position = {i: k for k, i in enumerate(ids)}
    state: dict[object, Tree] = {}
    for key, values in full["state"].items():
        if key not in position:
            state[key] = values
            continue
        index = position[key]
        flat = flats[index]
        state[index] = dict(values) if flat is None else shard_state(flat, [index], {index: values})
    groups, begin = [], 0
    for g in full["param_groups"]:
        end = begin + len(g["params"])
        groups.append({**g, "params": list(range(begin, end))})
        begin = end
    return {**full, "state": state, "param_groups": groups}


def follow_shards(optimizer: Optimizer) -> None:
    """An optimizer that was made before its parameters were sharded has the shards in their places from now on.

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


def _flats_of(optimizer: Optimizer) -> list[Listing | None]:
    """Of each parameter the flat parameter whose shard it is."""
    found = [shard_behind(p) for g in optimizer.param_groups for p in g["params"]]
    return [None if flat is None else _of_one(flat) for flat in found]


def _of_one(flat: Listing) -> Listing:
    if len(flat.originals) != 1:
        raise ConfigurationError(
            f"a shard has {len(flat.originals)} parameters in it ({', '.join(flat.names[:3])}, ...), so that optimizer "
            "state has no place for each: shard by fully_shard(module), or FSDP(module, flatten=False)"
        )
    return flat


note_whole_states(lambda optimizer, saved: gather_plain(optimizer, True, saved) or {}, shard_plain)
