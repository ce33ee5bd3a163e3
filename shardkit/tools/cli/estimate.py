"""says what a training would need of each rank, without running it

shardkit estimate train.py:experiment --ranks 8,64 --strategy all
shardkit estimate --hf config.json --ranks 8,64,1024 --batch 1,4 --dtype bfloat16 --device-memory 80GiB
shardkit estimate --hf config.json --ranks 8,64,1024 --dtype bfloat16 --device h100 --compiled --plot estimate.svg

The target is a function that returns a shardkit.tools.verify.Experiment, or with --hf the configuration of a language
model. The real wrapping and real steps run on tensors without values.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING

from shardkit.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from shardkit.tools.estimate import Subject

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", nargs="?", help="script.py:name or package.module:name")
    add("--hf", metavar="CONFIG", help="config.json of a language model of transformers, instead")
    add("--ranks", type=_integers, default=[8], help="world sizes, as 8,64,1024 (default: 8)")
    add(
        "--strategy",
        default="fsdp",
        help="fsdp, fsdp-kept, fsdp-masters, fully_shard, sharded_ddp; several, or all (default: fsdp)",
    )
    add("--batch", type=_integers, default=[1], help="samples on each rank, as 1,4 (default: 1)")
    add("--lora", type=_rank, metavar="rank=16", help="weights are frozen, and adapters of them trained")
    add(
        "--frozen",
        choices=("reshard", "keep", "host", "packed"),
        default="reshard",
        help="with --lora, what becomes of frozen weights (see ReshardPolicy)",
    )
    add("--optimizer", help="of torch.optim (default: the target's; with --hf AdamW)")
    add("--dtype", help="of computation, as bfloat16 (default: the parameters')")
    add("--reduce-dtype", help="in which gradients travel (default: their own)")
    add("--sequence", type=int, default=2048, help="with --hf, tokens of a sample (default: 2048)")
    add(
        "--checkpointing",
        nargs="?",
        const="full",
        choices=("full", "selective"),
        default=False,
        help="with --hf, blocks are computed again in backward (selective: but attention and every other product)",
    )
    add("--device-memory", type=_bytes, metavar="80GiB", help="says which fit, and how many ranks it takes")
    add("--device", metavar="NAME|FILE", help="how long a step takes: h100, a100, b200, tpu-v5p, or JSON")
    add("--compiled", action="store_true", help="with --device: by torch.compile")
    add("--on-cpu", action="store_true", help="ranks train on CPUs, over gloo")
    add(
        "--plot",
        metavar="FILE",
        help="a picture: memory over a step, bytes sent, and times (.svg, .png, .pdf)",
    )
    add("--json", action="store_true", help="prints data, not a table")


def run(options: argparse.Namespace) -> int:
    """Prints estimates."""
    from shardkit.tools import estimate as estimating
    from shardkit.tools.estimate import report

    if (options.target is None) == (options.hf is None):
        raise ConfigurationError("name a target, as train.py:experiment, or --hf CONFIG, and not both")
    if options.compiled and options.device is None:
        raise ConfigurationError("--compiled is about times; name a --device")
    dtype, reduce = _dtype("--dtype", options.dtype), _dtype("--reduce-dtype", options.reduce_dtype)
    device = None if options.device is None else estimating.device_named(options.device)
    if options.hf is None:
        subject = estimating.from_experiment(options.target, options.optimizer, dtype, reduce)
    else:
        subject = estimating.from_hugging_face(
            options.hf, options.optimizer, dtype, options.sequence, options.checkpointing, reduce
        )
    subject = _adapted(subject, options)
    strategies = [s.strip() for s in options.strategy.split(",")]
    if options.strategy == "all":
        strategies = list(estimating.STRATEGIES)
    how = {"points": 200 if options.plot else 0, "on_host": options.on_cpu, "compiled": options.compiled}
    found = [
        estimating.estimate(subject, s, w, b, device=device, **how)
        for s in strategies
        for b in options.batch
        for w in options.ranks
    ]
    limit = options.device_memory
    memory = device.memory if limit is None and device is not None else limit
    if options.json:
        print(json.dumps(report.as_data(subject, found), indent=1))
    else:
        print(report.as_text(subject, found, memory))
        if device is not None:
            print("\n" + report.times_as_text(subject, found, device))
        if options.lora is not None:
            print("\n".join(map(report.device_in_words, found)))
    if limit is not None and not options.json:
        for s in strategies:
            for b in options.batch:
                print(report.in_words(s, b, limit, estimating.smallest_ranks(subject, s, b, limit)))
    if options.plot:
        report.plot(subject, found, options.plot, memory)
    return 0


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    import torch

    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"{option} {name}: torch has no such dtype")
    return dtype


def _adapted(subject: Subject, options: argparse.Namespace) -> Subject:
    from shardkit.tools.estimate import with_adapters

    if options.lora is not None:
        return with_adapters(subject, options.lora, options.frozen)
    if options.frozen != "reshard":
        raise ConfigurationError("--frozen is about the weights that --lora freezes; name both")
    return subject


def _rank(text: str) -> int:
    name, _, number = text.rpartition("=")
    if name not in ("", "rank") or not number.isdecimal() or number == "0":
        raise argparse.ArgumentTypeError(f"{text}: write it as rank=16")
    return int(number)


def _integers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers from 1")
    return numbers


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: write it as 80GiB or 24GB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])
