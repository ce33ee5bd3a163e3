"""trains a few steps in one process, with shardkit and with fairscale, and says where they part

shardkit verify train.py:experiment
shardkit verify package.module:experiment --strategy sharded_ddp --ranks 3 --steps 5
shardkit verify train.py:experiment --option mixed_precision=True --option compute_dtype=bfloat16
shardkit verify train.py:experiment --strategy fully_shard --ranks 3 --bits

The target is a function that returns a shardkit.tools.verify.Experiment. Status: 0 where shardkit agrees with one
process, 1 where it doesn't, 2 where there is nothing to compare.
"""

from __future__ import annotations

import argparse
import ast

from shardkit.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="script.py:name or package.module:name")
    add("--strategy", default="fsdp", choices=("oss", "sharded_ddp", "fsdp", "fully_shard"))
    add("--ranks", type=int, default=2, help="processes on this machine's CPU (default: 2)")
    add("--steps", type=int, default=3, help="steps of training (default: 3)")
    add("--bits", action="store_true", help="with a fixed order of sums, to the bit (docs/SAME_BITS.md)")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the wrapper, under fairscale's name, or of fully_shard; Python's values, or dtypes",
    )


def run(options: argparse.Namespace) -> int:
    from shardkit.tools.verify import verify

    report = verify(
        options.target,
        strategy=options.strategy,
        world_size=options.ranks,
        steps=options.steps,
        options=dict(_option(text) for text in options.option),
        bits=options.bits,
    )
    print(report)
    return 0 if report.agrees else 1


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigurationError(f"--option {text}: it has to be NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        pass
    import torch

    dtype = getattr(torch, value.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return name, dtype
    raise ConfigurationError(f"--option {text}: {value!r} is neither a Python value nor a dtype")
