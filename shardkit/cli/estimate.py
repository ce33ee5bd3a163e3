"""says what a training would need of each rank, without running it

shardkit estimate train.py:experiment --ranks 8,64 --strategy all
shardkit estimate --hf config.json --ranks 8,64,1024 --batch 1,4 --dtype bfloat16 --device-memory 80GiB

The target is a function that returns a shardkit.testing.Experiment, or with --hf the configuration of a language model.
The real wrapping and real steps run on tensors without values.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from shardkit.errors import ConfigurationError

_NUMBERS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("target", nargs="?", help="script.py:name or package.module:name")
    parser.add_argument(
        "--hf", metavar="CONFIG", help="config.json of a language model of transformers, instead"
    )
    parser.add_argument("--ranks", type=_integers, default=[8], help="world sizes, as 8,64,1024 (default: 8)")
    parser.add_argument("--strategy", default="fsdp", help='fsdp, fully_shard, ... or "all" (default: fsdp)')
    parser.add_argument(
        "--batch", type=_integers, default=[1], help="samples on each rank, as 1,4 (default: 1)"
    )
    parser.add_argument("--optimizer", help="of torch.optim (default: the target's; with --hf AdamW)")
    parser.add_argument("--dtype", help="of computation, as bfloat16 (default: the parameters')")
    parser.add_argument(
        "--sequence", type=int, default=2048, help="with --hf, tokens of a sample (default: 2048)"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="with --hf, blocks are computed again in backward"
    )
    parser.add_argument(
        "--device-memory", type=_bytes, metavar="80GiB", help="says which fit, and how many ranks it takes"
    )
    parser.add_argument("--on-cpu", action="store_true", help="ranks train on CPUs, over gloo")
    parser.add_argument(
        "--plot", metavar="FILE", help="a picture: memory over a step, and bytes sent (.svg, .png, .pdf)"
    )
    parser.add_argument("--json", action="store_true", help="prints data, not a table")


def run(options: argparse.Namespace) -> int:
    """Prints estimates; status 2 where there is nothing to estimate."""
    try:
        _run(options)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    import torch

    from shardkit.estimate import STRATEGIES, estimate, from_experiment, from_hugging_face, smallest_ranks
    from shardkit.estimate.plots import plot
    from shardkit.estimate.report import as_data, as_text, in_words

    if (options.target is None) == (options.hf is None):
        raise ConfigurationError("name a target, as train.py:experiment, or --hf CONFIG, and not both")
    dtype = None if options.dtype is None else getattr(torch, options.dtype, None)
    if options.dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"--dtype {options.dtype}: torch has no such dtype")
    if options.hf is None:
        subject = from_experiment(options.target, options.optimizer, dtype)
    else:
        subject = from_hugging_face(
            options.hf, options.optimizer, dtype, options.sequence, options.checkpointing
        )
    strategies = (
        list(STRATEGIES) if options.strategy == "all" else [s.strip() for s in options.strategy.split(",")]
    )
    if options.strategy in STRATEGIES:
        strategies = [options.strategy]
    found = [
        estimate(subject, s, w, b, points=200 if options.plot else 0, on_host=options.on_cpu)
        for s in strategies
        for b in options.batch
        for w in options.ranks
    ]
    limit = options.device_memory
    print(json.dumps(as_data(subject, found), indent=1) if options.json else as_text(subject, found, limit))
    if limit is not None and not options.json:
        for s in strategies:
            for b in options.batch:
                print(in_words(s, b, limit, smallest_ranks(subject, s, b, limit)))
    if options.plot:
        plot(found, options.plot, subject.name)


def _integers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers from 1")
    return numbers


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _NUMBERS:
        raise argparse.ArgumentTypeError(f"{text}: write it as 80GiB or 24GB")
    return int(float(match[1]) * _NUMBERS[match[2]])
