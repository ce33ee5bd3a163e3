"""A gradient that stands for others, which lie where nobody who clears gradients would look."""

from __future__ import annotations

import torch


class StandingGradient:
    """The ``grad`` of one parameter, by which the clearing of others' gradients is noticed.

    Every form of ``zero_grad`` removes that gradient or writes to it, and so says that what it stands for is cleared.

    Attributes:
        gradient: what stands now; None if nothing does.
    """

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None
        self._version = 0

    def stand(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """From now on this gradient stands for others; it becomes the parameter's if it is not."""
        if param.grad is not gradient:
            param.grad = gradient
        self.gradient, self._version = gradient, gradient._version

    def was_touched(self, param: torch.Tensor) -> bool:
        """Whether somebody has removed, replaced or written to it since."""
        mark = self.gradient
        return mark is not None and (param.grad is not mark or mark._version != self._version)

    def forget(self) -> None:
        """It stands for nothing any more, whoever carries it."""
        self.gradient = None
