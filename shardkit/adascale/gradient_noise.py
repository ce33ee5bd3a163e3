"""How much the gradients of one step differ: squared norms before and after they are averaged.

Legend: G param groups of an optimizer; c backwards a step; N ranks.

With g_i the gradient of one backward on one rank and ḡ their mean over all cN, a step measures Σ|g_i|² and |ḡ|². From
these follow the variance of a gradient and the squared norm of the true one (Johnson et al., AdaScale SGD,
arXiv 2007.05105, appendix B.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..reduction.norms import dense
from ..torch_seams.hooks import (
    NO_BACKWARD,
    GradientHook,
    GradientHooks,
    call_after_backward,
    current_backward,
    inside_another_backward,
)
from .errors import GradientOrderError


def squared_norm(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Σ|t|² as a 0-dim tensor with the dtype and device of ``like``; 0 where there are none."""
    if not tensors:
        return torch.zeros_like(like)
    norms = torch._foreach_norm(dense(tensors), 2.0, like.dtype)
    return torch.stack([n.to(like.device) for n in norms]).square().sum()


class GradientMeter:
    """Sums the squared norms of the gradients that backwards deliver, before anything reduces them.

    Args:
        expected: number of backwards in a step.
        like: 0-dim; device and dtype of the sums.
        on_backward: called when a backward is through, reductions included.

    [Note: nested backwards] Re-entrant checkpoints run backwards inside of a backward. They add to the one around them,
    which is known by the gradients that it delivers itself. Where all parameters are inside of checkpoints there are
    none: then nothing is called, and :attr:`backwards` is the number of gradients of a parameter.

    ``torch.autograd.grad`` runs the hooks of tensors too, but delivers nothing: only what is accumulated is counted.
    """

    def __init__(self, expected: int, like: torch.Tensor, on_backward: Callable[[], None]) -> None:
        self.expected = expected
        self.like = like
        self._on_backward = on_backward
        self.hooks = GradientHooks()
        self._arriving: dict[int, torch.Tensor] = {}  # norms of gradients that are not accumulated yet
        self._task = self._nested_task = NO_BACKWARD
        self.reset()

    def reset(self) -> None:
        """Starts a new step."""
        self._ended = 0
        self._fired: Counter[int] = Counter()
        self._norms: list[tuple[int, torch.Tensor]] = []  # of the running backward: group, norm
        self._sums: torch.Tensor | None = None
        self._task = NO_BACKWARD

    def attach(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Listens to the parameters of these groups, [G], and to no others."""
        self.hooks.remove()
        self.groups = len(groups)
        params = [(g, p) for g, group in enumerate(groups) for p in group]
        for index, (group, param) in enumerate(params):
            trainable = param.requires_grad
            param.requires_grad_(True)  # hooks on frozen ones are for when they are not
            self.hooks.attach(param, self._before(index), self._after(index, group))
            param.requires_grad_(trainable)

    # ------------------------------------------------------------ facts
    @property
    def backwards(self) -> int:
        """Backwards of this step so far."""
        return max(self._ended, *self._fired.values(), 0)

    @property
    def has_begun(self) -> bool:
        """Whether there were gradients since the last step."""
        return bool(self._fired)

    @property
    def is_running(self) -> bool:
        """Whether a backward has begun and its end was not seen."""
        return self._task != NO_BACKWARD or current_backward() != NO_BACKWARD

    @property
    def was_interrupted(self) -> bool:
        """Whether the last backward raised."""
        return self._task != NO_BACKWARD and current_backward() == NO_BACKWARD

    def sums(self) -> torch.Tensor:
        """Σ|g_i|² of this rank by group, [G]."""
        if self._norms or self._sums is None:
            by_group = [[n for g, n in self._norms if g == group] for group in range(self.groups)]
            squares = [
                torch.stack([n.to(self.like) for n in norms]).square().sum() if norms else torch.zeros_like(self.like)
                for norms in by_group
            ]  # fmt: skip
            summed = torch.stack(squares)
            self._sums = summed if self._sums is None else self._sums + summed
            self._norms.clear()
        return self._sums

    # ------------------------------------------------------------ hooks
    def _before(self, index: int) -> GradientHook:
        arriving, dtype = self._arriving, self.like.dtype

        def before(grad: torch.Tensor) -> None:
            values = dense([grad])[0].detach()
            arriving[index] = torch.linalg.vector_norm(values, 2.0, dtype=dtype)

        return before

    def _after(self, index: int, group: int) -> GradientHook:
        def after(_: nn.Parameter) -> None:
            norm = self._arriving.pop(index, None)
            if norm is None:
                return
            if current_backward() not in (self._task, self._nested_task):
                self._begin()
            self._fired[index] += 1
            if self._fired[index] > (self.expected if self._task == NO_BACKWARD else self._ended + 1):
                self._refuse_second()
            self._norms.append((group, norm))

        return after  # type: ignore[return-value]

    def _begin(self) -> None:
        if inside_another_backward():
            self._nested_task = current_backward()
            return
        if self._task != NO_BACKWARD:  # the last one raised; whoever goes on has cleared the gradients
            self.reset()
        self._task = current_backward()
        call_after_backward(self._end)

    def _end(self) -> None:
        self._task = NO_BACKWARD
        self._ended += 1
        with torch.no_grad():
            self.sums()
            self._on_backward()

    def _refuse_second(self) -> None:
        raise GradientOrderError(
            "a parameter received more gradients than there are backwards in a step "
            f"(num_gradients_to_accumulate={self.expected}): either step() was not called after that many, or the "
            "parameter is used in several re-entrant checkpoints; use checkpoint(..., use_reentrant=False) there"
        )


# ------------------------------------------------------------------------------------------ estimates
def estimate(
    local: torch.Tensor, total: torch.Tensor, count: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norm of the true gradient and variance of a gradient at scale 1, each [G] (of one step: noisy).

    Args:
        local: Σ|g_i|² over ``count`` = cN gradients.
        total: |ḡ|².
        scale: size of the whole batch relative to that of scale 1.
    """
    variance = (local / count - total) * (scale / (count - 1))
    square = (total - variance / scale).clamp(min=0.0)
    return square, variance.clamp(min=1e-6)
