"""The shards of a wrapper as torch_xla names, orders, pads and shapes them, and what it tells about them.

Legend: S numel of a shard here, R numel of torch_xla's shard (they differ where there is one rank only).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.fsdp.flat_param import FlatParam
from shardkit.fsdp.names import INNER, OUTER, clean
from shardkit.layout import ShardLayout
from shardkit.nn.data_parallel import FullyShardedDataParallel

from .shard_names import PREFIX, flat_original, in_state_dict, own_original, shard_name


@dataclass
class Shard:
    """One of a wrapper's flat parameters.

    Attributes:
        flat: it.
        listed: where nn.Module finds its shard, as a path within the wrapper.
        original: the same as torch_xla has it.
        size: of the whole parameter.
        rows: shape of a row where shards are rows, else None.
        numel: R.
    """

    flat: FlatParam
    listed: str
    original: str
    size: torch.Size
    rows: torch.Size | None
    numel: int

    @property
    def name(self) -> str:
        """Key in state dicts."""
        return shard_name(self.original)

    def saved(self, shard: torch.Tensor) -> torch.Tensor:
        """A shard [S] in torch_xla's shape."""
        shard = shard.reshape(-1)
        if shard.numel() < self.numel:
            shard = torch.cat([shard, shard.new_zeros(self.numel - shard.numel())])
        return shard if self.rows is None else shard.view(-1, *self.rows)

    def loaded(self, saved: torch.Tensor) -> torch.Tensor:
        """The reverse; a shard of another world size stays as it is, for nn.Module to refuse."""
        now = self.flat.param
        if saved.numel() == self.numel and saved.numel() >= now.numel():
            return saved.reshape(-1)[: now.numel()].view(now.shape)
        return saved


class ShardHolder(FullyShardedDataParallel):
    """What a wrapper has to tell of its shards. Abstract: the class with torch_xla's arguments."""

    _shards: list[Shard]
    _shard_size_multiple: int
    _row_shards: bool


def shards_of(wrapper: ShardHolder) -> list[Shard]:
    """The wrapper's own shards; flattened, those of trainable parameters come first."""
    flats = wrapper._state.flats
    if wrapper.flatten_parameters:
        flats = sorted(flats, key=lambda f: not f.param.requires_grad)
    found = []
    for index, flat in enumerate(flats):
        multiple, rows = wrapper._shard_size_multiple, None
        size = torch.Size([flat.layout.numel]) if wrapper.flatten_parameters else flat.originals[0].shape
        if wrapper._row_shards and size:
            rows = size[1:]
            multiple = max(1, rows.numel())
        numel = ShardLayout(flat.layout.numels, flat.layout.world_size, multiple).shard_numel
        if wrapper.flatten_parameters:
            listed, original = OUTER + flat.holder.name, flat_original(index)
        else:
            listed, original = INNER + flat.names[0], own_original(flat.names[0])
        found.append(Shard(flat, listed, original, size, rows, numel))
    return found


def wrappers_in(wrapper: ShardHolder, every_name: bool = False) -> Iterator[tuple[str, ShardHolder]]:
    """Path and object of this wrapper and those below."""
    for path, m in wrapper.named_modules(remove_duplicate=not every_name):
        if isinstance(m, ShardHolder):
            yield path, m


def named_shards(wrapper: ShardHolder, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """torch_xla's ``named_parameters``."""
    for path, m in wrappers_in(wrapper) if recurse else [("", wrapper)]:
        for shard in m._shards:
            yield (f"{path}.{shard.name}" if path else shard.name), shard.flat.param


def original_names(wrapper: ShardHolder) -> list[tuple[str, nn.Parameter]]:
    """Shards with the paths of their parameters."""
    return [
        (clean(f"{path}.{shard.original}"), shard.flat.param)
        for path, m in wrappers_in(wrapper)
        for shard in m._shards
    ]


# ------------------------------------------------------------ saving
def metadata(wrapper: ShardHolder) -> dict[str, Any]:
    """torch_xla's format. Weights with several names are in ``shared_info`` (name: first name), if there are any."""
    shard_info: dict[str, Any] = {}
    flatten_info: dict[str, Any] = {}
    buffer_info: dict[str, Any] = {}
    shared: dict[str, str] = {}
    for path, m in wrappers_in(wrapper, every_name=True):
        path = in_state_dict(path)
        shard_info[path] = {s.name: {"_orig_size": s.size, "_orig_name": s.original} for s in m._shards}
        before = f"{path}." if path else ""
        if m.flatten_parameters:
            for s in m._shards:
                names = [f"_fpw_module.{n}" for n in s.flat.names]
                shapes = [original.shape for original in s.flat.originals]
                flatten_info[before + s.original] = (names, shapes, list(s.flat.layout.numels))
        for source, name in m._state.shared_paths:
            shared[clean(before + name)] = clean(before + source)
        dtypes = {id(module._buffers.get(n)): dtype for (module, n), dtype in m._state.buffer_dtypes.items()}
        for name, buffer in m.named_buffers():
            if id(buffer) in dtypes:
                buffer_info[in_state_dict(before + name)] = {"_orig_dtype": dtypes[id(buffer)]}
    found = {
        "shard_info": shard_info,
        "flatten_info": flatten_info,
        "buffer_info": buffer_info,
        "world_size": wrapper.world_size,
        "rank": wrapper.rank,
    }
    return {**found, "shared_info": shared} if shared else found


def rename_saved(wrapper: ShardHolder, entries: Any, prefix: str) -> None:
    """Turns what nn.Module collected into torch_xla's state dict, in place."""
    items = dict(entries)
    entries.clear()
    for shard in wrapper._shards:
        value = items.pop(prefix + shard.listed, None)
        if value is not None:
            entries[prefix + shard.name] = shard.saved(value)
    for key, value in items.items():
        entries[prefix + in_state_dict(key[len(prefix) :])] = value


# ------------------------------------------------------------ loading
def rename_loaded(wrapper: ShardHolder, entries: Any, prefix: str) -> bool:
    """Turns torch_xla's names into those that nn.Module looks for, in place; whether these are shards at all."""
    own = {shard.name: shard for shard in wrapper._shards}
    is_local = any(PREFIX in key for key in entries if key.startswith(prefix))
    for key in [k for k in entries if k.startswith(prefix)]:
        rest = key[len(prefix) :]
        if rest in own:
            shard = own[rest]
            entries[prefix + shard.listed] = shard.loaded(entries.pop(key))
        elif rest.startswith(OUTER) and not rest.startswith((INNER, f"{OUTER}flat_param_")):
            entries[prefix + INNER + rest[len(OUTER) :]] = entries.pop(key)
    return is_local
