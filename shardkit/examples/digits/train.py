"""What every rank runs: a data-parallel job, with or without sharding (its loop: :mod:`shardkit.examples.loop`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import shardkit
from shardkit.backend import Backend, get_backend
from shardkit.examples import handwritten
from shardkit.examples.loop import average_gradients, train_epoch
from shardkit.examples.progress import Progress, progress_bar
from shardkit.wrapping.policies import transformer_auto_wrap_policy

from ...types import Kwargs
from .model import Block, DigitTransformer

STRATEGIES = ("ddp", "oss", "sharded_ddp", "fsdp")


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        strategy: "single" (one process, no wrapper) or one of STRATEGIES.
        world_size: ranks that train together.
        epochs: passes over the training images; the learning rate's schedule spans them.
        stop_after: epochs really run (fewer, to look at the first steps only).
        batch_size: images in a step, over all ranks together.
    """

    strategy: str
    backend: str
    world_size: int
    epochs: int
    stop_after: int
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.2
    label_smoothing: float = 0.1
    seed: int = 0


@dataclass
class Outcome:
    """What one rank saw. ``parameters``, ``gradients`` and ``state`` are bytes held after a backward."""

    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    seconds: float = 0.0


def wrap(strategy: str, model: nn.Module, job: Job, backend: Backend) -> tuple[nn.Module, Optimizer]:
    """The model and the optimizer as the strategy has them; this is all that differs between strategies."""
    arguments: Kwargs = {"lr": job.lr, "weight_decay": job.weight_decay}
    optimizer: Optimizer
    if strategy == "fsdp":
        model = nested_fsdp(model)
    if strategy in ("single", "ddp", "fsdp"):
        optimizer = torch.optim.AdamW(model.parameters(), **arguments)
    else:
        optimizer = shardkit.OSS(model.parameters(), torch.optim.AdamW, **arguments)
    if isinstance(optimizer, shardkit.OSS) and strategy == "sharded_ddp":
        return shardkit.ShardedDDP(model, optimizer), optimizer
    if strategy in ("ddp", "oss") and has_ddp(backend):
        return DDP(model, gradient_as_bucket_view=True), optimizer
    return model, optimizer


def nested_fsdp(model: nn.Module) -> nn.Module:
    """Each block is a unit of its own, which is gathered while it computes; the outermost unit holds the rest."""
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    with shardkit.enable_wrap(wrapper_cls=shardkit.FSDP, auto_wrap_policy=blocks):
        return shardkit.FSDP(shardkit.auto_wrap(model))


def has_ddp(backend: Backend) -> bool:
    """Whether torch's own DDP runs there: it needs ranks that are processes, and eager tensors."""
    return backend.name in ("gloo", "cuda")


class Start(NamedTuple):
    """What all ranks start from: the images and the model's weights."""

    train_set: handwritten.Split
    held_out: handwritten.Split
    weights: dict[str, torch.Tensor]


def prepare(seed: int) -> Start:
    """Drawn once, by the process that launches: ranks that are threads share one random generator."""
    torch.manual_seed(seed)
    return Start(*handwritten.load(), weights=DigitTransformer().state_dict())


def train(rank: int, job: Job, start: Start, progress: Progress) -> Outcome:
    """Trains one model and tests it on the held-out images; every rank calls it, with the same job."""
    backend = get_backend(job.backend)
    device = backend.device()
    steps = handwritten.steps_per_epoch(start.train_set, job.batch_size)

    network = DigitTransformer()
    network.load_state_dict(start.weights)
    network.to(device)
    whole = list(network.parameters())
    model, optimizer = wrap(job.strategy, network, job, backend)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=job.lr, total_steps=job.epochs * steps)
    by_hand = job.strategy in ("ddp", "oss") and not has_ddp(backend)
    outcome = Outcome()

    def before_step(index: int) -> None:
        if by_hand:
            average_gradients(optimizer, backend)
        if index == 1 and not outcome.parameters:  # the second step: the optimizer has its state
            measure(outcome, whole, list(model.parameters()), optimizer, backend)

    began = time.perf_counter()
    for epoch in range(job.stop_after):
        batches = handwritten.batches(start.train_set, epoch, job.seed, job.batch_size, rank, job.world_size)
        loss_of = functools.partial(F.cross_entropy, label_smoothing=job.label_smoothing)
        outcome.losses += train_epoch(
            model, optimizer, schedule, batches, backend, loss_of, before_step, progress
        )
        progress.show_loss(outcome.losses[-1])
    outcome.seconds = time.perf_counter() - began
    outcome.accuracy = test(model, start.held_out, device)
    return outcome


@torch.no_grad()
def test(model: nn.Module, held_out: handwritten.Split, device: torch.device) -> float:
    """The share of held-out images whose digit the model finds."""
    model.eval()
    found = model(held_out.images.to(device)).argmax(dim=1) == held_out.labels.to(device)
    return float(found.float().mean().item())


def measure(
    outcome: Outcome,
    whole: Sequence[nn.Parameter],
    wrapped: Sequence[nn.Parameter],
    optimizer: Optimizer,
    backend: Backend,
) -> None:
    """Notes the bytes that this rank holds now: parameters, their gradients, optimizer state.

    Args:
        whole: parameters of the plain model; where they are sharded, they hold memory only inside of forward and
            backward. Looked at where memory can be seen: elsewhere they tell their shape, whatever they hold.
        wrapped: what a wrapper made of them.
    """
    inner = optimizer.optim if isinstance(optimizer, shardkit.OSS) else optimizer
    own = [p for group in inner.param_groups for p in group["params"]]
    listed = [*wrapped, *own]
    held = held_bytes if backend.has_storage else counted_bytes
    outcome.parameters = held([*listed, *(whole if backend.has_storage else ())])
    outcome.gradients = held(p.grad for p in listed if p.grad is not None)
    state = [v for values in inner.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    outcome.state = held(state)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors; views of one buffer count once, and the whole buffer counts."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def counted_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors that own no memory of their own until they are computed (XLA)."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def run_rank(rank: int, jobs: list[Job], start: Start) -> list[Outcome]:
    """Runs jobs one after the other, so that ranks start once; only rank 0 shows progress."""
    outcomes = []
    for job in jobs:
        steps = job.stop_after * handwritten.steps_per_epoch(start.train_set, job.batch_size)
        title = f"{job.strategy} on {job.world_size} x {job.backend}"
        with progress_bar(title, steps) if rank == 0 else Progress() as progress:
            outcomes.append(train(rank, job, start, progress))
    return outcomes
