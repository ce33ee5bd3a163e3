"""The truth: an experiment in one process, with plain torch, for W ranks' data."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from .experiment import Experiment
from .trace import Moment, Trace


def run_in_one_process(
    experiment: Experiment, world_size: int, steps: int, buffers_follow_rank_0: bool
) -> Trace:
    """What ``world_size`` ranks should see: gradients are the mean over their batches, buffers are each rank's own.

    Args:
        buffers_follow_rank_0: as DistributedDataParallel and ShardedDataParallel keep them.
    """
    model = experiment.build()
    shared = {id(p): p for p in model.parameters()}
    models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(world_size - 1))]
    optimizer = experiment.optimizer_over(model.parameters())
    named = dict(model.named_parameters())
    trace = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        if buffers_follow_rank_0:
            _copy_buffers(models)
        losses = []
        for rank, replica in enumerate(models):
            loss = experiment.loss_of(replica, step, rank)
            (loss / world_size).backward()
            losses.append(loss.item())
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for n, p in named.items()
        }
        if experiment.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), experiment.clip)
        optimizer.step()
        parameters = {n: p.detach().clone() for n, p in named.items()}
        trace.append(Moment(losses, gradients, parameters, persistent_buffers(model)))
    return trace


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers that state dicts have."""
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return {n: v.detach().clone() for n, v in state.items() if n not in names and isinstance(v, torch.Tensor)}


def _copy_buffers(models: Sequence[nn.Module]) -> None:
    source = dict(models[0].named_buffers())
    for other in models[1:]:
        for name, buffer in other.named_buffers():
            buffer.data.copy_(source[name])
