"""Compares two checkpoints of whatever kinds, name by name, some rows at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from ...types import Tree
from .stored import Checkpoint, StoredTensor, dotted, leaves


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference, under one name.

    Attributes:
        name: model's tensors begin with "model.".
        what: in words.
        max_abs: largest absolute difference of elements; None where values were not compared.
    """

    name: str
    what: str
    max_abs: float | None = None


@dataclasses.dataclass
class Comparison:
    """A comparison of two checkpoints.

    Attributes:
        differences: none, where all that was compared is the same to the bit.
        tensors: that were compared.
        not_compared: what only one of both has a place for.
    """

    differences: list[Difference] = dataclasses.field(default_factory=list)
    tensors: int = 0
    not_compared: list[str] = dataclasses.field(default_factory=list)


def compare(a: Checkpoint, b: Checkpoint, *, model_only: bool = False, tolerance: float = 0.0) -> Comparison:
    """Compares names, shapes, dtypes and values.

    Where one of both is a model's state dict alone, as all Hugging Face folders are, so much is compared.

    Args:
        model_only: compare no more than the models.
        tolerance: so much may elements differ.

    Raises:
        DamagedFileError: of either; names file and tensor.
    """
    result = Comparison()
    if not model_only and bool(a.model_path) != bool(b.model_path):
        whole, bare = (a, b) if a.model_path else (b, a)
        others = [str(k) for k in whole.tree if k != whole.model_path[0]]
        if others:
            result.not_compared.append(f"{', '.join(others)}: {bare.path} holds a model alone")
        model_only = True
    left, right = _by_name(a, model_only), _by_name(b, model_only)
    ranks = [set(c.tree["rank_states"]) if "rank_states" in c.tree else set() for c in (a, b)]
    for rank in () if model_only else sorted(ranks[0] ^ ranks[1], key=str):
        result.not_compared.append(f"rank_states.{rank}: one of both was saved by fewer ranks")
        for names in (left, right):
            for name in [n for n in names if n.startswith(f"rank_states.{rank}.")]:
                del names[name]
    for name in [*left, *(n for n in right if n not in left)]:
        if name not in right or name not in left:
            result.differences.append(Difference(name, f"only in {a.path if name in left else b.path}"))
            continue
        x, y = left[name], right[name]
        result.tensors += isinstance(x, StoredTensor)
        result.differences += _differences(name, x, y, tolerance)
    return result


def _by_name(checkpoint: Checkpoint, model_only: bool) -> dict[str, object]:
    found = {f"model.{name}": value for name, value in checkpoint.model.items()}
    if not model_only and checkpoint.model_path:
        inside = len(checkpoint.model_path)
        for path, value in leaves(checkpoint.tree):
            if path[:inside] != checkpoint.model_path:
                found[dotted(path)] = value
    return found


def _differences(name: str, x: Tree, y: Tree, tolerance: float) -> Iterator[Difference]:
    if isinstance(x, StoredTensor) != isinstance(y, StoredTensor):
        yield Difference(name, "a tensor in one, and none in the other")
    elif not isinstance(x, StoredTensor):
        if not _same(x, y):
            yield Difference(name, f"{short(x)} and {short(y)}")
    elif x.shape != y.shape:
        yield Difference(name, f"shapes {list(x.shape)} and {list(y.shape)}")
    else:
        found = _Found()
        found.see(x, y)
        if x.dtype != y.dtype:
            kinds = f"{short_dtype(x.dtype)} and {short_dtype(y.dtype)}"
            values = "values are equal" if found.count == 0 else f"max. difference {found.max_abs:.3g}"
            yield Difference(name, f"dtypes {kinds}, {values}", found.max_abs)
        elif found.bits and not found.max_abs <= tolerance:
            yield Difference(
                name, f"{found.count} of {x.numel} elements, max. {found.max_abs:.3g}", found.max_abs
            )
        elif found.bits and tolerance == 0.0:
            yield Difference(
                name, "equal values with other bits (signs of zeros, kinds of NaN)", found.max_abs
            )


def same_bits(x: StoredTensor, y: StoredTensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes."""
    found = _Found()
    found.see(x, y)
    return not found.bits


class _Found:
    """The differences of a pair of tensors so far."""

    def __init__(self) -> None:
        self.bits = False
        self.count = 0
        self.max_abs = 0.0

    def see(self, x: StoredTensor, y: StoredTensor) -> None:
        """Compares them, in rows where that can be."""
        slabs = list(x.slabs()) if list(y.slabs()) else []
        if not slabs:
            self._pair(x.read(), y.read(), x, y)
        for start, stop in slabs:
            self._pair(x.read_rows(start, stop), y.read_rows(start, stop), x, y)

    def _pair(self, a: torch.Tensor, b: torch.Tensor, x: StoredTensor, y: StoredTensor) -> None:
        a, b = a.to(x.dtype).reshape(-1), b.to(y.dtype).reshape(-1)
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return
        self.bits = True
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        unequal = int(same.numel() - same.sum())
        if unequal:
            self.count += unequal
            largest = float((a - b).abs().masked_fill(same, 0.0).max())
            self.max_abs = (
                largest if math.isnan(largest) or math.isnan(self.max_abs) else max(self.max_abs, largest)
            )


def _same(x: Tree, y: Tree) -> bool:
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(_same(i, k) for i, k in zip(x, y, strict=True))
    if type(x).__module__ == "numpy" and hasattr(x, "tobytes"):
        kinds = (getattr(x, "dtype", None), getattr(x, "shape", None))
        return kinds == (getattr(y, "dtype", None), getattr(y, "shape", None)) and x.tobytes() == y.tobytes()
    try:
        return type(x) is type(y) and (bool(x == y) or (isinstance(x, float) and repr(x) == repr(y)))
    except (TypeError, ValueError, RuntimeError):
        return False


def short(value: object) -> str:
    """Returns the beginning of its text, for a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def short_dtype(dtype: torch.dtype) -> str:
    """Names a dtype without torch's name in front."""
    return str(dtype).removeprefix("torch.")
