"""Original parameters whose values travel in a form of their own: weights that are packed, and classes that say so.

Legend: W world size, S shard numel; of a packed weight R rows, n elements of a row, B numbers in a block, K blocks of n
numbers.

[Note: packed weights] With ``ReshardPolicy(frozen="packed")`` a frozen weight lies in its flat parameter as rows of
bytes, [R, 16 + K * bytes of a block]: a row is blocks of codes with a scale, so that whoever cuts between rows cuts
packed weights too, and what they stand for does not depend on how many ranks there are. All that moves, cuts, saves or
restores shards sees a parameter of these bytes. What modules compute with is made of them when a unit is gathered, in
memory of its own; the bytes that were gathered are gone then. Values that are written in ``summon_full_params`` or
loaded are packed again. Of a block that nobody changed that gives the same codes and scale: its largest number is the
largest code times the scale, also where it was rounded to the parameter's dtype. Nobody may compute with bytes, as
averages of parameters do (an EMA): a row begins with the sum of its bytes, which is looked at after rows were written
to.

[Note: extensions] A class of tensors with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (float8 that is cast
before it travels, quantized weights) is cut by its own operations, as FSDP2 cuts it: what modules list is a DTensor
over this rank's part, of that class, and there is no shard in memory. Before each gather the part says what travels,
tensors of any dtypes. What arrived makes the parameter that modules compute with, of another class maybe: it is there
from the first gather on. Later ones write to the memory of the same tensors, for autograd may have views of it.
A frozen parameter of a class that says no more than which tensors it is made of travels as their rows.
What is made of tensors is saved as these, beside an entry whose name says what the whole is besides, if those of all
ranks, end to end, are those of the whole (NF4's blocks). Frozen ones are exported as they are gathered; of trained
ones, which may be gathered with less precision than they are updated with, what their DTensors hold.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TypeGuard, final

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..backend import DONE, Group
from ..checks import check_same_everywhere
from ..errors import ConfigurationError, LifecycleError
from ..layout import Piece, ShardLayout
from ..optimizers.shards import listing_of
from ..reduction.compression import SMALLEST, BlockFormat
from ..torch_seams.tensors import contiguous_strides, facts_beside, is_dtensor, named_parts, parts_with_memory
from ..types import Tree
from .flat_param import (
    GATHERING,
    RELEASED,
    SUMMONED,
    FlatParam,
    KeptViews,
    Store,
    Stored,
    taken_apart,
    unpacked,
)
from .originals import (
    GatheredParameter,
    OriginalParameter,
    Place,
    ReleasedParameter,
    note_originals,
    without_values,
    written_original,
)

# ------------------------------------------------------------ packed weights (QLoRA over shards, arXiv 2305.14314)
_HEAD = 16  # bytes before a row's blocks
_PACKED = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _levels() -> torch.Tensor:
    """Returns the 16 numbers of NF4: quantiles of the normal distribution, zero and both ends among them."""
    end = (1 - 1 / 32 + 1 - 1 / 30) / 2
    steps = (torch.linspace(end, 0.5, k, dtype=torch.float64, device="cpu") for k in (9, 8))
    above, below = (torch.special.ndtri(each)[:-1] for each in steps)
    levels = torch.cat([-below, above.new_zeros(1), above.flip(0)])
    return (levels / levels.max()).float()


class NormalFloats:
    """Blocks of 64 codes of 4 bits behind their largest magnitude (fp32); as :class:`BlockFormat` for weights."""

    numel, nbytes = 64, 36

    def encode(self, values: torch.Tensor, blocks: torch.Tensor) -> None:
        """Writes numbers [K * B] to blocks [K, 36] of bytes."""
        rows = values.view(-1, self.numel).float()
        scales = rows.abs().amax(1, True)
        levels = _levels().to(values.device)
        scaled = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)
        blocks[:, :4] = scales.view(torch.uint8)
        blocks[:, 4:] = codes[:, ::2] * 16 + codes[:, 1::2]

    def decode(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what rows of blocks [R, K, 36] stand for to values [R, n]."""
        levels = _levels().to(values.device)
        pairs = torch.cartesian_prod(levels, levels)  # of the two codes in a byte
        numbers = pairs.index_select(0, blocks[..., 4:].reshape(-1).int()).view(*blocks.shape[:2], self.numel)
        numbers.mul_(blocks[..., :4].contiguous().view(torch.float32))
        values.copy_(numbers.flatten(1)[:, : values.shape[1]])


@final
class Packed(Stored):
    """Gathers bytes; original parameters are views of what they stand for."""

    def __init__(self, flat: FlatParam) -> None:
        self._weights = [original for original in flat.originals if isinstance(original, PackedWeight)]
        self._computed = flat.chosen_dtype or self._weights[0].dtype
        self._shown = ShardLayout(tuple(w.written.numel() for w in self._weights), 1)
        super().__init__(flat)
        self._mesh, self.is_whole = None, False
        self._checked = -1  # version of the shard, when its bytes were looked at

    def _look_at(self, full: torch.Tensor) -> None:
        self._full = full.new_empty(self._shown.numel, dtype=self._computed)
        self.kept_views = KeptViews(self._full, self._originals, self._shown)
        self.memory = self.kept_views.memory
        self._unpack = self.unpack

    def unpack(self, gathered: torch.Tensor) -> None:
        """Makes values of what was gathered, [W, S]."""
        rows = taken_apart(unpacked(gathered.reshape(-1), self._layout), self._layout)
        self._check(rows)
        for weight, packed, place in zip(self._weights, rows, self._places(), strict=True):
            weight.unpack(packed, place)

    def _check(self, rows: list[torch.Tensor]) -> None:
        if self._checked != self._flat.version:
            for name, weight, packed in zip(self._flat.names, self._weights, rows, strict=True):
                weight.check(name, packed)
            self._checked = self._flat.version

    def _places(self) -> list[torch.Tensor]:
        return taken_apart(self._full, self._shown)

    def show(self, values: torch.Tensor) -> None:
        """Makes original parameters views of values, or makes them of bytes in memory of their own."""
        if values is not self._full:
            self._check(taken_apart(values, self._layout))
            super().show(values)
            return
        for weight, place in zip(self._weights, self._places(), strict=True):
            weight.assign(place)

    def show_computed(self, full: torch.Tensor) -> None:
        for weight, packed in zip(self._weights, taken_apart(full, self._layout), strict=True):
            weight.assign(
                weight.unpack(packed, packed.new_empty(weight.written.numel(), dtype=self._computed))
            )


class ListedBytes:
    """A rank's part of packed weights, as modules list it."""

    __slots__ = ()

    def requires_grad_(self, requires_grad: bool = True) -> ListedBytes:
        """Raises ConfigurationError where it is to be trained."""
        listing = listing_of(self)  # type: ignore[arg-type]
        if requires_grad and listing is not None:
            raise ConfigurationError(
                f"{listing.names[0]!r} was frozen when it was sharded with frozen='packed', and is to be trained now: "
                "it has bytes in place of numbers that an optimizer could change. Unfreeze it before the model is "
                "sharded, or leave frozen='packed' out for its unit"
            )
        return self

    requires_grad = property(lambda _: False, requires_grad_)  # type: ignore[arg-type]


class PackedWeight(OriginalParameter):
    """See [Note: packed weights].

    Attributes:
        shape: of its rows of bytes.
        dtype: of the parameter.
    """

    store, listed_as = Packed, ListedBytes

    def __init__(self, param: nn.Parameter, place: Place, home: int, packing: str) -> None:
        super().__init__(param, place, home)
        self._written, self.dtype, self._row = param.shape, param.dtype, param.shape[1:].numel()
        block = min(256, -(-self._row // 16) * 16)
        self._format = NormalFloats() if packing == "nf4" else BlockFormat(torch.int8, block)
        self._blocks = -(-self._row // self._format.numel)  # K
        self.shape = torch.Size((len(param), _HEAD + self._blocks * self._format.nbytes))

    written = property(attrgetter("_written"))

    @property
    def values(self) -> torch.Tensor:
        """Returns its rows of bytes."""
        values = self.param.data.reshape(-1, self._row)
        made = values.new_zeros(self.shape, dtype=torch.uint8)  # blocks have bytes that nobody writes
        if not values.is_meta:
            padded = pad(values, (0, self._blocks * self._format.numel - self._row))
            blocks = made.new_zeros(len(made) * self._blocks, self._format.nbytes)
            self._format.encode(padded.view(-1), blocks)
            made[:, _HEAD:] = blocks.view(len(made), -1)
            made[:, :4] = _sums_of(made)
        return made

    def check(self, name: str, packed: torch.Tensor) -> None:
        """Raises LifecycleError where rows of bytes are none that were packed."""
        rows = packed.view(self.shape)
        if not (rows.is_meta or torch.equal(rows[:, :4], _sums_of(rows))):
            raise LifecycleError(
                f"{name!r} is packed (frozen='packed'), and something has computed with its bytes as if they were "
                "numbers: an average of all parameters (an EMA) does, as AveragedModel of torch. Leave what is frozen "
                "out of it, or load other values"
            )

    @torch.no_grad()
    def unpack(self, packed: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns ``values``, in which what rows of bytes stand for is written."""
        blocks = packed.view(self.shape)[:, _HEAD:].unflatten(1, (self._blocks, -1))
        self._format.decode(blocks, values.view(-1, self._row))
        return values

    def assign(self, values: torch.Tensor) -> None:
        """Makes these its values from now on, or what these bytes stand for, in its own dtype."""
        if values.dtype is torch.uint8:
            values = self.unpack(values, values.new_empty(self._written.numel(), dtype=self.dtype))
        self.param.data = values.view(self._written)

    def replace(self, empty: torch.Tensor) -> None:
        self.param = nn.Parameter(empty.new_empty(self._written, dtype=self.dtype), requires_grad=False)


def _sums_of(rows: torch.Tensor) -> torch.Tensor:
    """Sums the bytes of rows behind their heads, as bytes [R, 4]."""
    return rows[:, _HEAD:].sum(1, keepdim=True, dtype=torch.int32).view(torch.uint8)


def is_packable(param: nn.Parameter) -> bool:
    """Says whether a parameter is packed: a frozen matrix of real numbers, and not small."""
    is_frozen_matrix = not param.requires_grad and type(param) is nn.Parameter and param.dim() > 1
    return is_frozen_matrix and param.dtype in _PACKED and param.numel() >= SMALLEST


# ------------------------------------------------------------ torch's extensions of the all-gather
Spans = dict[str, tuple[torch.Size, int | None]]
_keeping_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


@final
class Extended(Store):
    """Original parameters are made by their own classes; see [Note: extensions]."""

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self._extended = [o for o in flat.originals if isinstance(o, ExtendedParameter)]
        for original in self._extended:
            original.memory = []
        self._outputs: list[torch.Tensor] = []  # for each input, [W * n]
        self._places: list[torch.Tensor] = []  # the same, [W, bytes]

    serves_on = True  # what was made lies in this memory

    @property
    def gathered(self) -> torch.Tensor:
        return self._flat.param.data

    def attach(self) -> None:
        self._versions = []  # others, where they were summoned
        self._give_back()

    def show(self, values: torch.Tensor) -> None:
        """Does nothing: they have memory of their own."""

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        self.state = GATHERING
        if self._flat.host is not None:
            self._from_host(torch.empty_like(self._flat.host, device=self._device))
            return
        with torch.no_grad():
            inputs = [t for original in self._extended for t in original.inputs()]
        if not self._outputs:
            self._make_room(inputs)
        sent = torch.cat([t.to(self._device).contiguous().view(-1).view(torch.uint8) for t in inputs])
        if self._group.world_size == 1:
            self.in_flight = DONE, sent
            return
        full = sent.new_empty(self._group.world_size * sent.numel())
        self.in_flight = self._gather(full, sent, async_op=True, label=self._flat.label), full

    def _make_room(self, inputs: Sequence[torch.Tensor]) -> None:
        """Takes memory before the first gather (collective): inputs differ where a class does not pad its last rows."""
        facts = [(f"input {k}", (t.dtype, tuple(t.shape))) for k, t in enumerate(inputs)]
        check_same_everywhere(self._group, facts, f"fsdp_pre_all_gather ({', '.join(self._flat.names)})")
        world_size = self._group.world_size
        self._outputs = [t.new_empty(world_size * t.numel(), device=self._device) for t in inputs]
        self._places = [output.view(torch.uint8).view(world_size, -1) for output in self._outputs]

    @torch.no_grad()
    def _show_gathered(self, values: torch.Tensor) -> None:
        if self._flat.keeps_on_host:
            self._to_host(values)
        for original in self._extended:
            for tensor in original.memory:
                self._backend.take_storage(tensor)
        outputs = iter(self._outputs)
        with _keeping_versions(tuple(self._outputs)):
            sizes = [place.shape[1] for place in self._places]
            torch.split_with_sizes_copy(values.view(len(self._places[0]), -1), sizes, dim=1, out=self._places)
            for original in self._extended:
                original.make(outputs, self._dtype)
        note_originals(self._flat)
        self._reveal()

    def _give_back(self, until_backward: bool = False) -> None:
        self._conceal(True)
        for original in self._extended:
            for tensor in original.memory:
                self._backend.release_storage(tensor)
        self.state = RELEASED

    def summon(self) -> torch.Tensor:
        """Shows them as they are computed with."""
        self.start()
        self.finish()
        self.state = SUMMONED
        return self.gathered

    def keep(self, values: torch.Tensor) -> None:
        flat = self._flat
        pairs = zip(self._extended, self._versions, strict=True)
        flat.written = [k for k, (o, v) in enumerate(pairs) if o.param._version != v + 1]
        if flat.written:
            self.attach()
            raise written_original(flat)


class ExtendedParameter(OriginalParameter):
    """See [Note: extensions].

    Attributes:
        memory: of what was made of them, and is given back.
        spans: for each of its tensors, as it was cut: shape, and where this rank's begins (None: every rank has all).
        facts: what the whole is beside these tensors; None where that can't be told.
    """

    spans: Spans | None = None
    beside = "has a class with fsdp_pre_all_gather"
    store = Extended
    is_apart = True

    def __init__(self, param: nn.Parameter, place: Place, home: int = 0) -> None:
        super().__init__(param, place, home)
        self.part: Tree = param.detach()
        self.facts = facts_beside(param)
        self.memory: list[torch.Tensor] = []

    @property
    def values(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.param.dtype)

    def assign(self, values: torch.Tensor) -> None:
        """Does nothing: it has memory of its own."""

    def replace(self, empty: torch.Tensor) -> None:
        """Gives it a shape until the next gather."""
        self.kind, self.released = GatheredParameter, ReleasedParameter
        self.param = nn.Parameter(
            empty.new_empty(()).expand(self.shape), requires_grad=self.param.requires_grad
        )

    @torch.no_grad()
    def cut(self, group: Group, senders: Sequence[Group], device: torch.device, *asked: object) -> None:
        """Keeps this rank's rows, after the values of the first rank of each of the senders have replaced its own.

        Args:
            asked: what ``fsdp_pre_all_gather`` is told: the mesh, and the dtypes in torch's words.
        """
        self._asked, whole = asked, self.part if self.part.is_meta else self.part.to(device)
        for tensor in [] if whole.is_meta else list(parts_with_memory(whole)):
            for sender in senders:
                sender.channel("gradients").broadcast(tensor, 0, label="parameters of rank 0")
        self.part = self._rows_of(whole, group)
        self.replace(torch.empty(0, dtype=whole.dtype, device=whole.device))

    def _rows_of(self, whole: Tree, group: Group) -> Tree:
        chunks, rank = torch.chunk(whole, group.world_size), group.rank
        rows = chunks[rank].size(0) if rank < len(chunks) else 0
        part = whole.new_zeros(chunks[0].size()).narrow(0, 0, rows)
        of_zeros = facts_beside(part)
        if rows:
            part.copy_(chunks[rank])
        self.spans = _spans_of(whole, chunks, part, group, facts_beside(part) == of_zeros)
        return part

    def saved(self, name: str) -> Iterator[tuple[str, torch.Size, torch.Tensor, Piece | None]]:
        """Yields of each tensor: name, shape, memory [n] on this rank, where that lies; None: every rank has all."""
        spans, parts = (self.spans or {}).values(), named_parts(name, self.part, self.spans or ())
        for (shape, start), (full, t) in zip(spans, parts.items(), strict=True):
            yield full, shape, t.view(-1), None if start is None else Piece(0, start, 0, 0, t.numel())

    def inputs(self) -> Sequence[torch.Tensor]:
        """Returns the tensors of this rank's part that travel."""
        before = self.part.fsdp_pre_all_gather
        mesh, policy = self._asked
        count = len(inspect.signature(before).parameters)  # one in torch's first form
        asked = mesh, self.shape, contiguous_strides(self.shape), self.places[0].module, policy
        sent, self._metadata = before(*asked[:count])
        self._shapes = [t.shape for t in sent]
        return tuple(sent)

    def make(self, arrived: Iterator[torch.Tensor], dtype: torch.dtype) -> None:
        """Makes the parameter of what has arrived; the first time it becomes another object."""
        flat = [next(arrived) for _ in self._shapes]
        outputs = tuple(t.view(-1, *shape[1:]) for t, shape in zip(flat, self._shapes, strict=True))
        if self.memory:
            self.param.__class__ = self.kind
            self._made(outputs, dtype, out=self.param)
            return
        made, inner = self._made(outputs, dtype)
        before, self.param = self.param, nn.Parameter(made, requires_grad=self.param.requires_grad)
        self.param._post_accumulate_grad_hooks = before._post_accumulate_grad_hooks
        self.kind = GatheredParameter if type(self.param) is nn.Parameter else type(self.param)
        self.released = without_values(ReleasedParameter, self.param)
        for module, name in self.places:
            module.__dict__[name] = self.param
        self.memory = [*{t.untyped_storage()._cdata: t for t in (*flat, *inner)}.values()]

    def _made(self, outputs: tuple[torch.Tensor, ...], dtype: torch.dtype, **into: torch.Tensor) -> Tree:
        """Returns the parameter's values, and the memory that they take besides; ``into`` another one nothing."""
        made = self.part.fsdp_post_all_gather(outputs, self._metadata, dtype, **into)
        if into:
            return made
        return torch.as_strided(made[0], self.shape, contiguous_strides(self.shape), 0), made[1]


@final
class FrozenParts(ExtendedParameter):
    """A frozen parameter made of tensors of as many rows (torchao's int8), which travel, and of scales for all rows."""

    beside = "is made of several tensors"

    def _rows_of(self, whole: Tree, group: Group) -> Tree:
        names, self._facts = whole.__tensor_flatten__()
        self._size = -(-self.shape[0] // group.world_size)
        self._cut = [name for name in names if getattr(whole, name).shape[:1] == self.shape[:1]]
        self._kept = {n: getattr(whole, n).clone() for n in names if n not in self._cut}
        first = min(group.rank * self._size, self.shape[0])
        shapes = {n: getattr(whole, n).shape for n in names}
        self.spans = {n: (s, None if n in self._kept else first * s[1:].numel()) for n, s in shapes.items()}
        rows = slice(first, first + self._size)
        return self._of(*(getattr(whole, name)[rows].contiguous().clone() for name in self._cut))

    def _of(self, *parts: torch.Tensor) -> Tree:
        shape = torch.Size((len(parts[0]), *self.shape[1:]))
        parts_of = dict(zip(self._cut, parts, strict=True)) | self._kept
        return type(self.part).__tensor_unflatten__(parts_of, self._facts, shape, contiguous_strides(shape))

    def inputs(self) -> Sequence[torch.Tensor]:
        """Returns them with rows of zeros, where ranks don't divide rows."""
        sent = [getattr(self.part, name) for name in self._cut]
        sent = [torch.cat([t, t.new_zeros(self._size - len(t), *t.shape[1:])]) for t in sent]
        self._shapes = [t.shape for t in sent]
        return sent

    def _made(self, outputs: tuple[torch.Tensor, ...], dtype: torch.dtype, **into: torch.Tensor) -> Tree:
        return self._of(*(output[: self.shape[0]] for output in outputs)), ()


def _spans_of(whole: Tree, chunks: Sequence[Tree], own: Tree, group: Group, are_parts: bool) -> Spans | None:
    """Returns how tensors that these are made of are cut; None where a rank's are no parts of them (collective)."""
    kinds = {type(t) for t in named_parts("", whole).values()}
    if whole.is_meta or not kinds <= {torch.Tensor, nn.Parameter} or len(chunks) < group.world_size:
        return None
    found = Spans()
    chunks = [*chunks[: group.rank], own, *chunks[group.rank + 1 :]]
    for name in whole.__tensor_flatten__()[0]:
        full, *parts = (getattr(each, name) for each in (whole, *chunks))
        is_cut = any(each.shape != full.shape for each in parts)
        fits = all(each.shape[1:] == full.shape[1:] for each in parts)
        there = torch.cat(parts) if fits and is_cut else parts[group.rank]
        bits = [t.reshape(-1).view(torch.uint8) for t in (there, full)]
        are_parts = are_parts and fits and torch.equal(*bits)
        found[name] = full.shape, sum(each.numel() for each in parts[: group.rank]) if is_cut else None
    said = group.channel("control").all_gather_object(are_parts, label="which parameters are made of parts")
    return found if all(said) else None


def is_in_parts(original: OriginalParameter) -> TypeGuard[ExtendedParameter]:
    """Says whether it is saved as the tensors that it is made of."""
    return isinstance(original, ExtendedParameter) and None not in (original.spans, original.facts)


def extension_of(param: Tree) -> type[ExtendedParameter] | None:
    """Returns the kind of a parameter whose class says what is gathered of it, or shows it; None of others."""
    if hasattr(param, "fsdp_pre_all_gather") and hasattr(param, "fsdp_post_all_gather"):
        return ExtendedParameter
    if param.requires_grad or is_dtensor(param) or not is_traceable_wrapper_subclass(param):
        return None
    parts = [getattr(param, name) for name in param.__tensor_flatten__()[0]]
    of_all = [part for part in parts if part.shape[:1] != param.shape[:1]]  # rows
    are_known = {type(part) for part in parts} == {torch.Tensor} and all(part.numel() == 1 for part in of_all)
    return FrozenParts if are_known and len(of_all) < len(parts) else None
