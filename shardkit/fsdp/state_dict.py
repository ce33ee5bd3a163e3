"""State dicts of sharded modules: full ones under the wrapped modules' names, local ones with shards.

A full state dict is made and loaded unit by unit: a unit's parameters are full while its own entries are copied, and
only then. The entries of modules that hold FSDP modules somewhere below come out right in the same way, for everything
hangs on the hooks and methods that ``nn.Module`` calls for each of its children.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..torch_seams.module_versions import versions_of
from ..types import AnyCallable, Args, IncompatibleKeys, Kwargs, StateDict
from .inside import collecting, end_loading_shards
from .names import INNER, OUTER, clean
from .state import ShardingState, state_of
from .summoning import enter_summon, exit_summon, summoned


def _rename(entries: StateDict, prefix: str, rename: Callable[[str], str]) -> None:
    """Renames keys that begin with a prefix, keeping the order."""
    items = list(entries.items())
    entries.clear()
    for key, value in items:
        entries[prefix + rename(key[len(prefix) :]) if key.startswith(prefix) else key] = value


def _without_wrapping(rest: str) -> str:
    for part in (INNER, OUTER):
        if rest.startswith(part):
            return rest[len(part) :]
    return rest


def full(state: ShardingState, collect: AnyCallable, *args: object, **kwargs: object) -> StateDict:
    """The full state dict of a wrapper and what is below; ``collect`` is its ``nn.Module.state_dict``."""
    destination, prefix, keep_vars = _arguments(args, kwargs)
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    before = {key: id(value) for key, value in destination.items()}
    with _full_or_as_is(state), collecting():
        collect(destination=destination, prefix=prefix, keep_vars=keep_vars)
        _rename(destination, prefix, _without_wrapping)
        versions = versions_of(destination)
        if versions is not None:
            _rename(versions, prefix, lambda rest: _without_wrapping(rest + ".").removesuffix("."))
        if not state.state_is_local:
            detach_entries(state, destination, prefix, before)
    return destination


def _arguments(args: Args, kwargs: Kwargs) -> tuple[StateDict | None, str, bool]:
    names = ("destination", "prefix", "keep_vars")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("destination"), given.get("prefix", ""), given.get("keep_vars", False)


def _full_or_as_is(state: ShardingState) -> contextlib.AbstractContextManager[None]:
    if state.state_is_local or state.summoned is not None:
        return contextlib.nullcontext()
    return summoned(state, recurse=False, writeback=False)


def detach_entries(state: ShardingState, destination: StateDict, prefix: str, before: dict[str, int]) -> None:
    """Copies a unit's own entries out of memory that is about to go; buffers get their own dtype back.

    Args:
        before: what was in ``destination``, by key and identity, before the unit added to it.
    """
    below, dtypes = [], {}
    waiting: list[tuple[str, nn.Module]] = [(prefix, state.module)]
    while waiting:  # each of its paths counts, and what is below other units is theirs
        path, m = waiting.pop()
        if state_of(m) not in (None, state):
            below.append(path)
            continue
        for buffer in m._buffers if state.buffer_dtypes else ():
            if (m, buffer) in state.buffer_dtypes:
                dtypes[path + buffer] = state.buffer_dtypes[m, buffer]
        waiting += [(f"{path}{name}.", child) for name, child in m._modules.items() if child is not None]
    theirs = tuple(below)
    only_rank_0 = state.options.state_dict_on_rank_0_only and state.group.rank != 0
    for key in list(destination):
        if not key.startswith(prefix) or before.get(key) == id(destination[key]):
            continue
        if only_rank_0:
            del destination[key]
            continue
        value = destination[key]
        if not isinstance(value, torch.Tensor) or key.startswith(theirs):
            continue
        dtype = dtypes.get(key, value.dtype)
        device = state.options.state_dict_device or value.device
        destination[key] = value.detach().to(device=device, dtype=dtype, copy=True)


# ------------------------------------------------------------ loading
def begin_loading(state: ShardingState, state_dict: StateDict) -> None:
    """Full values, or shards, are about to be put into a unit."""
    state.unit.forget_errors()
    if state.state_is_local or state.summoned is not None:
        return
    enter_summon(state, True)
    state.is_loading = True
    # torch.distributed.checkpoint adds what it finds in a model to what it loads: its shards, to the full values
    own = {id(listing.param) for listing in state.listings}
    for key in [k for k, value in state_dict.items() if id(value) in own]:
        del state_dict[key]


def end_loading(state: ShardingState) -> None:
    """They are in; the unit keeps its shards."""
    if state.is_loading:
        state.is_loading = False
        exit_summon(state)


def add_wrapping(wrapper: Any, state_dict: StateDict, prefix: str) -> None:
    """Keys of a wrapped module's parameters become those under which the wrapper has them."""
    listed = {n for n, p in wrapper._fsdp_wrapped_module._parameters.items() if p is not None}
    items = [(k, v) for k, v in state_dict.items() if k.startswith(prefix)]
    for key, value in items:
        rest = key[len(prefix) :]
        if not rest.startswith(OUTER):
            del state_dict[key]
            state_dict[prefix + (OUTER if rest in listed else INNER) + rest] = value


def clean_names(incompatible: IncompatibleKeys) -> None:
    """Names of missing and unexpected keys lose what wrapping added."""
    for names in incompatible:
        names[:] = [clean(n) for n in names]


@contextlib.contextmanager
def local_state(state: ShardingState) -> Iterator[None]:
    """Inside, state dicts of a unit and those below hold this rank's shards."""
    before = [(s, s.state_is_local) for s in state.states()]
    for s, _ in before:
        s.state_is_local = True
    try:
        with collecting():
            yield
    finally:
        for s, was_local in before:
            s.state_is_local = was_local


@contextlib.contextmanager
def loading_own(state: ShardingState, is_local: bool) -> Iterator[None]:
    """Inside, what a unit loads, without those below it, is this rank's shards where ``is_local``."""
    state.state_is_local = is_local
    yield
    state.state_is_local = False


@contextlib.contextmanager
def loading(door: nn.Module) -> Iterator[None]:
    """Leaves nothing summoned behind if loading raises."""
    try:
        yield
    finally:
        for m in reversed(list(door.modules())):
            end_loading_shards(m)
            state = state_of(m)
            if state is not None:
                end_loading(state)
