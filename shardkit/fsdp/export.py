"""Weights that leave a sharded model for an inference engine or a file: whole, or what has changed since the last time.

Each rank compares its shard, as it would be sent, with the one that was sent before, and sends what differs, see
``reduction/compression.py``. A checksum of the whole tensor, which ranks make of shards, tells a receiver that it has
what the trainer has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..checks import objects_of
from ..errors import ConfigurationError
from ..reduction.compression import Run, difference, mixed_sum
from ..torch_seams.tensors import INTEGERS, memory_of
from ..types import T, Tree
from .flat_param import FlatParam
from .originals import refuse_meta, refuse_split
from .own_forms import Packed
from .state import ShardingState, summoned
from .state_dict import buffers_of, name_at, place_of, written_parameters

Names = Callable[[str], str | None] | Literal["hf"] | None


@dataclass(frozen=True)
class Change:
    """Holds what is new in one tensor. It can be pickled.

    Attributes:
        runs: in any order.
        checksum: of the whole tensor afterwards, see :func:`checksum`.
    """

    shape: torch.Size
    dtype: torch.dtype
    runs: tuple[Run, ...]
    checksum: int

    @property
    def nbytes(self) -> int:
        """Counts the bytes of values and positions."""
        return sum(r.values.nbytes + (0 if r.gaps is None else r.gaps.nbytes) for r in self.runs)

    def elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns places in the flattened tensor [n], and the values there [n]: a patch, as inference engines take it.

        Each place comes once, a few with the value that they had. They are of int32, in larger tensors of int64.
        """
        runs = self.runs or (Run(0, None, torch.empty(0, dtype=self.dtype)),)
        kind = torch.int32 if self.shape.numel() <= 2**31 else torch.int64
        places = torch.cat([run.places(run.values.device) for run in runs])
        return places.to(kind), torch.cat([run.values for run in runs])

    @torch.no_grad()
    def apply(self, tensor: torch.Tensor, *, check: bool = True) -> None:
        """Writes the new values into what the receiver had, in place.

        Args:
            tensor: of this shape and dtype, contiguous.
            check: compares checksums, which reads the whole tensor once.

        Raises:
            ConfigurationError: it has another shape or dtype, or had other values before.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype or not tensor.is_contiguous():
            raise ConfigurationError(
                f"the change is of a contiguous tensor of {tuple(self.shape)} and {self.dtype}, and was applied to one "
                f"of {tuple(tensor.shape)} and {tensor.dtype}"
            )
        flat = tensor.detach().view(-1)
        for run in self.runs:
            run.write(flat)
        if check and checksum(flat) != self.checksum:
            raise ConfigurationError(
                "the receiver does not have what was sent before: its values differ from the trainer's. Send all of "
                "them: export(since=SentWeights())"
            )


class SentWeights:
    """Remembers what an ``export`` has sent, in the memory of a shard of the exported dtype on each rank.

    One for each receiver, or group of receivers that get the same. It is no part of a checkpoint: a training that was
    restored begins with a new one.
    """

    def __init__(self) -> None:
        self._shards: dict[tuple[int, int], torch.Tensor] = {}  # [S], by number of unit and flat parameter
        # of packed weights: empty ones, by how they went
        self.unchanged: dict[tuple[object, ...], list[Change]] = {}

    def replace(self, key: tuple[int, int], shard: torch.Tensor) -> torch.Tensor | None:
        """Notes what is sent now; returns what was sent before, None if it is no part of the same."""
        before = self._shards.get(key)
        self._shards[key] = shard
        fits = before is not None and (before.shape, before.dtype) == (shard.shape, shard.dtype)
        return before if fits else None


def checksum(values: torch.Tensor, first: int = 0) -> int:
    """Returns a sum over all elements, mod 2**64, that depends on the bits of each and on its place.

    Sums of a tensor's parts, each with the place of its first element, add up to that of the tensor.
    """
    return int(mixed_sum(values.reshape(-1), first)) % 2**64


def export(
    root: ShardingState,
    names: Names,
    dtype: torch.dtype | None,
    on: int | None,
    since: SentWeights | None,
) -> Iterator[tuple[str, torch.Tensor | Change]]:
    """See :meth:`~.sharded_api.ShardedAPI.export`."""
    _check(root, dtype, on, since)
    return _exported(root, _Renaming(root.door, names), dtype, on, since)


def _exported(
    root: ShardingState,
    rename: _Renaming,
    dtype: torch.dtype | None,
    on: int | None,
    since: SentWeights | None,
) -> Iterator[tuple[str, torch.Tensor | Change]]:
    modules = list(root.door.named_modules(remove_duplicate=False))
    paths: dict[int, list[str]] = {}  # several, of a module that is shared
    for path, m in modules:
        paths.setdefault(id(m), []).append(path)
    for number, unit in enumerate(dict.fromkeys(state.unit for state in root.states())):
        found: dict[str, torch.Tensor | Change] = {}
        state = next(s for s in root.states() if s.unit is unit)
        if since is None:
            with summoned(state, recurse=False, writeback=False):
                for flat in unit.flats if _is_here(root, on) else ():
                    values = [_cast(original.param.detach(), dtype) for original in flat.originals]
                    found.update(_named(flat, values, paths))
            root.group.backend.mark_step()  # one rank alone may read them
        else:
            for k, flat in enumerate(unit.flats):
                find = _changed if flat.originals[0].store is None else partial(_whole_again, state)
                changes = find(flat, (number, k), dtype, on, since)
                found.update(_named(flat, changes if _is_here(root, on) else [], paths))
        yield from rename(found)
    if _is_here(root, on):
        whole = {n: p for n, p in written_parameters(root.door) if place_of(p)[0] is None}
        rest = {n: _cast(p.detach(), dtype) for n, p in whole.items()}
        yield from rename({**rest, **dict(buffers_of(modules))})


def _check(root: ShardingState, dtype: torch.dtype | None, on: int | None, since: SentWeights | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"weights can't be exported in {dtype}; name a floating dtype")
    if on is not None and not 0 <= on < root.group.world_size:
        raise ConfigurationError(f"on={on}: the model is sharded over ranks 0 to {root.group.world_size - 1}")
    for flat in root.all_flats():
        refuse_split(flat.originals, "export()", "Take state_dict(), whose DTensors have full_tensor()")
        refuse_meta(flat)
        if since is not None and (
            flat.is_summoned
            or flat.param.element_size() not in INTEGERS
            or flat.originals[0].store not in (None, Packed)
        ):
            raise ConfigurationError(
                f"{flat.names[0]!r} has a form of its own on the wire or 16 bytes an element, or this is inside of "
                "summon_full_params(): its changes can't be told; leave out since="
            )


def _is_here(state: ShardingState, on: int | None) -> bool:
    """Whether this rank gets the values; of replicas, one of them does."""
    return on is None or (state.group.rank == on and (state.replicas is None or state.replicas.rank == 0))


def _cast(values: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return values.to(dtype) if dtype is not None and values.is_floating_point() else values


def _named(
    flat: FlatParam, values: Sequence[T], paths: Mapping[int, Sequence[str]]
) -> Iterator[tuple[str, T]]:
    """Yields each original parameter's value under all names that it has in the model; it may be tied."""
    for original, value in zip(flat.originals, values, strict=False):
        for module, name in original.places:
            for path in paths.get(id(module), ()):
                yield name_at(path, name), value


class _Renaming:
    """Gives what is exported the names that a receiver knows; of what it has no name for, nothing is sent."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        self._names = names
        self._model: Tree = getattr(model, "_fsdp_wrapped_module", model)
        self._tied = set(getattr(self._model, "all_tied_weights_keys", None) or ())
        if names == "hf" and not hasattr(self._model, "save_pretrained"):
            raise ConfigurationError(
                f"names='hf' is for models of transformers, and this is a {type(self._model).__name__}; pass a "
                "function from the model's names to the receiver's"
            )
        if names == "hf" and hasattr(self._model, "peft_config"):
            raise ConfigurationError(
                "names='hf' of a model with adapters: an inference engine would get weights without them. Merge them "
                "(merge_adapter() inside of summon_full_params()), and pass a function that gives names, and None for "
                "those of the adapters"
            )

    def __call__(
        self, found: Mapping[str, torch.Tensor | Change]
    ) -> Iterator[tuple[str, torch.Tensor | Change]]:
        if callable(self._names):
            for name, value in found.items():
                renamed = self._names(name)
                if renamed is not None:
                    yield renamed, value
        elif self._names == "hf":
            yield from self._as_saved({n: v for n, v in found.items() if n not in self._tied}).items()
        else:
            yield from found.items()

    def _as_saved(self, found: Mapping[str, torch.Tensor | Change]) -> Mapping[str, torch.Tensor | Change]:
        """Returns it under the names, and in the shapes, that ``save_pretrained`` writes."""
        convert = getattr(sys.modules.get("transformers.modeling_utils"), "revert_weight_conversion", None)
        if convert is None or not found:
            return found
        if all(isinstance(v, torch.Tensor) for v in found.values()):
            converted: Mapping[str, torch.Tensor] = convert(self._model, dict(found))
            return converted
        standing = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in found.items()}
        renamed = convert(self._model, dict(standing))
        origin = {id(tensor): name for name, tensor in standing.items()}
        if {id(tensor) for tensor in renamed.values()} != set(origin):
            raise ConfigurationError(
                f"files of a {type(self._model).__name__} hold other tensors than the model, and what has changed in "
                "them can't be told; leave out names='hf', or since="
            )
        return {name: found[origin[id(tensor)]] for name, tensor in renamed.items()}


# ------------------------------------------------------------ what has changed
class _Part(NamedTuple):
    """One rank's share of a change: memory of a run, if anything is new, which needs no numpy to be pickled."""

    item: int
    checksum: int
    start: int = 0
    gaps: bytearray | None = None
    values: bytearray | None = None


@torch.no_grad()
def _changed(
    flat: FlatParam, key: tuple[int, int], dtype: torch.dtype | None, on: int | None, since: SentWeights
) -> list[Change]:
    """Finds what is new in each original parameter of a flat one (collective); nothing on ranks that don't get it."""
    group, layout = flat.group, flat.layout
    shard = _cast(flat.param.detach().view(-1), dtype)
    if not group.backend.has_storage:
        shard = shard.cpu()  # what follows depends on values, which may be read on all ranks together alone
    elif shard.data_ptr() == flat.param.data_ptr():
        shard = shard.clone()
    before = since.replace(key, shard)
    sent: list[_Part] = []
    for piece in layout.pieces(apart=True):
        if piece.rank == group.rank and not (layout.is_copied(piece.item) and group.rank):
            span = slice(piece.offset, piece.offset + piece.numel)
            part = _Part(piece.item, checksum(shard[span], piece.start))
            run = difference(shard[span], None if before is None else before[span], piece.start)
            if run is not None:
                gaps = None if run.gaps is None else bytearray(memory_of(run.gaps.cpu()))
                part = part._replace(
                    start=run.start, gaps=gaps, values=bytearray(memory_of(run.values.cpu()))
                )
            sent.append(part)
    label = f"what has changed in {flat.label}"
    everything = objects_of(group, sent, -1 if on is None else on, label) or []
    found: list[tuple[list[Run], int]] = [([], 0) for _ in flat.originals]
    for part in chain(*everything):
        runs, total = found[part.item]
        found[part.item] = runs, total + part.checksum
        if part.values:
            behind = None if part.gaps is None else torch.frombuffer(part.gaps, dtype=torch.uint8)
            runs.append(Run(part.start, behind, torch.frombuffer(part.values, dtype=shard.dtype)))
    return [
        Change(original.shape, shard.dtype, tuple(runs), total % 2**64)
        for original, (runs, total) in zip(flat.originals, found, strict=True)
    ]


def _whole_again(
    state: ShardingState,
    flat: FlatParam,
    key: tuple[int, int],
    dtype: torch.dtype | None,
    on: int | None,
    since: SentWeights,
) -> list[Change]:
    """Gives all of what packed weights stand for, where they were not sent before or were loaded since (collective)."""
    shard = flat.param.detach().clone()
    before, how = since.replace(key, shard), (*key, dtype, on)
    is_same = before is not None and how in since.unchanged and torch.equal(before, shard)
    if all(flat.group.all_gather_object(is_same, label=f"whether {flat.label} has changed")):
        return since.unchanged[how]
    with summoned(state, recurse=False, writeback=False):
        values = [_cast(o.param.detach(), dtype).cpu().clone() for o in flat.originals if _is_here(state, on)]
    changes = [Change(v.shape, v.dtype, (Run(0, None, v.view(-1)),), checksum(v)) for v in values]
    since.unchanged[how] = [replace(change, runs=()) for change in changes]
    return changes
