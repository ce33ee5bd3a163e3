"""checkpoints of any kind: what is in them, whether they are whole, in which they differ, other formats of them

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

from __future__ import annotations

import argparse
import json
import math

from shardkit.errors import ConfigurationError

_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="prints data, not text")
    reading = argparse.ArgumentParser(add_help=False)
    reading.add_argument(
        "--model-key", metavar="KEY", help="where in the checkpoint the model's state dict is"
    )
    reading.add_argument("--trust-pickle", action="store_true", help="run what files say while reading them")
    commands = parser.add_subparsers(dest="what", metavar="ls|show|verify|diff|convert", required=True)

    ls = commands.add_parser(
        "ls", parents=[common], help="steps of a folder: complete or not, size, ranks, when"
    )
    ls.add_argument("path", metavar="DIR")

    show = commands.add_parser(
        "show", parents=[common, reading], help="tensors, the optimizer's groups, and the rest"
    )
    show.add_argument("path", metavar="CHECKPOINT")

    verify = commands.add_parser("verify", parents=[common], help="compares all bytes with their checksums")
    verify.add_argument("path", metavar="CHECKPOINT")

    diff = commands.add_parser("diff", parents=[common, reading], help="names, shapes, dtypes and values")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.add_argument("--model-only", action="store_true", help="compare the models alone")
    diff.add_argument("--tolerance", type=float, default=0.0, help="so much may elements differ (default: 0)")

    convert = commands.add_parser("convert", parents=[common, reading], help="writes another format")
    _add_arguments_of_convert(convert)


def _add_arguments_of_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("source", metavar="SRC")
    convert.add_argument(
        "target", metavar="DST", help="a folder; with --to torch, and fairscale without --ranks, a file"
    )
    convert.add_argument("--to", required=True, choices=("dcp", "torch", "fairscale", "xla", "hf"))
    convert.add_argument("--ranks", type=int, help="fairscale, xla: so many files of ranks")
    convert.add_argument("--dtype", help="of the model's floating point tensors, as bf16")
    convert.add_argument("--max-shard-size", default="5GB", help="hf: of a file (default: 5GB)")
    convert.add_argument("--model-only", action="store_true", help="the model's state dict and nothing else")
    convert.add_argument("--files-from", metavar="DIR", help="hf: copies config.json, tokenizer and the like")
    convert.add_argument(
        "--buffer",
        action="append",
        default=[],
        metavar="NAME",
        help="--ranks: a tensor that is a buffer (or a pattern of names), which is not cut",
    )
    convert.add_argument(
        "--tied",
        action="append",
        default=[],
        metavar="NAME=OTHER",
        help="two names of one weight, as lm_head.weight=model.embed_tokens.weight, where SRC doesn't tell",
    )
    convert.add_argument(
        "--overwrite", action="store_true", help="DST may be there; it is replaced at the end"
    )


def run(options: argparse.Namespace) -> int:
    return _COMMANDS[options.what](options)


def _ls(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import reporting

    rows = reporting.steps(options.path)
    if options.json:
        _print_json(rows)
    else:
        reporting.print_steps(options.path, rows)
    return 0


def _show(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import open_checkpoint, reporting

    found = reporting.contents(
        open_checkpoint(options.path, model_key=options.model_key, trust_pickle=options.trust_pickle)
    )
    if options.json:
        _print_json(found)
    else:
        reporting.print_contents(found)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import reporting, verify

    results = verify(options.path)
    if options.json:
        _print_json(list(reporting.lines_of(results)))
    else:
        reporting.print_verified(results)
    return int(any(result.damages for result in results))


def _diff(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import compare, open_checkpoint, reporting

    a, b = (
        open_checkpoint(path, model_key=options.model_key, trust_pickle=options.trust_pickle)
        for path in (options.a, options.b)
    )
    result = compare(a, b, model_only=options.model_only, tolerance=options.tolerance)
    if options.json:
        found = [{"name": d.name, "what": d.what, "max_abs": d.max_abs} for d in result.differences]
        _print_json({"tensors": result.tensors, "differences": found, "not_compared": result.not_compared})
    else:
        reporting.print_comparison(options.a, options.b, result)
    return int(bool(result.differences))


def _convert(options: argparse.Namespace) -> int:
    import torch

    from shardkit.checkpoint.tools import Conversion, convert, open_checkpoint, reporting

    dtype = None
    if options.dtype is not None:
        dtype = getattr(torch, _DTYPES.get(options.dtype, options.dtype), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigurationError(
                f"--dtype {options.dtype}: that is no floating point dtype of torch; try bf16"
            )
    how = Conversion(
        options.to, options.ranks, dtype, options.max_shard_size, options.model_only, options.overwrite,
        tuple(options.buffer), options.files_from, tuple(_pair(text) for text in options.tied),
    )  # fmt: skip
    checkpoint = open_checkpoint(
        options.source, model_key=options.model_key, trust_pickle=options.trust_pickle
    )
    result = convert(checkpoint, options.target, how)
    if options.json:
        kinds = {"from": result.source, "to": result.target}
        done = {"tensors": result.tensors, "bytes": result.bytes, "notes": result.notes}
        _print_json({"source": checkpoint.path, "target": options.target, **kinds, **done})
    else:
        reporting.print_converted(checkpoint.path, options.target, result)
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not equals or not name or not other:
        raise ConfigurationError(f"--tied {text}: it has to be NAME=OTHER")
    return name, other


def _print_json(value: object) -> None:
    print(json.dumps(_strict(value), indent=1))


def _strict(value: object) -> object:
    """Makes texts of NaN and infinities, which JSON has not."""
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_COMMANDS = {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "convert": _convert}
