"""What Trainers of transformers 4.30 leave to accelerate: when gradients are complete, and who steps then.

In its manner, from its documentation. A model that is wrapped already is left as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


class PreparedOptimizer(torch.optim.Optimizer):
    """Hands on to the optimizer that it holds; it steps and clears only where gradients are complete."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
        self.optimizer = optimizer
        self.accelerator = accelerator

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        if self.accelerator.sync_gradients:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        return None


class PreparedScheduler:
    """Goes on only where the optimizer has stepped."""

    def __init__(self, scheduler: Any, accelerator: Accelerator) -> None:
        self.scheduler = scheduler
        self.accelerator = accelerator

    def step(self) -> None:
        if self.accelerator.sync_gradients:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)


class Accelerator:
    def __init__(self, gradient_accumulation_steps: int) -> None:
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.sync_gradients = True
        self._batches = 0

    def prepare(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> tuple[Any, Any]:
        return PreparedOptimizer(optimizer, self), PreparedScheduler(scheduler, self)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Around forward, backward and step of one batch."""
        self._batches += 1
        self.sync_gradients = self._batches % self.gradient_accumulation_steps == 0
        no_sync: Any = contextlib.nullcontext if self.sync_gradients else getattr(model, "no_sync", None)
        with (no_sync or contextlib.nullcontext)():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.gradient_accumulation_steps).backward()

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> None:
        if self.sync_gradients:
            nn.utils.clip_grad_norm_(parameters, max_norm)
