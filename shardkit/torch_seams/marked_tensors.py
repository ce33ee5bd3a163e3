"""Tensors that are plain but for their class, by which torch's own functions are told what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch

as_plain = torch._C.DisableTorchFunctionSubclass  # a context in which tensors are taken for what they are


class MarkedTensor(torch.Tensor):
    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        with as_plain():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def stays_marked(result: object, args: Sequence[object], kind: type[torch.Tensor]) -> bool:
    """Whether the result of a function is its first argument, of this kind, again: cloned, detached, scaled."""
    return (
        type(result) is torch.Tensor
        and bool(args)
        and isinstance(args[0], kind)
        and args[0].shape == result.shape
    )
