"""A gradient that stands for others, which lie where nobody who clears gradients would look."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["StandingGradient"]


class StandingGradient:
    """The ``grad`` of one parameter, by which the clearing of others' gradients is noticed.

    Every form of ``zero_grad`` removes that gradient or writes to it, and so says that what it stands for is cleared.

    Args:
        param: who carries it.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self._param = param
        self._version = 0
        self.gradient: torch.Tensor | None = None

    def stand(self, gradient: Any) -> None:
        """From now on this gradient stands for others; it becomes the parameter's if it is not."""
        if self._param.grad is not gradient:
            self._param.grad = gradient
        self.gradient, self._version = gradient, gradient._version

    def was_touched(self) -> bool:
        """Whether somebody has removed, replaced or written to it since."""
        mark = self.gradient
        return mark is not None and (self._param.grad is not mark or mark._version != self._version)

    def forget(self) -> None:
        """It stands for nothing any more, whoever carries it."""
        self.gradient = None
