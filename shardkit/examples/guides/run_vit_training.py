"""Vision transformers of up to 10 billion parameters and more, with torch_xla's interface of FSDP.

python shardkit/examples/guides/run_vit_training.py --data_dir FOLDER
python shardkit/examples/guides/run_vit_training.py --fake_data --image_size 32 --patch_size 8 --embed_dim 64 \
    --num_heads 4 --num_blocks 2 --batch_size 32 --num_epochs 2 --warmup_steps 4

Flags, defaults and names of checkpoints are those of github.com/ronghanghu/vit_10b_fsdp_example; ``--backend`` and
``--ranks`` are shardkit's. ``--batch_size`` is of all ranks together.
"""

from __future__ import annotations

import argparse
import functools
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
from torch.utils.data import DataLoader, Dataset

import shardkit
from shardkit.backend import Backend, ReduceOp, get_backend
from shardkit.data import ResumableLoader
from shardkit.errors import ConfigurationError, ShardkitError
from shardkit.examples import images
from shardkit.examples.complaints import complaint
from shardkit.examples.data import image_folders
from shardkit.examples.data.sets import Data, Sample, load_everywhere
from shardkit.examples.flags import BACKENDS, check_folder
from shardkit.examples.guides import defaults, vit_parts
from shardkit.examples.loop import average_gradients
from shardkit.examples.training import count_found, held_out_batches, worker_options
from shardkit.xla.fsdp import XlaFullyShardedDataParallel

SEED = 42
FOLDER = "/datasets/imagenet-1k"


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description="Trains a vision transformer; the defaults are 10 billion parameters."
    )
    add = parser.add_argument
    common = defaults.defaults("xla_fsdp")
    add("--backend", choices=BACKENDS, default=common["backend"], help="default: %(default)s")
    add("--ranks", type=int, default=defaults.ranks(), help="default: %(default)s")
    add(
        "--data_dir",
        default=FOLDER,
        help="with train/CLASS/*.JPEG and val/CLASS/*.JPEG (default: %(default)s)",
    )
    add("--fake_data", action="store_true", help="random images")
    add("--ckpt_dir", default=str(images.default_folder("vit_fsdp")), help="default: %(default)s")
    add("--resume_epoch", type=int, default=0, help="go on after this epoch's checkpoint")
    numbers: dict[str, int | float] = {
        "num_workers": 4, "ckpt_epoch_interval": 10, "test_epoch_interval": 10, "log_step_interval": 20,
        "image_size": 224, "patch_size": 14, "embed_dim": 5120, "num_heads": 32, "num_blocks": 32, "mlp_ratio": 4.0,
        "pos_dropout": 0.0, "att_dropout": 0.0, "mlp_dropout": 0.0, "num_classes": 1000,
        "batch_size": 1024, "num_epochs": 300, "lr": 1e-3, "weight_decay": 0.1, "clip_grad_norm": 1.0,
        "warmup_steps": 10000,
    }  # fmt: skip
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
    check_folder(parser, "ckpt_dir", options.ckpt_dir)
    return options


def load_data(options: Namespace) -> Data:
    """What is trained and tested on.

    Raises:
        ConfigurationError: there are no such folders; they have more classes than the model.
    """
    if options.fake_data:
        return images.fake(options.image_size, 3, options.num_classes, options.batch_size)
    data = image_folders.load(options.data_dir, options.image_size)
    if data.classes > options.num_classes:
        raise ConfigurationError(
            f"{options.data_dir} has {data.classes} classes, the model {options.num_classes}; pass --num_classes "
            f"{data.classes}"
        )
    return data


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
        self.model.train()
        began, since = time.perf_counter(), 0
        for step, (inputs, labels) in enumerate(self.loader, start=1):
            loss = self._step(inputs, labels)
            if step == 1 or step % self.options.log_step_interval == 0:
                self.backend.group().all_reduce(loss, op=ReduceOp.AVG, label="mean loss").wait()
                value = loss.item()
                rate = self.schedule.get_last_lr()[0]
                seconds = (time.perf_counter() - began) / (step - since)
                began, since = time.perf_counter(), step
                self.losses.append(value)
                self._say(
                    f"epoch {number} step {step}, lr: {rate:.6f}, loss: {value:.4f}, sec/iter: {seconds:.4f}"
                )

    def _step(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        device, limit = self.backend.device(), self.options.clip_grad_norm
        loss = F.cross_entropy(self.model(inputs.to(device)), labels.to(device))
        loss.backward()
        if isinstance(self.model, XlaFullyShardedDataParallel):
            if limit > 0:
                self.model.clip_grad_norm_(limit)
        else:
            average_gradients(self.optimizer, self.backend)
            if limit > 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.backend.mark_step()
        return loss.detach()

    def test(self, number: int) -> float:
        """Share of the test images that all ranks together find."""
        found = count_found(self.model, self.held_out, self.backend)
        self.backend.group().all_reduce(found, label="test images found").wait()
        accuracy = found.item() / len(self.data.held_out)
        self._say(f"accuracy on val: {accuracy:.4f} (epoch {number})")
        return accuracy

    def checkpoint(self, number: int) -> Path:
        """Where this rank's is."""
        owner = 0 if self.options.run_without_fsdp else self.rank
        return vit_parts.path_of(self.options.ckpt_dir, number, owner)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def begin(rank: int, options: Namespace) -> Training:
    """Loads data, builds the model, and goes on from a checkpoint if that is asked for."""
    backend = get_backend(options.backend)
    group = backend.group()
    data = load_everywhere(functools.partial(load_data, options), group)
    if len(data.train) < options.batch_size:
        raise ConfigurationError(
            f"a batch has {options.batch_size} images, there are {len(data.train)}; choose a smaller --batch_size"
        )
    loader = ResumableLoader(
        cast("Dataset[list[torch.Tensor]]", data.train), options.batch_size, seed=SEED, drop_last=True,
        num_replicas=options.ranks, rank=rank, **worker_options(options.num_workers),
    )  # fmt: skip
    held_out = held_out_batches(
        data.held_out, options.batch_size // options.ranks, rank, options.ranks, options.num_workers
    )
    torch.manual_seed(SEED)
    model = vit_parts.build(options, backend.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    steps = options.num_epochs * len(loader)
    # A function has no state: whoever goes on with more epochs has the schedule of these.
    schedule = LambdaLR(
        optimizer, functools.partial(vit_parts.warmup_and_cosine, options.warmup_steps, steps)
    )
    training = Training(options, backend, rank, data, loader, held_out, model, optimizer, schedule)
    if options.resume_epoch:
        vit_parts.load(training.checkpoint(options.resume_epoch), model, optimizer, schedule, group)
    return training


def train(rank: int, options: Namespace) -> Outcome:
    """Runs on every rank."""
    training = begin(rank, options)
    accuracy = 0.0
    for number in range(options.resume_epoch + 1, options.num_epochs + 1):
        training.epoch(number)
        is_last = number == options.num_epochs
        if is_last or number % options.ckpt_epoch_interval == 0:
            path = training.checkpoint(number)
            vit_parts.save(path, training.model, training.optimizer, training.schedule, rank)
        if is_last or number % options.test_epoch_interval == 0:
            accuracy = training.test(number)
    return Outcome(training.losses, accuracy)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(argv)
    try:
        if not options.fake_data:
            image_folders.classes_in(options.data_dir)
        shardkit.launch(train, options.ranks, backend=options.backend, args=(options,))
    except ShardkitError as error:
        if not (said := complaint(error)):
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
