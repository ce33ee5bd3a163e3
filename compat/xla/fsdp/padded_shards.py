"""A wrapper whose state dict is this rank's shards: how they are cut, named, ordered, padded and shaped.

Legend: S numel of a shard here, R numel of the saved one (they differ where there is one rank only).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from shardkit.checkpoint.tools.rank_files import FLAT, PREFIX, in_state_dict, shard_name
from shardkit.fsdp.registered import Registered
from shardkit.fsdp.state import INNER, OUTER, clean
from shardkit.fsdp.state_dict import loading_own
from shardkit.fsdp.submodule_api import begin_loading_shards, collecting, end_loading_shards
from shardkit.fsdp.wrapper import Door
from shardkit.layout import ShardLayout
from shardkit.torch_seams.module_versions import versions_of

from .state_dict_utils import BufferInfo, ShardInfo, ShardMetadata

Entries = MutableMapping[str, torch.Tensor]


class PaddedCut(NamedTuple):
    """Cuts parameters into whole rows, or into parts that are padded to a multiple of so many elements."""

    multiple: int
    by_rows: bool

    def unit_of(self, size: torch.Size) -> int:
        return max(1, size[1:].numel()) if self.by_rows and size else self.multiple

    def layout(self, shapes: Sequence[torch.Size], world_size: int) -> ShardLayout:
        """Serves as ``Options.layout``. One rank's shard is not cut; state dicts add the padding."""
        numels = tuple(shape.numel() for shape in shapes)
        return ShardLayout(numels, world_size, 1 if world_size == 1 else self.unit_of(shapes[0]))


@dataclass
class Shard:
    """One of a wrapper's flat parameters.

    Attributes:
        listed: where nn.Module finds its shard, as a path within the wrapper.
        original: the same as state dicts have it.
        rows: shape of a row where shards are rows, else None.
        numel: R.
    """

    flat: Registered
    listed: str
    original: str
    size: torch.Size
    rows: torch.Size | None
    numel: int

    @property
    def name(self) -> str:
        return shard_name(self.original)

    def saved(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a shard [S] in the shape that is saved."""
        shard = shard.reshape(-1)
        if shard.numel() < self.numel:
            shard = torch.cat([shard, shard.new_zeros(self.numel - shard.numel())])
        return shard if self.rows is None else shard.view(-1, *self.rows)

    def loaded(self, saved: torch.Tensor) -> torch.Tensor:
        """Does the reverse; a shard of another world size stays as it is, for nn.Module to refuse."""
        now = self.flat.param
        if saved.numel() == self.numel and saved.numel() >= now.numel():
            return saved.reshape(-1)[: now.numel()].view(now.shape)
        return saved


class ShardHolder(Door):
    """Base of such a wrapper. Abstract: a door has its own arguments and names for it."""

    _shards: list[Shard]
    _listed_again: dict[str, str]  # other paths of a weight, and its first

    def _hold_shards(self, cut: PaddedCut) -> None:
        """Takes note of the wrapper's own shards, once they are cut; those of trainable parameters come first."""
        flatten = self._state.options.flatten
        flats = sorted(self._state.listings, key=lambda f: flatten and not f.param.requires_grad)
        self._shards = []
        for index, flat in enumerate(flats):
            if flatten:
                size = torch.Size([flat.layout.numel])
                listed, original = OUTER + flat.places[0].name, f"{FLAT}{index}"
            else:
                size = flat.originals[0].shape
                listed = original = INNER + flat.names[0]
            rows = size[1:] if cut.by_rows and size else None
            whole = ShardLayout(flat.layout.numels, flat.layout.world_size, cut.unit_of(size))
            self._shards.append(Shard(flat, listed, original, size, rows, whole.shard_numel))
        # nn.Module lists a shard in all places of a weight, and state dicts have it once
        shared = {} if flatten else {INNER + name: INNER + first for first, name in self._state.shared_paths}
        self._listed_again = shared
        self.register_load_state_dict_post_hook(end_loading_shards)

    def _holders(self, every_name: bool = False) -> Iterator[tuple[str, ShardHolder]]:
        """Path and object of this wrapper and those below."""
        for path, m in self.named_modules(remove_duplicate=not every_name):
            if isinstance(m, ShardHolder):
                yield path, m

    def _named_shards(self, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
        for path, m in self._holders() if recurse else [("", self)]:
            for shard in m._shards:
                yield (f"{path}.{shard.name}" if path else shard.name), shard.flat.param

    def _original_names(self) -> list[tuple[str, nn.Parameter]]:
        """Shards with the paths that their parameters have in the wrapped module."""
        return [
            (clean(f"{path}.{shard.original}" if path else shard.original), shard.flat.param)
            for path, m in self._holders()
            for shard in m._shards
        ]

    def _shard_metadata(self) -> ShardMetadata:
        """Returns what consolidation needs. Weights with several names are in ``shared_info``, if there are any."""
        group = self._state.group
        found: ShardMetadata = {
            "shard_info": {}, "flatten_info": {}, "buffer_info": {},
            "world_size": group.world_size, "rank": group.rank,
        }  # fmt: skip
        shared: dict[str, str] = {}
        for path, m in self._holders(every_name=True):
            path = in_state_dict(path)
            infos: dict[str, ShardInfo] = {}
            found["shard_info"][path] = infos
            before = f"{path}." if path else ""
            for s in m._shards:
                infos[s.name] = {"_orig_size": s.size, "_orig_name": s.original}
                if m._state.options.flatten:
                    names = [f"_fpw_module.{n}" for n in s.flat.names]
                    shapes = [original.shape for original in s.flat.originals]
                    found["flatten_info"][before + s.original] = names, shapes, list(s.flat.layout.numels)
            for source, name in m._state.shared_paths:
                shared[clean(before + name)] = clean(before + source)
            dtypes = {id(at._buffers.get(n)): dtype for (at, n), dtype in m._state.buffer_dtypes.items()}
            for name, buffer in m.named_buffers():
                if id(buffer) in dtypes:
                    info: BufferInfo = {"_orig_dtype": dtypes[id(buffer)]}
                    found["buffer_info"][in_state_dict(before + name)] = info
        if shared:
            found["shared_info"] = shared
        found["run_id"], found["backwards"] = self._state.run_id, self._state.unit.backwards
        return found

    # ------------------------------------------------------------ saving and loading
    def _shard_state_dict(
        self, destination: Entries | None = None, prefix: str = "", keep_vars: bool = False
    ) -> Entries:
        """Returns this rank's shards, and all buffers; arguments as of ``nn.Module.state_dict``."""
        if destination is None:
            destination = _entries()
        found = _entries()
        with collecting():
            nn.Module.state_dict(self, destination=found, prefix=prefix, keep_vars=keep_vars)
        for shard in self._shards:
            value = found.pop(prefix + shard.listed, None)
            if value is not None:
                destination[prefix + shard.name] = shard.saved(value)
        for key, value in found.items():
            if key[len(prefix) :] not in self._listed_again:
                destination[prefix + in_state_dict(key[len(prefix) :])] = value
        versions = versions_of(destination)
        if versions is not None:
            versions.update(versions_of(found) or {})
        return destination

    def _load_from_state_dict(
        self, state_dict: Entries, prefix: str, *args: object, **kwargs: object
    ) -> None:
        is_local = self._take_saved_names(state_dict, prefix)
        with loading_own(self._state, is_local):
            if is_local:
                begin_loading_shards(self)
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _take_saved_names(self, entries: Entries, prefix: str) -> bool:
        """Turns saved names into those that nn.Module looks for, in place; whether these are shards at all."""
        own = {shard.name: shard for shard in self._shards}
        is_local = any(PREFIX in key for key in entries if key.startswith(prefix))
        for key in [k for k in entries if k.startswith(prefix)]:
            rest = key[len(prefix) :]
            if rest in own:
                shard = own[rest]
                entries[prefix + shard.listed] = shard.loaded(entries.pop(key))
            elif rest.startswith(OUTER) and not rest.startswith((INNER, FLAT)):
                entries[prefix + INNER + rest[len(OUTER) :]] = entries.pop(key)
        for again, first in self._listed_again.items():
            if is_local and prefix + first in entries:
                entries[prefix + again] = entries[prefix + first]
        return is_local


def _entries() -> OrderedDict[str, torch.Tensor]:
    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    found._metadata = OrderedDict()  # type: ignore[attr-defined]
    return found
