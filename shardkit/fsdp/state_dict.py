"""State dicts of sharded modules: full ones under the wrapped modules' names, local ones with shards.

A full state dict is made and loaded unit by unit: a unit's parameters are full while its own entries are copied, and
only then. The entries of modules that hold FSDP modules somewhere below come out right in the same way, for everything
hangs on the hooks and methods that ``nn.Module`` calls for each of its children.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .inside import clean as clean
from .inside import collecting, end_loading_shards

if TYPE_CHECKING:
    from .wrapper import FSDP

translates_keys = True  # see no_pre_load_state_dict_hook of the compat layer
INNER = "_fsdp_wrapped_module._fpw_module."
OUTER = "_fsdp_wrapped_module."


def _rename(entries: OrderedDict[str, Any], prefix: str, rename: Callable[[str], str]) -> None:
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


def full(wrapper: FSDP, collect: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The full state dict of a wrapper and what is below; ``collect`` is ``nn.Module.state_dict``."""
    destination, prefix, keep_vars = _arguments(args, kwargs)
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    before = {key: id(value) for key, value in destination.items()}
    with _full_or_as_is(wrapper), collecting():
        collect(destination=destination, prefix=prefix, keep_vars=keep_vars)
        _rename(destination, prefix, _without_wrapping)
        if hasattr(destination, "_metadata"):
            _rename(
                destination._metadata, prefix, lambda rest: _without_wrapping(rest + ".").removesuffix(".")
            )
        if not wrapper._state_is_local:
            _detach_entries(wrapper, destination, prefix, before)
    return destination


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str, bool]:
    names = ("destination", "prefix", "keep_vars")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("destination"), given.get("prefix", ""), given.get("keep_vars", False)


def _full_or_as_is(wrapper: FSDP) -> contextlib.AbstractContextManager[None]:
    if wrapper._state_is_local or wrapper._summoned is not None:
        return contextlib.nullcontext()
    return wrapper._summon(recurse=False, writeback=False)


def _detach_entries(
    wrapper: FSDP, destination: OrderedDict[str, Any], prefix: str, before: dict[str, int]
) -> None:
    """Copies this wrapper's own entries out of memory that is about to go; buffers get their own dtype back."""
    from .wrapper import FSDP

    below, dtypes = [], {}
    waiting: list[tuple[str, nn.Module]] = [(prefix, wrapper._fsdp_wrapped_module._fpw_module)]
    while waiting:  # each of its paths counts, and what is below other units is theirs
        path, m = waiting.pop()
        if isinstance(m, FSDP):
            below.append(path)
            continue
        for buffer in m._buffers if wrapper._buffer_dtypes else ():
            if (m, buffer) in wrapper._buffer_dtypes:
                dtypes[path + buffer] = wrapper._buffer_dtypes[m, buffer]
        waiting += [(f"{path}{name}.", child) for name, child in m._modules.items() if child is not None]
    theirs = tuple(below)
    only_rank_0 = wrapper._state_on_rank_0_only and wrapper._group.rank != 0
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
        device = wrapper._state_dict_device or value.device
        destination[key] = value.detach().to(device=device, dtype=dtype, copy=True)


# ------------------------------------------------------------ loading
def register_hooks(wrapper: FSDP) -> None:
    """Loading enters and leaves each wrapper through these, wherever it began."""
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


def _before_load(
    wrapper: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    if not wrapper._state_is_local and wrapper._summoned is None:
        wrapper._enter_summon(True)
        wrapper._loading = True
        _leave_out_own_shards(wrapper, state_dict)
    if not translates_keys:
        return
    listed = {n for n, p in wrapper._fsdp_wrapped_module._parameters.items() if p is not None}
    items = [(k, v) for k, v in state_dict.items() if k.startswith(prefix)]
    for key, value in items:
        rest = key[len(prefix) :]
        if not rest.startswith(OUTER):
            del state_dict[key]
            state_dict[prefix + (OUTER if rest in listed else INNER) + rest] = value


def _leave_out_own_shards(wrapper: FSDP, state_dict: dict[str, Any]) -> None:
    """torch.distributed.checkpoint adds what it finds in a model to what it loads: its shards, to the full values."""
    own = {id(flat.param) for flat in wrapper._flats}
    for key in [k for k, value in state_dict.items() if id(value) in own]:
        del state_dict[key]


def _after_load(wrapper: Any, incompatible: Any) -> None:
    for names in incompatible:
        names[:] = [clean(n) for n in names]
    if wrapper._loading:
        wrapper._loading = False
        wrapper._exit_summon()


@contextlib.contextmanager
def local_state(wrapper: FSDP) -> Iterator[None]:
    """Inside, state dicts of the wrapper and those below hold this rank's shards."""
    from .wrapper import FSDP

    before = [(m, m._state_is_local) for m in wrapper.modules() if isinstance(m, FSDP)]
    for w, _ in before:
        w._state_is_local = True
    try:
        with collecting():
            yield
    finally:
        for w, was_local in before:
            w._state_is_local = was_local


def load(wrapper: FSDP, load_plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.load_state_dict`` that leaves nothing summoned behind if it raises."""
    from .wrapper import FSDP

    try:
        return load_plain(*args, **kwargs)
    finally:
        for m in reversed(list(wrapper.modules())):
            end_loading_shards(m)
            if isinstance(m, FSDP) and m._loading:
                m._loading = False
                m._exit_summon()


def named_buffers_of(module: nn.Module) -> list[str]:
    """Cleaned names of all buffers."""
    return [clean(n) for n, _ in module.named_buffers()]
