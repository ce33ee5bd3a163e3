"""Parameters that an optimizer gets as a whole for the time of a step, whichever way their values come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from ..errors import LifecycleError
from .listed import Part


class Owned:
    """A parameter that this rank updates, and of which other ranks have pieces.

    Attributes:
        param: what the optimizer updates; it has values and memory during a step alone.
    """

    def __init__(self, part: Part, like: torch.Tensor) -> None:
        self.part = part
        self._nothing = like.new_empty((1,) * len(part.shape)).expand(part.shape)
        self.param = nn.Parameter(self._nothing, requires_grad=like.is_floating_point() or like.is_complex())

    def forget(self) -> None:
        """The values lie on all ranks again."""
        self.param.grad = None
        self.param.data = self._nothing


class Bringing(ABC):
    """Brings pieces to whoever updates parameters, and values back.

    Attributes:
        owned: the parameters that this rank updates, in order.
    """

    owned: list[Owned]

    @abstractmethod
    def start(self, gradients: bool) -> None:
        """Sends values, and gradients if asked for (collective)."""

    @abstractmethod
    def finish(self) -> None:
        """What this rank owns has its values and gradients."""

    @abstractmethod
    def send_back(self) -> None:
        """Starts to bring updated values to the shards (collective)."""

    @abstractmethod
    def take_back(self) -> None:
        """Shards have the updated values."""

    def forget(self) -> None:
        """Gives the memory of whole parameters back."""
        for owned in self.owned:
            owned.forget()


def shard_of(part: Part) -> torch.Tensor:
    """This rank's shard of the flat parameter that a parameter lies in, detached."""
    if part.flat is None:
        raise LifecycleError(f"parameter {part.name!r} is not sharded, and can't travel")
    return part.flat.param.detach()
