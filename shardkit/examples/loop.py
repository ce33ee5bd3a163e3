"""The training loop of all examples: what a rank does in each step, whatever shards its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardkit.backend import Backend, ReduceOp

from .progress import Progress

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BeforeStep = Callable[[int], None]
Batches = Iterable[Sequence[torch.Tensor]]


def train_epoch(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, batches: Batches, backend: Backend,
    loss_of: Loss, before_step: BeforeStep, progress: Progress, *, log_steps: int = 0,
) -> list[float]:  # fmt: skip
    """One pass over this rank's images; the loss of each step.

    Args:
        model, optimizer, schedule: plain ones, or those of shardkit.OSS, ShardedDDP or FSDP: nothing here asks.
        batches: images [b, ...] and labels [b] on the CPU.
        backend: where this rank computes.
        loss_of: logits [b, classes] and labels [b] to a loss [].
        before_step: called with the index of the step when its gradients are there.
        progress: told of each step.
        log_steps: steps between readings of the loss, which it shows; 0 for none.
    """
    device = backend.device()
    model.train()
    losses: list[torch.Tensor] = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = loss_of(model(images.to(device)).float(), labels.to(device))
        loss.backward()
        before_step(len(losses))
        optimizer.step()
        schedule.step()
        backend.mark_step()  # runs what was recorded, where execution is lazy
        losses.append(loss.detach())
        progress.advance()
        if log_steps and len(losses) % log_steps == 0:
            progress.note_loss(losses[-1].item())  # on all ranks: reading runs what is recorded
    return torch.stack(losses).tolist()  # read once: reading waits for the device


def average_gradients(optimizer: Optimizer, backend: Backend) -> None:
    """What DDP does, in its plainest form: for models that no wrapper reduces the gradients of."""
    group = backend.group()
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if parameter.grad is not None:
                group.all_reduce(parameter.grad, op=ReduceOp.AVG).wait()
