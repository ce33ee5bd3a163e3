"""Flags of the training scripts, in the manner of torch_xla's examples."""

from __future__ import annotations

import argparse
import math
import os
from argparse import Namespace
from collections.abc import Sequence

import torch

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
        name: of the module in ``shardkit.examples``.
        description: for --help.
        lr, momentum: defaults; without one there is no --momentum.
        **defaults: of other flags.
    """
    parser = argparse.ArgumentParser(prog=f"python -m shardkit.examples.{name}", description=description)
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="gloo", help="default: %(default)s")
    add("--ranks", "--num_cores", dest="ranks", type=int, default=int(os.environ.get("CPU_NUM_DEVICES", "2")),
        help="ranks that train together (default: %(default)s)")  # fmt: skip
    add("--strategy", choices=STRATEGIES, default="fsdp",
        help="native: gradients are all-reduced before the step; ddp: torch's; sharded_ddp: OSS and ShardedDDP "
        "(ZeRO-2); fsdp: ZeRO-3 with --use_nested_fsdp or --auto_wrap_policy; xla_fsdp: the same with torch_xla's "
        "interface and checkpoints (default: %(default)s)")  # fmt: skip
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
    add("--drop_last", action="store_true",
        help="leave out what doesn't fill an epoch's last batch; on XLA its shape would be compiled, too")  # fmt: skip
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
