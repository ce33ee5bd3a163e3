"""Vision transformers of up to 10 billion parameters and more, with torch_xla's interface of FSDP.

python examples/run_vit_training.py --data_dir FOLDER
python examples/run_vit_training.py --fake_data --image_size 32 --patch_size 8 --embed_dim 64 \
    --num_heads 4 --num_blocks 2 --batch_size 32 --num_epochs 2 --warmup_steps 4

Flags, defaults and names of checkpoints are those of github.com/ronghanghu/vit_10b_fsdp_example; ``--backend`` and
``--ranks`` are shardkit's. ``--batch_size`` is of all ranks together.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

import images
import shardkit
import training
from digits import average_gradients, train_epoch
from images import Data, Sample
from shardkit.backend import Backend, Group, ReduceOp, get_backend
from shardkit.checks import all_gather_facts, check_one_save
from shardkit.errors import ConfigurationError, ShardkitError
from shardkit.training.data import ResumableLoader
from shardkit.types import Kwargs, StateDict, Tree
from shardkit.xla.fsdp import XlaFullyShardedDataParallel, checkpoint_module
from vit import Config, VisionTransformer

SEED = 42
FOLDER = "/datasets/imagenet-1k"


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description="Trains a vision transformer; the defaults are 10 billion parameters."
    )
    add = parser.add_argument
    backend = training.guide_defaults("xla_fsdp")["backend"]
    add("--backend", choices=training.BACKENDS, default=backend, help="default: %(default)s")
    add("--ranks", type=int, default=int(os.environ.get("CPU_NUM_DEVICES", "2")), help="default: %(default)s")
    add(
        "--data_dir",
        default=FOLDER,
        help="with train/CLASS/*.JPEG and val/CLASS/*.JPEG (default: %(default)s)",
    )
    add("--fake_data", action="store_true", help="random images")
    add("--ckpt_dir", default=str(images.default_folder("vit_fsdp")), help="default: %(default)s")
    add("--resume_epoch", type=int, default=0, help="go on after this epoch's checkpoint")
    numbers: dict[str, int | float] = {
        "num_workers": 4,
        "ckpt_epoch_interval": 10,
        "test_epoch_interval": 10,
        "log_step_interval": 20,
        "image_size": 224,
        "patch_size": 14,
        "embed_dim": 5120,
        "num_heads": 32,
        "num_blocks": 32,
        "mlp_ratio": 4.0,
        "pos_dropout": 0.0,
        "att_dropout": 0.0,
        "mlp_dropout": 0.0,
        "num_classes": 1000,
        "batch_size": 1024,
        "num_epochs": 300,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "clip_grad_norm": 1.0,
        "warmup_steps": 10000,
    }
    for name, value in numbers.items():
        add(f"--{name}", type=type(value), default=value, help="default: %(default)s")
    for name in ("grad_ckpt", "reshard_after_forward"):
        add(f"--{name}", action="store_true", default=True, help="the default")
        add(f"--no_{name}", dest=name, action="store_false")
    for name in ("flatten_parameters", "run_without_fsdp", "shard_on_cpu"):
        add(f"--{name}", action="store_true")
    return parser


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """The command line; ends the process if numbers make no sense."""
    parser = make_parser()
    options = parser.parse_args(argv)
    positive = (
        "ranks",
        "batch_size",
        "num_epochs",
        "ckpt_epoch_interval",
        "test_epoch_interval",
        "log_step_interval",
        "image_size",
        "patch_size",
        "embed_dim",
        "num_heads",
        "num_blocks",
        "num_classes",
    )
    for name in positive:
        if getattr(options, name) < 1:
            parser.error(f"--{name} has to be at least 1")
    if options.num_workers < 0 or options.warmup_steps < 0:
        parser.error("--num_workers and --warmup_steps can't be below 0")
    if options.batch_size % options.ranks:
        parser.error(
            f"--batch_size {options.batch_size} is of all ranks together; {options.ranks} ranks don't divide it"
        )
    if not 0 <= options.resume_epoch < options.num_epochs:
        parser.error(
            f"--resume_epoch is from 0 to {options.num_epochs - 1}, for --num_epochs {options.num_epochs}"
        )
    options.data_dir, options.ckpt_dir = map(os.path.abspath, (options.data_dir, options.ckpt_dir))
    if options.image_size % options.patch_size or options.embed_dim % options.num_heads:
        parser.error("--patch_size has to divide --image_size, and --num_heads --embed_dim")
    training.check_folder(parser, "ckpt_dir", options.ckpt_dir)
    return options


def load_data(options: Namespace) -> Data:
    """What is trained and tested on.

    Raises:
        ConfigurationError: there are no such folders; they have more classes than the model.
    """
    if options.fake_data:
        return images.fake(options.image_size, 3, options.num_classes, options.batch_size)
    data = images.load_folders(options.data_dir, options.image_size)
    if data.classes > options.num_classes:
        raise ConfigurationError(
            f"{options.data_dir} has {data.classes} classes, the model {options.num_classes}; pass --num_classes "
            f"{data.classes}"
        )
    return data


def config_of(options: Namespace) -> Config:
    """Sizes of the model."""
    named = {name: getattr(options, name) for name in Config._fields if name != "classes"}
    return Config(**named, classes=options.num_classes)


def build(options: Namespace, device: torch.device) -> nn.Module:
    """The model: each block is made, told to compute its activations again, and sharded before the next one is made."""

    def unit(module: nn.Module, **arguments: Tree) -> nn.Module:
        if options.grad_ckpt:
            module = checkpoint_module(module)
        if options.run_without_fsdp:
            return module
        return sharded(module, **arguments)

    def sharded(module: nn.Module, **arguments: Tree) -> nn.Module:
        # FSDP itself brings shards to the device
        return XlaFullyShardedDataParallel(module if options.shard_on_cpu else module.to(device), **arguments)

    arguments: Kwargs = {
        "reshard_after_forward": options.reshard_after_forward,
        "flatten_parameters": options.flatten_parameters,
    }
    with shardkit.enable_wrap(wrapper_cls=unit, **arguments):
        model = VisionTransformer(config_of(options))
    return model.to(device) if options.run_without_fsdp else sharded(model, **arguments)


def warmup_and_cosine(warmup: int, steps: int, step: int) -> float:
    """The factor of a step: grows from 0 to 1, then falls to 0 as a cosine does.

    Args:
        warmup: steps in which it grows.
        steps: in all.
        step: so many were done.
    """
    if step < warmup:
        return step / warmup
    where = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, where)))


def path_of(folder: str, epoch: int, rank: int) -> Path:
    """Where a rank's checkpoint is; without FSDP all have rank 0's."""
    return Path(folder) / f"epoch_{epoch}_rank_{rank}.ckpt"


def save(path: Path, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, rank: int) -> None:
    """FSDP: each rank what it has. Else rank 0 the whole (on all ranks: reading tensors runs what is recorded)."""
    checkpoint: StateDict = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
    }
    if isinstance(model, XlaFullyShardedDataParallel):
        checkpoint["shard_metadata"] = model.get_shard_metadata()
    on_host = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), checkpoint)
    if "shard_metadata" in checkpoint or rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shardkit.save(on_host, path)


def resume(path: Path, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, group: Group) -> None:
    """Goes on from a checkpoint (collective).

    Raises:
        ConfigurationError: on all ranks, if one of them doesn't find its file, or finds one of another kind of run; if
            files are of different saves.
    """
    saved: StateDict = {}
    try:
        saved = shardkit.load(path)
        problem = _misfit(saved, model, group)
    except (ShardkitError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    metadata = {} if problem else saved.get("shard_metadata", {})
    stamp = {k: metadata[k] for k in ("run_id", "backwards") if k in metadata}
    everybody = all_gather_facts(group, (str(path), problem, stamp), label="checkpoint to go on from")
    for rank, (_, found, _) in enumerate(everybody):
        if found:
            raise ConfigurationError(f"rank {rank} can't go on from its checkpoint {path.parent}: {found}")
    check_one_save([name for name, _, _ in everybody], [facts for _, _, facts in everybody])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["lr_scheduler"])


def _misfit(saved: StateDict, model: nn.Module, group: Group) -> str:
    """What is wrong with it, or nothing."""
    metadata = saved.get("shard_metadata")
    is_sharded = isinstance(model, XlaFullyShardedDataParallel)
    if (metadata is not None) != is_sharded:
        return f"it was saved {'with' if metadata else 'without'} FSDP; choose --run_without_fsdp as then"
    if metadata is None or (metadata["rank"], metadata["world_size"]) == (group.rank, group.world_size):
        return ""
    return (
        f"it is of rank {metadata['rank']} of {metadata['world_size']}, this is rank {group.rank} of "
        f"{group.world_size}; shards are for as many ranks as have saved them "
        "(shardkit.xla.fsdp.consolidate_sharded_ckpts puts them together)"
    )


class Outcome(NamedTuple):
    """Attributes: losses that were printed; share of the test images that all ranks have found, at the end."""

    losses: list[float]
    accuracy: float


@dataclass
class Training:
    """One rank's."""

    options: Namespace
    backend: Backend
    rank: int
    data: Data
    loader: ResumableLoader[list[torch.Tensor]]
    held_out: DataLoader[Sample]
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    losses: list[float] = field(default_factory=list)

    def epoch(self, number: int) -> None:
        """Trains one; the loader draws its order by the number."""
        self.loader.set_epoch(number)
        began, since = time.perf_counter(), 0

        def report(index: int, loss: torch.Tensor) -> None:
            nonlocal began, since
            step = index + 1
            if step == 1 or step % self.options.log_step_interval == 0:
                self.backend.group().all_reduce(loss, op=ReduceOp.AVG, label="mean loss").wait()
                self.losses.append(loss.item())
                seconds = (time.perf_counter() - began) / (step - since)
                began, since = time.perf_counter(), step
                self._say(
                    f"epoch {number} step {step}, lr: {self.schedule.get_last_lr()[0]:.6f}, "
                    f"loss: {self.losses[-1]:.4f}, sec/iter: {seconds:.4f}"
                )

        train_epoch(
            self.model,
            self.optimizer,
            self.schedule,
            self.loader,
            self.backend,
            F.cross_entropy,
            self._before_step,
            report,
        )

    def _before_step(self, _: int) -> None:
        limit = self.options.clip_grad_norm
        if isinstance(self.model, XlaFullyShardedDataParallel):
            if limit > 0:
                self.model.clip_grad_norm_(limit)
        else:
            average_gradients(self.optimizer, self.backend)
            if limit > 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def test(self, number: int) -> float:
        """Share of the test images that all ranks together find."""
        found = training.count_found(self.model, self.held_out, self.backend)
        self.backend.group().all_reduce(found, label="test images found").wait()
        accuracy = found.item() / len(self.data.held_out)
        self._say(f"accuracy on val: {accuracy:.4f} (epoch {number})")
        return accuracy

    def checkpoint(self, number: int) -> Path:
        """Where this rank's is."""
        owner = 0 if self.options.run_without_fsdp else self.rank
        return path_of(self.options.ckpt_dir, number, owner)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def begin(rank: int, options: Namespace) -> Training:
    """Loads data, builds the model, and goes on from a checkpoint if that is asked for."""
    backend = get_backend(options.backend)
    group = backend.group()
    data = images.load_everywhere(functools.partial(load_data, options), group)
    if len(data.train) < options.batch_size:
        raise ConfigurationError(
            f"a batch has {options.batch_size} images, there are {len(data.train)}; choose a smaller --batch_size"
        )
    loader = ResumableLoader(
        cast("Dataset[list[torch.Tensor]]", data.train),
        options.batch_size,
        seed=SEED,
        drop_last=True,
        num_replicas=options.ranks,
        rank=rank,
        **training.worker_options(options.num_workers),
    )
    held_out = training.held_out_batches(
        data.held_out, options.batch_size // options.ranks, rank, options.ranks, options.num_workers
    )
    torch.manual_seed(SEED)
    model = build(options, backend.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    steps = options.num_epochs * len(loader)
    # A function has no state: whoever goes on with more epochs has the schedule of these.
    schedule = LambdaLR(optimizer, functools.partial(warmup_and_cosine, options.warmup_steps, steps))
    run = Training(options, backend, rank, data, loader, held_out, model, optimizer, schedule)
    if options.resume_epoch:
        resume(run.checkpoint(options.resume_epoch), model, optimizer, schedule, group)
    return run


def train(rank: int, options: Namespace) -> Outcome:
    """Runs on every rank."""
    run = begin(rank, options)
    accuracy = 0.0
    for number in range(options.resume_epoch + 1, options.num_epochs + 1):
        run.epoch(number)
        is_last = number == options.num_epochs
        if is_last or number % options.ckpt_epoch_interval == 0:
            path = run.checkpoint(number)
            save(path, run.model, run.optimizer, run.schedule, rank)
        if is_last or number % options.test_epoch_interval == 0:
            accuracy = run.test(number)
    return Outcome(run.losses, accuracy)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(argv)
    try:
        if not options.fake_data:
            images.classes_in(options.data_dir)
        shardkit.launch(train, options.ranks, backend=options.backend, args=(options,))
    except ShardkitError as error:
        if not (said := training.complaint(error)):
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
