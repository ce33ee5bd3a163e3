"""What the training scripts share: flags in the manner of torch_xla's examples, strategies, the loop, checkpoints.

A script says what is trained (:class:`Task`) and calls :func:`run`. The ranks train, test what they have and save it;
then their checkpoints are put together, and the calling process tests the result by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import shardkit
from shardkit.activations.checkpointing import checkpoint_wrapper
from shardkit.backend import Backend, ReduceOp, get_backend
from shardkit.examples.handwritten import Split, batches, steps_per_epoch
from shardkit.examples.loop import average_gradients, train_epoch
from shardkit.examples.progress import Progress, progress_bar
from shardkit.fsdp.local_checkpoint import consolidate
from shardkit.wrapping.policies import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from ..types import Kwargs, StateDict, Tree

STRATEGIES = ("native", "ddp", "sharded_ddp", "fsdp")
BACKENDS = ("gloo", "cuda", "xla", "simulated")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WHOLE = "_consolidated.pth"
# One held-out image more or less may be found where other hardware adds up in another order.
ACCURACY_TOLERANCE = 0.003


@dataclass(frozen=True)
class Task:
    """What a script trains. All of it travels to the ranks, so functions have to be importable.

    Attributes:
        name: of the script.
        model: builds the network, from images to logits. It calls ``shardkit.wrap`` on the parts that are units with
            ``--use_nested_fsdp``; without it that does nothing.
        data: loads training and held-out images, the same on all ranks.
        units: types of the parts that ``--auto_wrap_policy type_based`` wraps, and whose activations
            ``--use_gradient_checkpointing`` computes again.
        optimizer: its class; one that works element by element.
        settings: its arguments, the learning rate aside.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Split, Split]]
    units: tuple[type[nn.Module], ...]
    optimizer: type[Optimizer]
    settings: StateDict


class Outcome(NamedTuple):
    """Of one rank: the loss of each step on its images, seconds of training, share of held-out images found by all."""

    losses: list[float]
    seconds: float
    accuracy: float


# ------------------------------------------------------------ command line
def make_parser(name: str, description: str, *, lr: float, **defaults: object) -> argparse.ArgumentParser:
    """The flags that all scripts have."""
    parser = argparse.ArgumentParser(prog=f"python -m shardkit.examples.{name}", description=description)
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="gloo")
    add("--ranks", type=int, default=2, help="ranks that train together (default: 2)")
    add("--strategy", choices=STRATEGIES, default="fsdp",
        help="native: gradients are all-reduced before the step; ddp: torch's; sharded_ddp: OSS and ShardedDDP "
        "(ZeRO-2); fsdp (default): ZeRO-3 with --use_nested_fsdp or --auto_wrap_policy")  # fmt: skip
    add("--num_epochs", type=int, default=5)
    add("--batch_size", type=int, default=16, help="images a step and rank")
    add("--lr", type=float, default=lr)
    add("--seed", type=int, default=0, help="draws weights and the order of images")
    add("--fake_data", action="store_true", help="random images and labels")
    add("--use_nested_fsdp", action="store_true", help="the model's parts are units of their own")
    add("--auto_wrap_policy", choices=("none", "size_based", "type_based"), default="none")
    add("--auto_wrap_min_num_params", type=int, default=1000, help="of size_based")
    add("--use_gradient_checkpointing", action="store_true", help="compute activations again in backward")
    add("--flatten_parameters", action="store_true", help="one vector for each unit")
    add("--no_reshard_after_forward", action="store_true", help="keep gathered parameters until backward")
    add("--compute_dtype", choices=tuple(DTYPES), default="float32")
    add("--ckpt_prefix", help="how paths of checkpoints begin (default: none are kept)")
    add("--no_ckpt_consolidation", action="store_true", help="leave sharded checkpoints as they are")
    parser.set_defaults(**defaults)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """The command line; ends the process if options exclude each other."""
    options = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("this starts its ranks itself (--ranks); leave torchrun out")
    if min(options.ranks, options.num_epochs, options.batch_size) < 1:
        parser.error("--ranks, --num_epochs and --batch_size have to be at least 1")
    if options.use_nested_fsdp and options.auto_wrap_policy != "none":
        parser.error("--use_nested_fsdp and --auto_wrap_policy both say what is a unit; choose one")
    only_fsdp = ("use_nested_fsdp", "flatten_parameters", "no_reshard_after_forward")
    given = [f"--{name}" for name in only_fsdp if getattr(options, name)]
    given += ["--auto_wrap_policy"] if options.auto_wrap_policy != "none" else []
    given += ["--compute_dtype"] if options.compute_dtype != "float32" else []
    if given and options.strategy != "fsdp":
        parser.error(f"{', '.join(given)}: for --strategy fsdp only")
    if options.strategy == "ddp" and options.backend == "simulated":
        parser.error(
            "torch's DDP needs a process group, which simulated ranks have not; choose another --backend"
        )
    return options


# ------------------------------------------------------------ strategies
def prepare(
    task: Task, options: Namespace, weights: dict[str, torch.Tensor], device: torch.device
) -> tuple[nn.Module, Optimizer]:
    """Model and optimizer as the strategy has them: all that differs between strategies."""
    arguments = {"lr": options.lr, **task.settings}
    if options.strategy == "fsdp":
        model = fully_sharded(task, options, device)
        model.load_state_dict(weights)
        return model, task.optimizer(model.parameters(), **arguments)
    network = task.model()
    network.load_state_dict(weights)
    if options.use_gradient_checkpointing:
        checkpoint_units(network, task)
    network.to(device)
    # Running statistics stay a rank's own until the end (torch's DDP takes rank 0's).
    if options.strategy == "sharded_ddp":
        sharded = shardkit.OSS(network.parameters(), task.optimizer, **arguments)
        return shardkit.ShardedDDP(network, sharded, broadcast_buffers=False), sharded
    optimizer = task.optimizer(network.parameters(), **arguments)
    if options.strategy == "ddp":
        return DDP(network, gradient_as_bucket_view=True), optimizer
    return network, optimizer


def fully_sharded(task: Task, options: Namespace, device: torch.device) -> nn.Module:
    """The network with the units that the options ask for, in an outermost unit."""
    dtype = None if options.compute_dtype == "float32" else DTYPES[options.compute_dtype]
    arguments: Kwargs = {
        "reshard": shardkit.ReshardPolicy(after_forward=not options.no_reshard_after_forward),
        "flatten": options.flatten_parameters,
        "precision": shardkit.PrecisionPolicy(compute=dtype),
    }

    def unit(module: nn.Module, **arguments: Tree) -> nn.Module:
        if options.use_gradient_checkpointing:
            module = checkpoint_wrapper(module)
        return shardkit.FSDP(module.to(device), **arguments)

    if options.use_nested_fsdp:  # part by part: no rank ever holds the whole model
        with shardkit.enable_wrap(wrapper_cls=unit, **arguments):
            return shardkit.FSDP(task.model().to(device), **arguments)
    network = task.model()
    if options.use_gradient_checkpointing:
        checkpoint_units(network, task)
    policies = {
        "size_based": functools.partial(
            size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        ),
        "type_based": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(task.units)),
    }
    network.to(device)
    if options.auto_wrap_policy in policies:
        policy = policies[options.auto_wrap_policy]
        with shardkit.enable_wrap(wrapper_cls=shardkit.FSDP, auto_wrap_policy=policy, **arguments):
            network = shardkit.auto_wrap(network)
    return network if isinstance(network, shardkit.FSDP) else shardkit.FSDP(network, **arguments)


def checkpoint_units(network: nn.Module, task: Task) -> None:
    """Lets the network's units compute their activations again in backward."""
    for module in list(network.modules()):
        if isinstance(module, task.units):
            checkpoint_wrapper(module)


@contextlib.contextmanager
def process_group(strategy: str, backend: Backend) -> Iterator[None]:
    """What torch's DDP needs on XLA; elsewhere the launcher has made one."""
    if strategy != "ddp" or backend.name != "xla":
        yield
        return
    importlib.import_module("shardkit.xla.xla_backend")
    dist.init_process_group("xla", init_method="xla://")
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------ what every rank runs
def train(
    rank: int, task: Task, options: Namespace, weights: dict[str, torch.Tensor], prefix: str
) -> Outcome:
    """Trains, tests on the held-out images, and saves what this rank has."""
    backend = get_backend(options.backend)
    train_set, held_out = task.data()
    total = options.num_epochs * steps_per_epoch(train_set, options.batch_size * options.ranks)
    title = f"{task.name}: {options.strategy} on {options.ranks} x {options.backend}"
    with (
        process_group(options.strategy, backend),
        progress_bar(title, total) if rank == 0 else Progress() as progress,
    ):
        model, optimizer = prepare(task, options, weights, backend.device())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=options.lr, total_steps=total, cycle_momentum=False
        )

        def before_step(_: int) -> None:
            if options.strategy == "native":
                average_gradients(optimizer, backend)

        losses: list[float] = []
        began = time.perf_counter()
        for epoch in range(options.num_epochs):
            mine = batches(
                train_set, epoch, options.seed, options.batch_size * options.ranks, rank, options.ranks
            )
            losses += train_epoch(
                model, optimizer, schedule, mine, backend, F.cross_entropy, before_step, progress
            )
            progress.show_loss(losses[-1])
        seconds = time.perf_counter() - began
        average_statistics(model, backend)
        found = count_found(model, held_out, options.batch_size, backend, rank, options.ranks)
        backend.group().all_reduce(found, label="held-out images found").wait()
        accuracy = found.item() / len(held_out.labels)
        save(model, optimizer, options, prefix, rank)
    return Outcome(losses, seconds, accuracy)


@torch.no_grad()
def average_statistics(model: nn.Module, backend: Backend) -> None:
    """Running statistics of batch norms are of each rank's own images; afterwards all ranks have their mean."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            backend.group().all_reduce(buffer, op=ReduceOp.AVG, label="running statistics").wait()


@torch.no_grad()
def count_found(
    model: nn.Module, held_out: Split, batch_size: int, backend: Backend, rank: int = 0, ranks: int = 1
) -> torch.Tensor:
    """How many of this rank's held-out images the model finds, int64 []; each image is one rank's."""
    dataset = TensorDataset(*held_out)
    sampler = shardkit.EvaluationSampler(dataset, ranks, rank)
    device = backend.device()
    model.eval()
    found = torch.zeros((), dtype=torch.int64).to(device)
    for (images, labels), counts in shardkit.in_step(DataLoader(dataset, batch_size, sampler=sampler)):
        # All ranks run one shape, the last batch too; what fills it up has no right answer.
        missing = batch_size - len(labels)
        labels = F.pad(labels if counts else torch.full_like(labels, -1), (0, missing), value=-1)
        images = torch.cat([images, images[:1].expand(missing, *images.shape[1:])])
        found += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        backend.mark_step()
    return found


def save(model: nn.Module, optimizer: Optimizer, options: Namespace, prefix: str, rank: int) -> None:
    """FSDP: each rank its shards, and what is needed to put them together. Else rank 0 the whole model."""
    if isinstance(model, shardkit.FSDP):
        checkpoint = {
            "model": model.local_state_dict(),
            "shard_metadata": model.local_metadata_dict(),
            "optimizer": optimizer.state_dict(),
        }
        shardkit.save(_on_host(checkpoint), f"{prefix}_rank-{rank}-of-{options.ranks}.pth")
        return
    whole = _on_host({"model": model.state_dict()})
    if rank == 0:
        shardkit.save(whole, prefix + WHOLE)


def _on_host(checkpoint: Tree) -> Tree:
    """Its tensors on the CPU; a read, in which every rank takes part."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), checkpoint)


# ------------------------------------------------------------ what the calling process runs
def run(task: Task, options: Namespace) -> int:
    """Trains on all ranks and compares the accuracy with that of the saved model in this process.

    Returns:
        Exit code: 0 if both find the same held-out images (but for one).
    """
    torch.manual_seed(options.seed)
    weights = task.model().state_dict()
    with tempfile.TemporaryDirectory() as folder:
        prefix = options.ckpt_prefix or str(Path(folder) / task.name)
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        outcomes = shardkit.launch(
            train, options.ranks, backend=options.backend, args=(task, options, weights, prefix)
        )
        outcome = outcomes[0]
        print(
            f"{task.name}, {options.strategy} on {options.ranks} ranks of {options.backend}: held-out accuracy "
            f"{outcome.accuracy:.2%}, last loss {outcome.losses[-1]:.4f}, trained in {outcome.seconds:.1f} s"
        )
        if options.strategy == "fsdp" and options.no_ckpt_consolidation:
            return 0
        alone = accuracy_of_saved(task, options, prefix)
    print(f"saved model in one process: held-out accuracy {alone:.2%}")
    if abs(alone - outcome.accuracy) > ACCURACY_TOLERANCE:
        print("FAILED: the saved model is not the one that was trained", file=sys.stderr)
        return 1
    return 0


def put_together(prefix: str, ranks: int) -> None:
    """Writes the whole model beside the shards that the ranks have saved."""
    saved = [shardkit.load(f"{prefix}_rank-{rank}-of-{ranks}.pth") for rank in range(ranks)]
    full = consolidate([s["model"] for s in saved], [s["shard_metadata"] for s in saved])
    shardkit.save({"model": full}, prefix + WHOLE)


def accuracy_of_saved(task: Task, options: Namespace, prefix: str) -> float:
    """Held-out accuracy of what the ranks saved, as a plain module on the CPU; shards are put together first."""
    if options.strategy == "fsdp":
        put_together(prefix, options.ranks)
    full = shardkit.load(prefix + WHOLE)["model"]
    network = task.model()
    shardkit.load_with_or_without_prefix(network, full)
    dtype = DTYPES[options.compute_dtype]
    _, held_out = task.data()
    cast = Split(held_out.images.to(dtype), held_out.labels)
    found = count_found(network.to(dtype), cast, options.batch_size, get_backend("gloo"))
    return int(found) / len(held_out.labels)
