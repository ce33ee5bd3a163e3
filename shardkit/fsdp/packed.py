"""Frozen weights that stay packed in shards and on the wire (QLoRA over sharded weights, arXiv 2305.14314).

Legend: R rows of a weight, n elements of a row, B numbers in a block, K blocks of n numbers.

[Note: packed weights] With ``ReshardPolicy(frozen="packed")`` a frozen weight lies in its flat parameter as rows of
bytes, [R, 16 + K * bytes of a block]: a row is blocks of codes with a scale, so that whoever cuts between rows cuts
packed weights too, and what they stand for does not depend on how many ranks there are. All that moves, cuts, saves or
restores shards sees a parameter of these bytes. What modules compute with is made of them when a unit is gathered, in
memory of its own; the bytes that were gathered are gone then. Values that are written in ``summon_full_params`` or
loaded are packed again. Of a block that nobody changed that gives the same codes and scale: its largest number is the
largest code times the scale, also where it was rounded to the parameter's dtype. Nobody may compute with bytes, as
averages of parameters do (an EMA): a row begins with the sum of its bytes, which is looked at after rows were written
to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.nn.functional import pad

from ..errors import ConfigurationError, LifecycleError
from ..layout import ShardLayout
from ..optimizers.shards import listing_of
from ..reduction.compression import SMALLEST, BlockFormat
from .originals import OriginalParameter, Place
from .store import KeptViews, Stored, taken_apart, unpacked

if TYPE_CHECKING:
    from .flat_param import FlatParam

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

    def blocks_of(self, numel: int) -> int:
        return -(-numel // self.numel)

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
        self.memory = self._full.untyped_storage()._cdata
        self._kept_views = KeptViews(self.memory, self._originals, self._shown)
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
        """Refuses: see :meth:`PackedWeight.refuse_training`."""
        listing = listing_of(self)  # type: ignore[arg-type]
        if requires_grad and listing is not None:
            listing.originals[0].refuse_training(listing.names[0])
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
        self._blocks = self._format.blocks_of(self._row)  # K
        self.shape = torch.Size((len(param), _HEAD + self._blocks * self._format.nbytes))

    @property
    def written(self) -> torch.Size:
        return self._written

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

    def refuse_training(self, name: str) -> None:
        raise ConfigurationError(
            f"{name!r} was frozen when it was sharded with frozen='packed', and is to be trained now: it has bytes in "
            "place of numbers that an optimizer could change. Unfreeze it before the model is sharded, or leave "
            "frozen='packed' out for its unit"
        )


def _sums_of(rows: torch.Tensor) -> torch.Tensor:
    """Sums the bytes of rows behind their heads, as bytes [R, 4]."""
    return rows[:, _HEAD:].sum(1, keepdim=True, dtype=torch.int32).view(torch.uint8)


def is_packable(param: nn.Parameter) -> bool:
    """Whether a parameter is packed: a frozen matrix of real numbers, and not small."""
    is_frozen_matrix = not param.requires_grad and type(param) is nn.Parameter and param.dim() > 1
    return is_frozen_matrix and param.dtype in _PACKED and param.numel() >= SMALLEST
