"""What the training scripts share: flags, strategies, tests, checkpoints.

A script says what is trained (:class:`Task`) and calls :func:`run`. The ranks train, test what they have and save it;
then their checkpoints are put together, and the calling process tests the result by itself. The loop is
:func:`digits.train_epoch`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

import shardkit
from digits import Progress, average_gradients, train_epoch
from images import Data, Images, Sample, SharedEvenly, load_everywhere
from shardkit.backend import Backend, ReduceOp, get_backend
from shardkit.errors import BackendError, ConfigurationError, DamagedFileError, RankFailedError, ShardkitError
from shardkit.fsdp.state_dict import consolidate
from shardkit.tracing.metrics import JsonLines, Sink, TensorBoard
from shardkit.training.data import ResumableLoader
from shardkit.types import Kwargs, StateDict, Tree
from shardkit.wrapping.activations import checkpoint_wrapper
from shardkit.wrapping.policies import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from shardkit.xla.fsdp import (
    XlaFullyShardedDataParallel,
    checkpoint_module,
    consolidate_sharded_model_checkpoints,
)

# ------------------------------------------------------------ the command line
STRATEGIES = ("native", "ddp", "sharded_ddp", "fsdp", "xla_fsdp")
BACKENDS = ("gloo", "cuda", "xla", "simulated")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARMUP_AND_DECAY = "WarmupAndExponentialDecayScheduler"
SCHEDULES = ("OneCycleLR", WARMUP_AND_DECAY, "none")
# Of WARMUP_AND_DECAY, where they are not given.
DECAY = {"num_warmup_epochs": 0.9, "lr_scheduler_divide_every_n_epochs": 20, "lr_scheduler_divisor": 5}


def make_parser(
    name: str, description: str, *, lr: float, momentum: float | None = None, **defaults: object
) -> argparse.ArgumentParser:
    """The flags that all scripts have.

    Args:
        name: of the script.
        description: for --help.
        lr, momentum: defaults; without one there is no --momentum.
        **defaults: of other flags.
    """
    parser = argparse.ArgumentParser(prog=f"python examples/{name}.py", description=description)
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="gloo", help="default: %(default)s")
    add(
        "--ranks",
        "--num_cores",
        dest="ranks",
        type=int,
        default=int(os.environ.get("CPU_NUM_DEVICES", "2")),
        help="ranks that train together (default: %(default)s)",
    )
    add(
        "--strategy",
        choices=STRATEGIES,
        default="fsdp",
        help="native: gradients are all-reduced before the step; ddp: torch's; sharded_ddp: OSS and ShardedDDP "
        "(ZeRO-2); fsdp: ZeRO-3 with --use_nested_fsdp or --auto_wrap_policy; xla_fsdp: the same with torch_xla's "
        "interface and checkpoints (default: %(default)s)",
    )
    add("--ddp", dest="strategy", action="store_const", const="ddp", help="--strategy ddp")
    add("--num_epochs", type=int, default=5, help="default: %(default)s")
    add("--batch_size", type=int, default=16, help="images a step and rank (default: %(default)s)")
    add("--lr", type=float, default=lr, help="default: %(default)s")
    if momentum is not None:
        add("--momentum", type=float, default=momentum, help="default: %(default)s")
    add("--seed", type=int, default=0, help="draws weights and the order of images")
    _add_data(parser)
    _add_schedule(parser)
    _add_sharding(parser)
    parser.set_defaults(**defaults)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--fake_data", action="store_true", help="random images and labels")
    add(
        "--datadir", help="where the images are (without it: the usual folder if they are there, else digits)"
    )
    add("--num_workers", type=int, help="processes that load images (default: 0; 4 for folders of images)")
    add(
        "--drop_last",
        action="store_true",
        help="leave out what doesn't fill an epoch's last batch; on XLA its shape would be compiled, too",
    )
    add("--test_set_batch_size", type=int, help="images a step and rank in tests (default: as in training)")
    add(
        "--eval_interval",
        type=int,
        default=0,
        help="epochs between tests; 0: at the end (default: %(default)s)",
    )
    add("--test_only_at_end", dest="eval_interval", action="store_const", const=0, help="--eval_interval 0")
    add("--target_accuracy", type=float, help="percent; the exit code is 21 if it is not reached")
    add("--logdir", help="for curves of learning: TensorBoard's if it is installed, else metrics.jsonl")
    add("--log_steps", type=int, default=0, help="steps between lines with the loss (default: none)")


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lr_scheduler_type", choices=SCHEDULES, default="OneCycleLR", help="default: %(default)s")
    of = f"(of {WARMUP_AND_DECAY}; default: %s)"
    warmup, every, divisor = DECAY.values()
    add("--num_warmup_epochs", type=float, help=f"in which the rate grows from 0 {of % warmup}")
    add("--lr_scheduler_divide_every_n_epochs", type=int, help=f"epochs between divisions {of % every}")
    add("--lr_scheduler_divisor", type=float, help=f"what the rate is divided by {of % divisor}")


def _add_sharding(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--use_nested_fsdp", action="store_true", help="the model's parts are units of their own")
    add("--auto_wrap_policy", choices=("none", "size_based", "type_based"), default="none")
    add("--auto_wrap_min_num_params", type=int, default=1000, help="of size_based")
    add("--use_gradient_checkpointing", action="store_true", help="compute activations again in backward")
    add("--flatten_parameters", action="store_true", help="one vector for each unit")
    add("--no_reshard_after_forward", action="store_true", help="keep gathered parameters until backward")
    add("--compute_dtype", choices=tuple(DTYPES), default="float32")
    add("--ckpt_prefix", help="how paths of checkpoints begin (default: %(default)s)")
    add("--no_ckpt_consolidation", action="store_true", help="leave sharded checkpoints as they are")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """The command line; ends the process if options exclude each other."""
    options = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parser.error("this starts its ranks itself (--ranks); leave torchrun out")
    if min(options.ranks, options.num_epochs, options.batch_size) < 1:
        parser.error("--ranks, --num_epochs and --batch_size have to be at least 1")
    if not 0 <= options.lr < math.inf:
        parser.error("--lr has to be a number that is not below 0")
    if getattr(options, "image_size", None) is not None and options.image_size < 1:
        parser.error("--image_size has to be at least 1")
    if min(options.eval_interval, options.log_steps, options.num_workers or 0) < 0:
        parser.error("--eval_interval, --log_steps and --num_workers can't be below 0")
    if options.test_set_batch_size is None:
        options.test_set_batch_size = options.batch_size
    if options.test_set_batch_size < 1:
        parser.error("--test_set_batch_size has to be at least 1")
    for name in ("datadir", "logdir", "ckpt_prefix"):  # ranks may be elsewhere
        if getattr(options, name):
            setattr(options, name, os.path.abspath(getattr(options, name)))
    if options.logdir:
        check_folder(parser, "logdir", options.logdir)
    if options.ckpt_prefix:
        check_folder(parser, "ckpt_prefix", os.path.dirname(options.ckpt_prefix))
    _check_schedule(parser, options)
    _check_sharding(parser, options)
    return options


def check_folder(parser: argparse.ArgumentParser, name: str, folder: str) -> None:
    """Ends the process if nothing can be written there: once something is trained, that would be lost."""
    there = os.path.abspath(folder)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        parser.error(f"--{name} {folder}: {there} is no folder")
    if not os.access(there, os.W_OK):
        parser.error(f"--{name} {folder}: {there} is not for this user to write to")


def _check_schedule(parser: argparse.ArgumentParser, options: Namespace) -> None:
    given = [f"--{name}" for name in DECAY if getattr(options, name) is not None]
    if given and options.lr_scheduler_type != WARMUP_AND_DECAY:
        parser.error(f"{', '.join(given)}: for --lr_scheduler_type {WARMUP_AND_DECAY} only")
    for name, value in DECAY.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.num_warmup_epochs < 0:
        parser.error("--num_warmup_epochs can't be below 0")
    if options.lr_scheduler_divide_every_n_epochs < 1 or options.lr_scheduler_divisor <= 0:
        parser.error("--lr_scheduler_divide_every_n_epochs is at least 1, --lr_scheduler_divisor above 0")


def _check_sharding(parser: argparse.ArgumentParser, options: Namespace) -> None:
    if options.use_nested_fsdp and options.auto_wrap_policy != "none":
        parser.error("--use_nested_fsdp and --auto_wrap_policy both say what is a unit; choose one")
    only_fsdp = ("use_nested_fsdp", "flatten_parameters", "no_reshard_after_forward")
    given = [f"--{name}" for name in only_fsdp if getattr(options, name)]
    given += ["--auto_wrap_policy"] if options.auto_wrap_policy != "none" else []
    given += ["--compute_dtype"] if options.compute_dtype != "float32" else []
    if given and not options.strategy.endswith("fsdp"):
        parser.error(f"{', '.join(given)}: for --strategy fsdp only")
    if options.strategy == "ddp" and options.backend == "simulated":
        parser.error(
            "torch's DDP needs a process group, which simulated ranks have not; choose another --backend"
        )


# ------------------------------------------------------------ schedules, curves, complaints
def make_schedule(options: Namespace, optimizer: Optimizer, steps: int) -> LRScheduler:
    """What ``--lr_scheduler_type`` says, for epochs of so many steps; it is asked after every step."""
    if options.lr_scheduler_type == "OneCycleLR":
        total = options.num_epochs * steps
        return OneCycleLR(optimizer, max_lr=options.lr, total_steps=total, cycle_momentum=False)
    decays = options.lr_scheduler_type == WARMUP_AND_DECAY
    warmup = options.num_warmup_epochs * steps
    every, divisor = options.lr_scheduler_divide_every_n_epochs, options.lr_scheduler_divisor

    def factor(step: int) -> float:
        """Grows from 0 to 1 over the first epochs; later it is divided every so many epochs."""
        if not decays:
            return 1.0
        if step < warmup:
            return min(1.0, (step + 1) / warmup)
        return float(divisor ** -(step // steps // every))

    return LambdaLR(optimizer, factor)


@contextlib.contextmanager
def curves_in(logdir: str | None, rank: int) -> Iterator[Sink | None]:
    """Opens what the curves of a run are written to; None without ``--logdir``, and on ranks other than 0."""
    if logdir is None or rank:
        yield None
        return
    sink: Sink
    if importlib.util.find_spec("tensorboard") is not None:
        sink = TensorBoard(logdir)
    else:
        path = Path(logdir) / "metrics.jsonl"
        print(f"tensorboard is not installed (pip install tensorboard): curves are in {path}", flush=True)
        sink = JsonLines(path)
    try:
        yield sink
    finally:
        sink.close()


_KINDS = (ConfigurationError, BackendError, DamagedFileError)


def complaint(error: ShardkitError) -> str:
    """The message of an error about arguments, data or the machine, from wherever it was raised; "" for all others."""
    if not isinstance(error, RankFailedError):
        return str(error) if isinstance(error, _KINDS) else ""
    if error.remote_type not in {kind.__name__ for kind in _KINDS}:
        return ""
    # the last of them: a worker's error stands in that of the rank which it loads images for
    _, _, message = error.remote_traceback.rpartition(
        f"{ConfigurationError.__module__}.{error.remote_type}: "
    )
    return message.strip()


# ------------------------------------------------------------ FSDP, by either interface
WHOLE = "_consolidated.pth"
Units = Sequence[type[nn.Module]]


class Interface(NamedTuple):
    """One of the two: class of wrappers, their arguments, and what makes a module compute activations again."""

    wrapper: type[nn.Module]
    arguments: Kwargs
    checkpointed: Callable[[nn.Module], nn.Module]


def interface(options: Namespace) -> Interface:
    """The one that ``--strategy`` names."""
    dtype = None if options.compute_dtype == "float32" else DTYPES[options.compute_dtype]
    reshard = not options.no_reshard_after_forward
    if options.strategy == "xla_fsdp":
        arguments: Kwargs = {
            "reshard_after_forward": reshard,
            "flatten_parameters": options.flatten_parameters,
            "compute_dtype": dtype,
        }
        return Interface(XlaFullyShardedDataParallel, arguments, checkpoint_module)
    arguments = {
        "reshard": shardkit.ReshardPolicy(after_forward=reshard),
        "flatten": options.flatten_parameters,
        "precision": shardkit.PrecisionPolicy(compute=dtype),
    }
    return Interface(shardkit.FSDP, arguments, checkpoint_wrapper)


def fully_sharded(
    build: Callable[[], nn.Module], units: Units, options: Namespace, device: torch.device
) -> nn.Module:
    """The network with the units that the options ask for, in an outermost unit.

    Args:
        build: makes the network; it calls ``shardkit.wrap`` on the parts that ``--use_nested_fsdp`` is about.
        units: types of the parts that ``--auto_wrap_policy type_based`` and ``--use_gradient_checkpointing`` are about.
        options: the command line.
        device: where it computes.
    """
    wrapper, arguments, checkpointed = interface(options)

    def unit(module: nn.Module, **arguments: Tree) -> nn.Module:
        if options.use_gradient_checkpointing:
            module = checkpointed(module)
        return wrapper(module.to(device), **arguments)

    if options.use_nested_fsdp:  # part by part: no rank ever holds the whole model
        with shardkit.enable_wrap(wrapper_cls=unit, **arguments):
            return wrapper(build().to(device), **arguments)
    network = build()
    if options.use_gradient_checkpointing:
        checkpoint_units(network, units, checkpointed)
    policies = {
        "size_based": functools.partial(
            size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        ),
        "type_based": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(units)),
    }
    network.to(device)
    if options.auto_wrap_policy in policies:
        policy = policies[options.auto_wrap_policy]
        with shardkit.enable_wrap(wrapper_cls=wrapper, auto_wrap_policy=policy, **arguments):
            network = shardkit.auto_wrap(network)
    return network if isinstance(network, wrapper) else wrapper(network, **arguments)


def checkpoint_units(
    network: nn.Module, units: Units, checkpointed: Callable[[nn.Module], nn.Module] = checkpoint_wrapper
) -> None:
    """Lets the network's units compute their activations again in backward."""
    for module in list(network.modules()):
        if isinstance(module, tuple(units)):
            checkpointed(module)


# ------------------------------------------------------------ checkpoints
def shards_of(model: nn.Module) -> StateDict | None:
    """What a rank saves of such a model, with what is needed to put it together; None for other models."""
    if isinstance(model, XlaFullyShardedDataParallel):
        return {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    if isinstance(model, shardkit.FSDP):
        return {"model": model.local_state_dict(), "shard_metadata": model.local_metadata_dict()}
    return None


def path_of(prefix: str, rank: int, ranks: int) -> str:
    """Where a rank's checkpoint is."""
    return f"{prefix}_rank-{rank}-of-{ranks}.pth"


def put_together(prefix: str, ranks: int, strategy: str = "fsdp") -> None:
    """Writes the whole model beside the shards that the ranks have saved."""
    if strategy == "xla_fsdp":
        consolidate_sharded_model_checkpoints(prefix, f"_rank-*-of-{ranks}.pth")
        return
    saved = [shardkit.load(path_of(prefix, rank, ranks)) for rank in range(ranks)]
    full = consolidate([s["model"] for s in saved], [s["shard_metadata"] for s in saved])
    shardkit.save({"model": full}, prefix + WHOLE)


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
        Progress(title if rank == 0 else "", total) as progress,
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
        cast("Dataset[list[torch.Tensor]]", images),
        batch,
        seed=options.seed,
        drop_last=options.drop_last,
        num_replicas=options.ranks,
        rank=rank,
        **worker_options(workers(task, options)),
    )


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
        self, batches: ResumableLoader[list[torch.Tensor]], curves: Sink | None, progress: Progress
    ) -> Outcome:
        """Trains them all, with a test now and then, and one at the end."""
        schedule = make_schedule(self.options, self.optimizer, len(batches))
        losses: list[float] = []
        tests: dict[int, float] = {}
        seconds = 0.0
        for epoch in range(1, self.options.num_epochs + 1):
            began = time.perf_counter()
            found = train_epoch(
                self.model,
                self.optimizer,
                schedule,
                batches,
                self.backend,
                F.cross_entropy,
                self._before_step,
                functools.partial(self._after_step, progress),
            )
            took = time.perf_counter() - began
            losses, seconds = losses + found, seconds + took
            progress.show_loss(found[-1])
            values = {"Loss/train": sum(found) / len(found), "images_per_s": len(self.data.train) / took}
            if self._is_tested_after(epoch):
                tests[epoch] = values["Accuracy/test"] = self._test()
            if curves is not None:
                rate = float(schedule.get_last_lr()[0])
                curves.write({"step": epoch, "time": time.time(), **values, "lr": rate})
        return Outcome(losses, seconds, tests[self.options.num_epochs], tests, len(self.data.train))

    def _is_tested_after(self, epoch: int) -> bool:
        every = self.options.eval_interval
        return epoch == self.options.num_epochs or (bool(every) and epoch % every == 0)

    def _before_step(self, _: int) -> None:
        if self.options.strategy == "native":
            average_gradients(self.optimizer, self.backend)

    def _after_step(self, progress: Progress, step: int, loss: torch.Tensor) -> None:
        progress.advance()
        if self.options.log_steps and (step + 1) % self.options.log_steps == 0:
            progress.show_loss(loss.item(), now=True)  # on all ranks: reading runs what is recorded

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


# ------------------------------------------------------------ PyTorch/XLA's guides
def guide_defaults(strategy: str) -> Kwargs:
    """Defaults of :func:`make_parser` for the scripts of PyTorch/XLA's guides.

    Args:
        strategy: "native" for scripts that reduce gradients, "xla_fsdp" for those that shard.
    """
    backend = "xla" if get_backend("xla").is_available() else "gloo"
    return {"backend": backend, "strategy": strategy, "batch_size": 128, "num_epochs": 18, "eval_interval": 1}
