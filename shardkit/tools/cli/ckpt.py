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
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardkit.errors import ConfigurationError

if TYPE_CHECKING:
    from shardkit.checkpoint.tools import Checkpoint

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
}
_OF_CONVERSION = ("to", "ranks", "max_shard_size", "model_only", "overwrite", "files_from")


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
    add = convert.add_argument
    add("source", metavar="SRC")
    add("target", metavar="DST", help="a folder; with --to torch, and fairscale without --ranks, a file")
    add("--to", required=True, choices=("dcp", "torch", "fairscale", "xla", "hf"))
    add("--ranks", type=int, help="fairscale, xla: so many files of ranks")
    add("--dtype", help="of the model's floating point tensors, as bf16")
    add("--max-shard-size", default="5GB", help="hf: of a file (default: 5GB)")
    add("--model-only", action="store_true", help="the model's state dict and nothing else")
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
    add("--overwrite", action="store_true", help="DST may be there; it is replaced at the end")


def run(options: argparse.Namespace) -> int:
    return _COMMANDS[options.what](options)


def _answer(options: argparse.Namespace, data: object, lines: Iterable[str]) -> None:
    if options.json:
        print(json.dumps(_strict(data), indent=1))
    else:
        print("\n".join(lines))


def _opened(path: str, options: argparse.Namespace) -> Checkpoint:
    from shardkit.checkpoint.tools import open_checkpoint

    return open_checkpoint(path, model_key=options.model_key, trust_pickle=options.trust_pickle)


def _ls(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import reporting

    rows = reporting.steps(options.path)
    _answer(options, rows, reporting.steps_as_text(options.path, rows))
    return 0


def _show(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import reporting

    found = reporting.contents(_opened(options.path, options))
    _answer(options, found, reporting.contents_as_text(found))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import reporting, verify

    results = verify(options.path)
    data = [{**vars(r), "damages": [damage._asdict() for damage in r.damages]} for r in results]
    _answer(options, data, reporting.verified_as_text(results))
    return int(any(result.damages for result in results))


def _diff(options: argparse.Namespace) -> int:
    from shardkit.checkpoint.tools import compare, reporting

    a, b = _opened(options.a, options), _opened(options.b, options)
    result = compare(a, b, model_only=options.model_only, tolerance=options.tolerance)
    data = {**vars(result), "differences": list(map(vars, result.differences))}
    _answer(options, data, reporting.comparison_as_text(options.a, options.b, result))
    return int(bool(result.differences))


def _convert(options: argparse.Namespace) -> int:
    import torch

    from shardkit.checkpoint.tools import Conversion, convert, reporting

    dtype = None
    if options.dtype is not None:
        dtype = getattr(torch, _DTYPES.get(options.dtype, options.dtype), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigurationError(
                f"--dtype {options.dtype}: that is no floating point dtype of torch; try bf16"
            )
    given = {name: value for name, value in vars(options).items() if name in _OF_CONVERSION}
    how = Conversion(
        **given, dtype=dtype, buffers=tuple(options.buffer), tied=tuple(map(_pair, options.tied))
    )
    checkpoint, target = _opened(options.source, options), options.target
    result = convert(checkpoint, target, how)
    kinds = {"from": result.source, "to": result.target}
    data = {**vars(result), "source": checkpoint.path, "target": target, **kinds}
    _answer(options, data, reporting.converted_as_text(checkpoint.path, target, result))
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not equals or not name or not other:
        raise ConfigurationError(f"--tied {text}: it has to be NAME=OTHER")
    return name, other


def _strict(value: object) -> object:
    """Makes texts of NaN and infinities, which JSON has not."""
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_COMMANDS = {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "convert": _convert}
