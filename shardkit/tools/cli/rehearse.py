"""runs a script on simulated ranks of one process, and says who would hang

shardkit rehearse --ranks 64 --steps 2 train.py --epochs 3
shardkit rehearse --ranks 4 -m package.train
shardkit rehearse --ranks 1,2,3 --steps 5 --bits train.py

The script stays as it is: torch.distributed, and libraries on top of it, work between the ranks. The report says where
each rank would wait for ever, whose data ends early, and what memory and traffic a rank has. Status 1 where ranks can't
go on.
"""

from __future__ import annotations

import argparse
import json

from shardkit.errors import ConfigurationError

from . import run_as_fairscale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", default="4", help="how many (default: 4); with --bits several, as 1,2,3")
    add(
        "--steps",
        type=int,
        help="ends each rank after so many steps of an optimizer (default: the whole script)",
    )
    add("--show", default="0", help='ranks whose output is shown, as 0,3, or "all" or "none"')
    add("--no-memory", action="store_true", help="does not count bytes in tensors: faster")
    add(
        "--cpu",
        action="store_true",
        default=None,
        help="CUDA devices that the script names mean the CPU (default: where there is no CUDA)",
    )
    add(
        "--compare",
        action="store_true",
        help="runs it on one rank too, on the batches of all, for its losses",
    )
    add(
        "--bits",
        action="store_true",
        help="tells the first bit in which numbers of ranks differ (docs/SAME_BITS.md)",
    )
    add("--timeout", type=float, help="seconds (default: no limit)")
    add("--json", action="store_true", help="prints data, not text")
    run_as_fairscale.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from shardkit.tools.rehearsal import rehearse
    from shardkit.tools.rehearsal.bits import rehearse_bits

    sizes = _numbers("--ranks", options.ranks)
    how = {name: getattr(options, name) for name in ("steps", "arguments", "is_module", "timeout", "cpu")}
    if options.bits:
        bits = rehearse_bits(options.program, sizes, **how)
        print(json.dumps({"good": bits.is_good, "partings": bits.partings}) if options.json else bits)
        return 0 if bits.is_good else 1
    if len(sizes) != 1:
        raise ConfigurationError(f"--ranks {options.ranks}: several numbers are for --bits")
    shown, memory = _ranks(options.show, sizes[0]), not options.no_memory
    report = rehearse(options.program, sizes[0], show=shown, memory=memory, compare=options.compare, **how)
    print(json.dumps(report.as_data(), indent=1) if options.json else f"\n{report}")
    return 0 if report.is_good else 1


def _ranks(text: str, count: int) -> list[int]:
    if text in ("all", "none"):
        return list(range(count)) if text == "all" else []
    return _numbers("--show", text)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        words = ', or "all" or "none"' if option == "--show" else ""
        raise ConfigurationError(f"{option} {text}: write numbers as 0,3{words}") from None
