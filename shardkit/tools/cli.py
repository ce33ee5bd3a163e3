"""The command line: ``shardkit COMMAND ...``, or ``python -m shardkit COMMAND ...``.

A command has a text for its help, a function that adds its arguments, and one that runs it and returns the exit status.
What it needs, torch too, it imports there: help and a mistyped word are answered at once. An error that it raises is
printed, with status 2. What a program raises that a command runs in this process passes through.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardkit.errors import ConfigurationError, ShardkitError
from shardkit.version import __version_tuple__

if TYPE_CHECKING:
    import torch

    from shardkit.checkpoint.tools import Checkpoint, Conversion
    from shardkit.tools.estimate import Subject


def _print(options: argparse.Namespace, data: object, text: object) -> None:
    """Prints what a command has found as its ``--json`` says."""
    print(json.dumps(data, indent=1) if options.json else text)


# ------------------------------------------------------------ ckpt
_CKPT = """checkpoints of any kind: what is in them, whether they are whole, in which they differ, other formats of them

shardkit ckpt ls runs/checkpoints
shardkit ckpt show runs/checkpoints/step-00001000
shardkit ckpt verify runs/checkpoints
shardkit ckpt diff runs/a model.safetensors
shardkit ckpt convert runs/checkpoints exported --to hf --dtype bf16 --files-from base-model

A checkpoint is a folder of steps (the latest is taken), a step's folder, any folder of torch.distributed.checkpoint, a
file of torch.save, the files of all ranks of fairscale's or torch_xla's FSDP (their folder, or a pattern), or a
Hugging Face folder or file. No process group is needed, and one tensor is in memory at a time.

Status: 0; 1 where verify finds damage or diff a difference; 2 where something can't be done.
"""


_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
}


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    """Finds a dtype by its name in torch, or a short one."""
    import torch

    dtype = None if name is None else getattr(torch, _DTYPES.get(name, name), None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"{option} {name}: torch has no such dtype; try bf16")
    return dtype


def _switch(parser: argparse.ArgumentParser, name: str, text: str, unset: bool | None = False) -> None:
    parser.add_argument(name, action="store_true", default=unset, help=text)


def _ckpt_arguments(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    _switch(common, "--json", "prints data, not text")
    reading = argparse.ArgumentParser(add_help=False)
    reading.add_argument(
        "--model-key", metavar="KEY", help="where in the checkpoint the model's state dict is"
    )
    _switch(reading, "--trust-pickle", "run what files say while reading them")
    commands = parser.add_subparsers(dest="what", metavar="ls|show|verify|diff|convert", required=True)

    for name, parents, path, text in (
        ("ls", [common], "DIR", "steps of a folder: complete or not, size, ranks, when"),
        ("show", [common, reading], "CHECKPOINT", "tensors, the optimizer's groups, and the rest"),
        ("verify", [common], "CHECKPOINT", "compares all bytes with their checksums"),
    ):
        commands.add_parser(name, parents=parents, help=text).add_argument("path", metavar=path)

    diff = commands.add_parser("diff", parents=[common, reading], help="names, shapes, dtypes and values")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    _switch(diff, "--model-only", "compare the models alone")
    diff.add_argument("--tolerance", type=float, default=0.0, help="so much may elements differ (default: 0)")

    convert = commands.add_parser("convert", parents=[common, reading], help="writes another format")
    add = convert.add_argument
    add("source", metavar="SRC")
    add("target", metavar="DST", help="a folder; with --to torch, and fairscale without --ranks, a file")
    add("--to", required=True, choices=("dcp", "torch", "fairscale", "xla", "hf"))
    add("--ranks", type=int, help="fairscale, xla: so many files of ranks")
    add("--dtype", help="of the model's floating point tensors, as bf16")
    add("--max-shard-size", type=_bytes, default="5GB", help="hf: of a file (default: 5GB)")
    _switch(convert, "--model-only", "the model's state dict and nothing else")
    add("--files-from", metavar="DIR", help="hf: copies config.json, tokenizer and the like")
    add(
        "--buffer",
        action="append",
        default=[],
        metavar="NAME",
        help="--ranks: a tensor that is a buffer (or a pattern of names), which is not cut",
    )
    add(
        "--tied",
        action="append",
        default=[],
        metavar="NAME=OTHER",
        help="two names of one weight, as lm_head.weight=model.embed_tokens.weight, where SRC doesn't tell",
    )
    _switch(convert, "--overwrite", "DST may be there; it is replaced at the end")


def _ckpt(options: argparse.Namespace) -> int:
    from shardkit.checkpoint import tools
    from shardkit.checkpoint.tools import reporting

    def opened(path: str) -> Checkpoint:
        return tools.open_checkpoint(path, model_key=options.model_key, trust_pickle=options.trust_pickle)

    data: object
    is_well = True
    if options.what == "ls":
        data = rows = reporting.steps(options.path)
        lines = reporting.steps_as_text(options.path, rows)
    elif options.what == "show":
        data = found = reporting.contents(opened(options.path))
        lines = reporting.contents_as_text(found)
    elif options.what == "verify":
        results = tools.verify(options.path)
        data = [{**vars(r), "damages": [damage._asdict() for damage in r.damages]} for r in results]
        lines, is_well = reporting.verified_as_text(results), not any(r.damages for r in results)
    elif options.what == "diff":
        a, b = opened(options.a), opened(options.b)
        compared = tools.compare(a, b, model_only=options.model_only, tolerance=options.tolerance)
        data = {**vars(compared), "differences": list(map(vars, compared.differences))}
        lines = reporting.comparison_as_text(options.a, options.b, compared)
        is_well = not compared.differences
    else:
        source, target = opened(options.source), options.target
        made = tools.convert(source, target, _conversion(options))
        kinds = {"from": made.source, "to": made.target}
        data = {**vars(made), "source": source.path, "target": target, **kinds}
        lines = reporting.converted_as_text(source.path, target, made)
    _print(options, _strict(data), "\n".join(lines))
    return int(not is_well)


def _conversion(options: argparse.Namespace) -> Conversion:
    from shardkit.checkpoint.tools import Conversion

    dtype = _dtype("--dtype", options.dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"--dtype {options.dtype}: that is no floating point dtype; try bf16")
    names = {field.name for field in fields(Conversion)} - {"dtype", "tied"}
    given = {name: value for name, value in vars(options).items() if name in names}
    tied = tuple(_pair("--tied", "NAME=OTHER", text) for text in options.tied)
    return Conversion(**given, dtype=dtype, buffers=tuple(options.buffer), tied=tied)


def _pair(option: str, form: str, text: str) -> tuple[str, str]:
    name, _, other = text.partition("=")
    if not name or not other:
        raise ConfigurationError(f"{option} {text}: it has to be {form}")
    return name, other


def _strict(value: object) -> object:
    """Makes texts of NaN and infinities, which JSON has not."""
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------ doctor
_DOCTOR = """looks at this machine, or at all machines of a job, and says what is in the way of training

shardkit doctor --ranks 64
shardkit run --ranks 2 --nodes 4 --rdzv node0:29400 --id look -m shardkit doctor

Versions, devices, limits, shared memory, interfaces, variables; bandwidth, round trips and clocks between ranks, by a
few that it starts, or by those of the job. Each finding comes with what to do. Exit status: 1 if jobs would fail.
"""


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="of the job that limits are for (default: this one, or 8)")
    _switch(parser, "--json", "prints data, not text")


def _doctor(options: argparse.Namespace) -> int:
    from shardkit.tools.doctor import as_data, as_text, examine

    if (report := examine(options.ranks)) is None:
        return 0
    _print(options, as_data(report), as_text(report))
    return 0 if report.is_well else 1


# ------------------------------------------------------------ estimate
_ESTIMATE = """says what a training would need of each rank, without running it

shardkit estimate train.py:experiment --ranks 8,64 --strategy all
shardkit estimate --hf config.json --ranks 8,64,1024 --batch 1,4 --dtype bfloat16 --device-memory 80GiB
shardkit estimate --hf config.json --ranks 8,64,1024 --dtype bfloat16 --device h100 --compiled --plot estimate.svg

The target is a function that returns a shardkit.tools.verify.Experiment, or with --hf the configuration of a language
model. The real wrapping and real steps run on tensors without values.
"""


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _estimate_arguments(parser: argparse.ArgumentParser) -> None:
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
    _switch(parser, "--compiled", "with --device: by torch.compile")
    _switch(parser, "--on-cpu", "ranks train on CPUs, over gloo")
    add(
        "--plot",
        metavar="FILE",
        help="a picture: memory over a step, bytes sent, and times (.svg, .png, .pdf)",
    )
    _switch(parser, "--json", "prints data, not a table")


def _estimate(options: argparse.Namespace) -> int:
    from shardkit.tools import estimate as estimating

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
    text = [estimating.as_text(subject, found, memory)]
    if device is not None:
        text.append("\n" + estimating.times_as_text(subject, found, device))
    if options.lora is not None:
        text += map(estimating.device_in_words, found)
    if limit is not None and not options.json:  # it tries many
        pairs = itertools.product(strategies, options.batch)
        needs = [(s, b, limit, estimating.smallest_ranks(subject, s, b, limit)) for s, b in pairs]
        text += itertools.starmap(estimating.in_words, needs)
    _print(options, estimating.as_data(subject, found), "\n".join(text))
    if options.plot:
        estimating.plot(subject, found, options.plot, memory)
    return 0


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


def _integers(text: str, least: int = 1) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else least - 1 for part in text.split(",")]
    if min(numbers) < least:
        raise argparse.ArgumentTypeError(f"{text}: write numbers from {least} on, as {least},3")
    return numbers


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kmgt]?)(i?)b?", text.strip().lower())
    found = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text}: write it as 80GiB or 24GB")
    return found


# ------------------------------------------------------------ migrate
_MIGRATE = """rewrites imports of fairscale to shardkit's

Import statements change, and nothing else: comments, formatting, line ends and encoding stay, byte for byte. A variable
keeps its name: "import fairscale" becomes "import shardkit as fairscale". What the rewriting can't decide is reported
as FILE:LINE: strings that name fairscale (also in configuration files), names that shardkit doesn't have, and names for
which there is something better.

Exit status: 0; with --check, 1 if something is to be rewritten; 2 if a file could not be handled.
"""


def _migrate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="files, or folders with all below them")
    _switch(parser, "--diff", "print what would change; write nothing")
    _switch(parser, "--check", "exit with 1 if something would change; write nothing")
    _switch(parser, "--strings", "rewrite strings, too, that are the path of something shardkit has")
    _switch(parser, "--xla", "rewrite imports of torch_xla's FSDP, too")
    _switch(parser, "--torch-fsdp", "rewrite imports of torch's FSDP1, too")


def _migrate(options: argparse.Namespace) -> int:
    from shardkit.tools import migration

    dry = options.diff or options.check
    changed = failed = 0
    missing = [path for path in options.paths if not path.exists()]
    for path in missing:
        print(f"shardkit migrate: there is no {path}", file=sys.stderr)
    if missing:
        return 2
    for path in migration.below(options.paths):
        result = migration.migrate(
            path, strings=options.strings, xla=options.xla, torch_fsdp=options.torch_fsdp
        )
        if not dry:
            result = result.written()
        changed += result.is_changed
        failed += result.error is not None
        for message in result.messages():
            print(message)
        if options.diff:
            print(result.diff(), end="")
    left = f", left alone: {failed}" if failed else ""
    print(f"files {'to change' if dry else 'changed'}: {changed}{left}")
    if failed:
        return 2
    return int(options.check and changed > 0)


# ------------------------------------------------------------ rehearse
_REHEARSE = """runs a script on simulated ranks of one process, and says who would hang

shardkit rehearse --ranks 64 --steps 2 train.py --epochs 3
shardkit rehearse --ranks 4 -m package.train
shardkit rehearse --ranks 1,2,3 --steps 5 --bits train.py

The script stays as it is: torch.distributed, and libraries on top of it, work between the ranks. The report says where
each rank would wait for ever, whose data ends early, and what memory and traffic a rank has. Status 1 where ranks can't
go on.
"""


def _rehearse_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=_integers, default="4", help="how many (default: 4); with --bits several, as 1,2,3")
    add(
        "--steps",
        type=int,
        help="ends each rank after so many steps of an optimizer (default: the whole script)",
    )
    add("--show", type=_shown, default="0", help='ranks whose output is shown, as 0,3, or "all" or "none"')
    _switch(parser, "--no-memory", "does not count bytes in tensors: faster")
    text = "CUDA devices that the script names mean the CPU (default: where there is no CUDA)"
    _switch(parser, "--cpu", text, unset=None)
    _switch(parser, "--compare", "runs it on one rank too, on the batches of all, for its losses")
    _switch(parser, "--bits", "tells the first bit in which numbers of ranks differ (docs/SAME_BITS.md)")
    add("--timeout", type=float, help="seconds (default: no limit)")
    _switch(parser, "--json", "prints data, not text")
    _program_arguments(parser)


def _rehearse(options: argparse.Namespace) -> int:
    from shardkit.tools.rehearsal import rehearse, rehearse_bits

    how = {name: getattr(options, name) for name in ("steps", "arguments", "is_module", "timeout", "cpu")}
    if options.bits:
        bits = rehearse_bits(options.program, options.ranks, **how)
        print(json.dumps({"good": bits.is_good, "partings": bits.partings}) if options.json else bits)
        return 0 if bits.is_good else 1
    count, *others = options.ranks
    if others:
        raise ConfigurationError(f"--ranks {options.ranks}: several numbers are for --bits")
    shown = {"all": list(range(count)), "none": []}.get(str(options.show), options.show)
    memory = not options.no_memory
    report = rehearse(options.program, count, show=shown, memory=memory, compare=options.compare, **how)
    _print(options, report.as_data(), f"\n{report}")
    return 0 if report.is_good else 1


def _shown(text: str) -> list[int] | str:
    return text if text in ("all", "none") else _integers(text, 0)


# ------------------------------------------------------------ run
_RUN = """runs a program on ranks: their logs, why they failed, restarts from the last checkpoint

shardkit run --ranks 4 train.py --epochs 3
shardkit run --ranks 4 --restarts 3 --min-ranks 3 train.py
shardkit run --ranks 8 --nodes 2:4 --rdzv node0:29400 --id job17 --restarts 3 -m package.train

Ranks find in their environment what torchrun sets. runs/ID/ has what each rank printed; rank 0's is shown. When a rank
fails, a page says why, where the others stood, which checkpoint is complete, and how to go on. SIGTERM (or Ctrl-C) asks
the program to save and to end (shardkit.stop_requested()); twice ends it at once.

Exit status: 0; 1 after a failure; 2 if it can't be started; 75 if the program has saved and stopped.
"""


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, help="processes on each machine (default: one for each accelerator, or 1)")
    add("--nodes", type=_nodes, default=(1, 1), metavar="N or MIN:MAX", help="machines (default: 1)")
    add("--rdzv", dest="rendezvous", default="", metavar="HOST:PORT", help="where machines meet: one of them")
    add("--restarts", type=int, default=0, help="of all ranks, when one has failed (default: 0)")
    text = "ranks on each machine to go on with, when one has failed twice (default: all)"
    add("--min-ranks", dest="least", type=int, metavar="MIN_RANKS", help=text)
    add("--id", default="", help="the run's name (default: the time; SLURM_JOB_ID)")
    add("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    add("--join-timeout", type=int, default=600, metavar="SECONDS", help="for other machines (default: 600)")
    add(
        "--trace",
        default="",
        metavar="steps=FIRST:LAST",
        help="runs/ID/trace.json has these steps of all ranks, both included and counted from 0, as steps=10:12 for "
        "three of them; shardkit trace explains it",
    )
    add(
        "--grace",
        type=float,
        default=60,
        metavar="SECONDS",
        help="to save and end after SIGTERM; then a page says where ranks stand, and they are ended (default: 60)",
    )
    add(
        "--stuck-after",
        type=float,
        default=3600,
        metavar="SECONDS",
        help="ranks hang when none has made a step of an optimizer or printed anything for so long: that is a failure, "
        "which --restarts answers (default: 3600; 0: never)",
    )
    _program_arguments(parser)


def _run(options: argparse.Namespace) -> int:
    from shardkit.tools.run.agent import RunOptions, run

    names = {field.name for field in fields(RunOptions)}
    given = {name: value for name, value in vars(options).items() if name in names}
    given["program"] = [*["-m"] * options.is_module, options.program, *options.arguments]
    given["command"] = shlex.join(["shardkit", *sys.argv[1:]])
    if options.ranks is None:
        import torch

        given["ranks"] = torch.accelerator.device_count() or 1
    return run(RunOptions(**given))


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write N or MIN:MAX") from None


# ------------------------------------------------------------ run-as-fairscale, run-as-fsdp1, run-as-fsdp2
_RUN_AS = """runs a program for which {what} is shardkit's, without changing it

shardkit {name} train.py --epochs 3
shardkit {name} -m package.train --epochs 3
torchrun --nproc-per-node 2 -m shardkit {name} train.py --epochs 3
"""


def _program_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a program and its own arguments, which come last."""
    add = parser.add_argument
    add("-m", dest="is_module", action="store_true", help="the program is a module's name")
    add("program", help="a script; with -m, a module")
    add("arguments", nargs=argparse.REMAINDER, help="the program's own")


def _run_as(name: str, what: str, door: str) -> _Command:
    """Runs the program as ``__main__`` after a door's ``install()``; what it raises passes through, SystemExit too."""

    def run(options: argparse.Namespace) -> int:
        from shardkit.tools.run.rank import run_program

        importlib.import_module(door).install()
        run_program([options.program, *options.arguments], options.is_module)
        return 0

    return _Command(_RUN_AS.format(name=name, what=what), _program_arguments, run, runs_a_program=True)


# ------------------------------------------------------------ trace
_TRACE = """explains a trace of a training: what its ranks wait for, which of them is late and why, what to change

shardkit trace runs/17/trace.json
shardkit trace runs/17 --plot step.svg
shardkit trace trace.rank-*.json --merge trace.json

A trace is written by shardkit.trace(), and by shardkit run --trace steps=10:12. https://ui.perfetto.dev shows the same
file. Status: 0, or 2 where there is no trace.
"""


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a trace, its parts (*.rank-N.json), or their folder")
    _switch(parser, "--json", "prints data, not tables")
    add("--plot", metavar="FILE", help="a picture of a step (.svg, .png, .pdf)")
    add("--step", type=int, help="which step is plotted (default: the last)")
    add("--merge", metavar="FILE", help="writes parts as one trace")


def _trace(options: argparse.Namespace) -> int:
    from shardkit.launching.run_folder import write_at_once
    from shardkit.tools.trace import analyse, as_data, as_text, plot
    from shardkit.tracing.timeline import of_events, read_events

    events = read_events(options.files)
    trace = of_events(events)
    found = analyse(trace)
    if options.merge:
        merged = Path(options.merge)
        merged.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(merged, json.dumps(events))
    if options.plot:
        plot(trace, options.plot, options.step)
    _print(options, as_data(found), as_text(found))
    return 0


# ------------------------------------------------------------ verify
_VERIFY = """trains a few steps in one process, with shardkit and with fairscale, and says where they part

shardkit verify train.py:experiment
shardkit verify package.module:experiment --strategy sharded_ddp --ranks 3 --steps 5
shardkit verify train.py:experiment --option mixed_precision=True --option compute_dtype=bfloat16
shardkit verify train.py:experiment --strategy fully_shard --ranks 3 --bits

The target is a function that returns a shardkit.tools.verify.Experiment. Status: 0 where shardkit agrees with one
process, 1 where it doesn't, 2 where there is nothing to compare.
"""


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="script.py:name or package.module:name")
    add("--strategy", default="fsdp", choices=("oss", "sharded_ddp", "fsdp", "fully_shard"))
    add("--ranks", type=int, default=2, help="processes on this machine's CPU (default: 2)")
    add("--steps", type=int, default=3, help="steps of training (default: 3)")
    _switch(parser, "--bits", "with a fixed order of sums, to the bit (docs/SAME_BITS.md)")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the wrapper, under fairscale's name, or of fully_shard; Python's values, or dtypes",
    )


def _verify(options: argparse.Namespace) -> int:
    from shardkit.tools.verify import verify

    how = {name: getattr(options, name) for name in ("strategy", "steps", "bits")}
    given = dict(map(_option, options.option))
    report = verify(options.target, world_size=options.ranks, options=given, **how)
    print(report)
    return 0 if report.agrees else 1


def _option(text: str) -> tuple[str, object]:
    name, value = _pair("--option", "NAME=VALUE", text)
    with contextlib.suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    try:
        return name, _dtype("--option", value.removeprefix("torch."))
    except ConfigurationError:
        raise ConfigurationError(
            f"--option {text}: {value!r} is neither a Python value nor a dtype"
        ) from None


# ------------------------------------------------------------ all of them
class _Command(NamedTuple):
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    runs_a_program: bool = False


COMMANDS = {
    "ckpt": _Command(_CKPT, _ckpt_arguments, _ckpt),
    "doctor": _Command(_DOCTOR, _doctor_arguments, _doctor),
    "estimate": _Command(_ESTIMATE, _estimate_arguments, _estimate),
    "migrate": _Command(_MIGRATE, _migrate_arguments, _migrate),
    "rehearse": _Command(_REHEARSE, _rehearse_arguments, _rehearse),
    "run": _Command(_RUN, _run_arguments, _run),
    "trace": _Command(_TRACE, _trace_arguments, _trace),
    "verify": _Command(_VERIFY, _verify_arguments, _verify),
} | {
    name: _run_as(name, what, door)
    for name, what, door in (
        ("run-as-fairscale", "fairscale", "shardkit.compat"),
        ("run-as-fsdp1", "torch's FullyShardedDataParallel (FSDP1)", "shardkit.torch_fsdp"),
        ("run-as-fsdp2", "torch's fully_shard (FSDP2)", "shardkit.torch_fsdp2"),
    )
}


class _Parser(argparse.ArgumentParser):
    """Knows what was meant by a mistyped word."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            meant = difflib.get_close_matches(str(value), list(action.choices or ()), 1)
            if meant:
                raise argparse.ArgumentError(action, f"{value}: did you mean {meant[0]}?") from None
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = _Parser(prog="shardkit", description="Sharded training for PyTorch.")
    version = ".".join(map(str, __version_tuple__))
    parser.add_argument("--version", action="version", version=f"shardkit {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in sorted(COMMANDS.items()):
        added = commands.add_parser(
            name,
            help=command.text.partition("\n")[0],
            description=command.text.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(added)
    options = parser.parse_args(arguments)
    command, status = COMMANDS[options.command], 2
    if command.runs_a_program:
        return command.run(options)
    try:
        status = command.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # "| head" has seen enough
        sys.stderr.close()
        return 0
    except (ShardkitError, OSError) as error:
        print(f"shardkit {options.command}: {error}", file=sys.stderr)
    return status
