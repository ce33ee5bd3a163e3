"""What the training scripts share: strategies, the loop, tests, checkpoints.

A script says what is trained (:class:`Task`) and calls :func:`run`. The ranks train, test what they have and save it;
then their checkpoints are put together, and the calling process tests the result by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

import shardkit
from shardkit.backend import Backend, ReduceOp, get_backend
from shardkit.data import ResumableLoader
from shardkit.errors import ConfigurationError, ShardkitError
from shardkit.examples.complaints import complaint
from shardkit.examples.curves import Curves, curves_in
from shardkit.examples.data.sets import Data, Images, Sample, SharedEvenly, load_everywhere
from shardkit.examples.flags import DTYPES
from shardkit.examples.loop import average_gradients, train_epoch
from shardkit.examples.progress import Progress, progress_bar
from shardkit.examples.schedules import make_schedule
from shardkit.examples.sharding import (
    WHOLE,
    checkpoint_units,
    fully_sharded,
    path_of,
    put_together,
    shards_of,
)

from ..types import Kwargs, StateDict, Tree

# One held-out image more or less may be found where other hardware adds up in another order.
ACCURACY_TOLERANCE = 0.003
MISSED = 21  # exit code where --target_accuracy is not reached: that of torch_xla's examples


@dataclass(frozen=True)
class Task:
    """What a script trains. All of it travels to the ranks, so functions have to be importable.

    Attributes:
        name: of the script.
        model: builds the network, from images to logits. It calls ``shardkit.wrap`` on the parts that are units with
            ``--use_nested_fsdp``; without it that does nothing.
        data: loads training and held-out images, the same on all ranks.
        workers: processes that load them, where ``--num_workers`` doesn't say.
        units: types of the parts that ``--auto_wrap_policy type_based`` wraps, and whose activations
            ``--use_gradient_checkpointing`` computes again.
        optimizer: its class; one that works element by element.
        settings: its arguments, the learning rate aside.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    units: tuple[type[nn.Module], ...]
    optimizer: type[Optimizer]
    settings: StateDict
    workers: int = 0


class Outcome(NamedTuple):
    """Of one rank.

    Attributes:
        losses: of each step, on its images.
        seconds: of training, without tests.
        accuracy: share of held-out images that all ranks have found, at the end.
        tests: the same after each epoch that was tested.
        images: that an epoch has, over all ranks.
    """

    losses: list[float]
    seconds: float
    accuracy: float
    tests: dict[int, float]
    images: int


# ------------------------------------------------------------ strategies
def prepare(
    task: Task, options: Namespace, weights: dict[str, torch.Tensor], device: torch.device
) -> tuple[nn.Module, Optimizer]:
    """Model and optimizer as the strategy has them: all that differs between strategies."""
    arguments = {"lr": options.lr, **task.settings}
    if hasattr(options, "momentum"):
        arguments["momentum"] = options.momentum
    if options.strategy.endswith("fsdp"):
        model = fully_sharded(task.model, task.units, options, device)
        model.load_state_dict(weights)
        return model, task.optimizer(model.parameters(), **arguments)
    network = task.model()
    network.load_state_dict(weights)
    if options.use_gradient_checkpointing:
        checkpoint_units(network, task.units)
    network.to(device)
    # Running statistics stay a rank's own until the end (torch's DDP takes rank 0's).
    if options.strategy == "sharded_ddp":
        sharded = shardkit.OSS(network.parameters(), task.optimizer, **arguments)
        return shardkit.ShardedDDP(network, sharded, broadcast_buffers=False), sharded
    optimizer = task.optimizer(network.parameters(), **arguments)
    if options.strategy == "ddp":
        return DDP(network, gradient_as_bucket_view=True), optimizer
    return network, optimizer


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
    data = load_everywhere(task.data, backend.group())
    batches = training_batches(task, data, options, rank)
    total = options.num_epochs * len(batches)
    title = f"{task.name}: {options.strategy} on {options.ranks} x {options.backend}"
    with (
        process_group(options.strategy, backend),
        curves_in(options.logdir, rank) as curves,
        progress_bar(title, total) if rank == 0 else Progress() as progress,
    ):
        held_out = held_out_batches(
            data.held_out, options.test_set_batch_size, rank, options.ranks, workers(task, options)
        )
        model, optimizer = prepare(task, options, weights, backend.device())
        outcome = Run(task, options, data, held_out, backend, model, optimizer).epochs(
            batches, curves, progress
        )
        save(model, optimizer, options, prefix, rank)
    return outcome


def training_batches(
    task: Task, data: Data, options: Namespace, rank: int
) -> ResumableLoader[list[torch.Tensor]]:
    """This rank's images and labels of each batch: the batches are the same ones on any number of ranks.

    Raises:
        ConfigurationError: there is not even one batch.
    """
    batch = options.batch_size * options.ranks
    if options.drop_last and len(data.train) < batch:
        raise ConfigurationError(
            f"--drop_last leaves nothing of {len(data.train)} images: a batch has {options.batch_size} on each of "
            f"{options.ranks} ranks; choose a smaller --batch_size"
        )
    images = data.train if options.drop_last else SharedEvenly(data.train, options.ranks)
    return ResumableLoader(
        cast("Dataset[list[torch.Tensor]]", images), batch, seed=options.seed, drop_last=options.drop_last,
        num_replicas=options.ranks, rank=rank, **worker_options(workers(task, options)),
    )  # fmt: skip


def workers(task: Task, options: Namespace) -> int:
    """Processes that load images for a rank."""
    return task.workers if options.num_workers is None else int(options.num_workers)


def worker_options(count: int) -> Kwargs:
    """Of a DataLoader: its workers stay, for each of them takes seconds to start where ranks were spawned."""
    return {"num_workers": count, "persistent_workers": count > 0}


def held_out_batches(
    held_out: Images, batch_size: int, rank: int = 0, ranks: int = 1, workers: int = 0
) -> DataLoader[Sample]:
    """This rank's part of the images to test on: each image is one rank's."""
    sampler = shardkit.EvaluationSampler(held_out, ranks, rank)
    return DataLoader(
        cast("Dataset[Sample]", held_out), batch_size, sampler=sampler, **worker_options(workers)
    )


@dataclass
class Run:
    """One rank's training."""

    task: Task
    options: Namespace
    data: Data
    held_out: DataLoader[Sample]
    backend: Backend
    model: nn.Module
    optimizer: Optimizer

    def epochs(
        self, batches: ResumableLoader[list[torch.Tensor]], curves: Curves, progress: Progress
    ) -> Outcome:
        """Trains them all, with a test now and then, and one at the end."""
        schedule = make_schedule(self.options, self.optimizer, len(batches))
        losses: list[float] = []
        tests: dict[int, float] = {}
        seconds = 0.0
        for epoch in range(1, self.options.num_epochs + 1):
            began = time.perf_counter()
            found = train_epoch(
                self.model, self.optimizer, schedule, batches, self.backend, F.cross_entropy, self._before_step,
                progress, log_steps=self.options.log_steps,
            )  # fmt: skip
            took = time.perf_counter() - began
            losses, seconds = losses + found, seconds + took
            progress.show_loss(found[-1])
            values = {"Loss/train": sum(found) / len(found), "images_per_s": len(self.data.train) / took}
            if self._is_tested_after(epoch):
                tests[epoch] = values["Accuracy/test"] = self._test()
            curves.write(epoch, **values, lr=float(schedule.get_last_lr()[0]))
        return Outcome(losses, seconds, tests[self.options.num_epochs], tests, len(self.data.train))

    def _is_tested_after(self, epoch: int) -> bool:
        every = self.options.eval_interval
        return epoch == self.options.num_epochs or (bool(every) and epoch % every == 0)

    def _before_step(self, _: int) -> None:
        if self.options.strategy == "native":
            average_gradients(self.optimizer, self.backend)

    def _test(self) -> float:
        """Share of the held-out images that all ranks together find."""
        average_statistics(self.model, self.backend)
        found = count_found(self.model, self.held_out, self.backend)
        self.backend.group().all_reduce(found, label="held-out images found").wait()
        return found.item() / len(self.data.held_out)


@torch.no_grad()
def average_statistics(model: nn.Module, backend: Backend) -> None:
    """Running statistics of batch norms are of each rank's own images; afterwards all ranks have their mean."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            backend.group().all_reduce(buffer, op=ReduceOp.AVG, label="running statistics").wait()


@torch.no_grad()
def count_found(
    model: nn.Module, held_out: DataLoader[Sample], backend: Backend, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """How many of this rank's held-out images the model finds, int64 [].

    Args:
        model: to be tested.
        held_out: this rank's :func:`held_out_batches`.
        backend: where it computes.
        dtype: what the model wants images in.
    """
    batch_size, device = held_out.batch_size or 1, backend.device()
    model.eval()
    found = torch.zeros((), dtype=torch.int64).to(device)
    for (images, labels), counts in shardkit.in_step(held_out):
        # All ranks run one shape, the last batch too; what fills it up has no right answer.
        missing = batch_size - len(labels)
        labels = F.pad(labels if counts else torch.full_like(labels, -1), (0, missing), value=-1)
        images = torch.cat([images, images[:1].expand(missing, *images.shape[1:])])
        found += (model(images.to(device, dtype)).argmax(dim=1) == labels.to(device)).sum()
        backend.mark_step()
    return found


def save(model: nn.Module, optimizer: Optimizer, options: Namespace, prefix: str, rank: int) -> None:
    """FSDP: each rank its shards, and what is needed to put them together. Else rank 0 the whole model."""
    shards = shards_of(model)
    if shards is not None:
        checkpoint = _on_host({**shards, "optimizer": optimizer.state_dict()})
        shardkit.save(checkpoint, path_of(prefix, rank, options.ranks))
        return
    whole = _on_host({"model": model.state_dict()})
    if rank == 0:
        shardkit.save(whole, prefix + WHOLE)


def _on_host(checkpoint: Tree) -> Tree:
    """Its tensors on the CPU; a read, in which every rank takes part."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), checkpoint)


# ------------------------------------------------------------ what the calling process runs
def run(make_task: Callable[[], Task], options: Namespace) -> int:
    """Trains on all ranks and compares the accuracy with that of the saved model in this process.

    Args:
        make_task: says what is trained; it may find that there is no data.
        options: the command line.

    Returns:
        Exit code: 0 if both find the same held-out images (but for one); 2: there is no data, or not what ranks need;
        21: the accuracy is below what was asked for.
    """
    try:
        return _run(make_task(), options)
    except ShardkitError as error:
        if not (said := complaint(error)):
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2


def _run(task: Task, options: Namespace) -> int:
    torch.manual_seed(options.seed)
    weights = task.model().state_dict()
    with tempfile.TemporaryDirectory() as folder:
        prefix = options.ckpt_prefix or str(Path(folder) / task.name)
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        outcome = shardkit.launch(
            train, options.ranks, backend=options.backend, args=(task, options, weights, prefix)
        )[0]
        report(task, options, outcome)
        if not (options.strategy.endswith("fsdp") and options.no_ckpt_consolidation):
            alone = accuracy_of_saved(task, options, prefix)
            print(f"saved model in one process: held-out accuracy {alone:.2%}")
            if abs(alone - outcome.accuracy) > ACCURACY_TOLERANCE:
                print("FAILED: the saved model is not the one that was trained", file=sys.stderr)
                return 1
    if options.target_accuracy is not None and 100 * outcome.accuracy < options.target_accuracy:
        print(
            f"FAILED: {outcome.accuracy:.2%} is below --target_accuracy {options.target_accuracy}",
            file=sys.stderr,
        )
        return MISSED
    return 0


def report(task: Task, options: Namespace, outcome: Outcome) -> None:
    """Prints accuracies, loss and speed."""
    for epoch, accuracy in outcome.tests.items():
        if epoch < options.num_epochs:
            print(f"after epoch {epoch}: accuracy {accuracy:.2%}")
    rate = options.num_epochs * outcome.images / outcome.seconds
    print(
        f"{task.name}, {options.strategy} on {options.ranks} ranks of {options.backend}: held-out accuracy "
        f"{outcome.accuracy:.2%}, last loss {outcome.losses[-1]:.4f}, trained in {outcome.seconds:.1f} s "
        f"({rate:.1f} images/s)"
    )


def accuracy_of_saved(task: Task, options: Namespace, prefix: str) -> float:
    """Held-out accuracy of what the ranks saved, as a plain module on the CPU; shards are put together first."""
    if options.strategy.endswith("fsdp"):
        put_together(prefix, options.ranks, options.strategy)
    full = shardkit.load(prefix + WHOLE)["model"]
    network = task.model()
    shardkit.load_with_or_without_prefix(network, full)
    dtype, held_out = DTYPES[options.compute_dtype], task.data().held_out
    batches = held_out_batches(held_out, options.test_set_batch_size, workers=workers(task, options))
    return int(count_found(network.to(dtype), batches, get_backend("gloo"), dtype)) / len(held_out)
