"""Times and counts ways to train data-parallel against each other, interleaved in one run.

    python tests/benchmarks/compare.py --rounds 12 --world-size 2 --models gpt
    python tests/benchmarks/compare.py --models tinymlp,lora --implementations bare,ddp,fsdp,torch_fsdp2
    python tests/benchmarks/compare.py --rate 2gbit --implementations ddp,fsdp,compressed

Each implementation has rank processes of its own that stay alive. One of them runs a block of steps while all others
wait; the order rotates and turns around from round to round, and each time is divided by DistributedDataParallel's
of the same round. What is printed is the median of these ratios and its 95 % interval (bootstrap). The row ``ddp#2`` is
the same implementation a second time: differences within its interval are none.

CPU time is that of all threads of all ranks; on a busy machine it stays readable when wall time does not. "kernel" is
the part of it that the kernel spends (page faults, sockets).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures.network import enter_private_network, throttle

REFERENCE = "ddp"
BARE = "bare"
STAGE_3 = (
    "fsdp",
    "fully_shard",
    "dtensors",
    "fsdp_keep",
    "torch_fsdp1",
    "torch_fsdp2",
    "torch_fsdp2_keep",
    "fairscale_fsdp",
    "deepspeed_3",
)
DEFAULT = ("bare", "ddp", "ddp#2", "ddp_view", "ddp_zero", "fairscale", "shardkit", "balanced", *STAGE_3)
SAME_LOSS = 1e-5
ROUNDED_LOSS = 2e-3  # of those that round what they send


def measure(options: argparse.Namespace, model: str, names: Sequence[str], wire: bool) -> dict[str, Any]:
    """All rounds, then the counted figures."""
    from tests.benchmarks.contest import Contest

    entries = {name: name.partition("#")[0] for name in names}
    with Contest(entries, model, options.world_size) as contest:
        losses = contest.first_losses()
        rounds = []
        for number in range(options.rounds):
            rounds.append(contest.run_round(number, options.steps))
            if sys.stderr.isatty():
                print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr)
        counts = contest.counted(wire) if options.counts else {}
    return {"losses": losses, "rounds": rounds, "counts": counts}


def summary(names: Sequence[str], found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each implementation."""
    from tests.benchmarks.ratios import ENOUGH, median_of, ratio

    rounds = found["rounds"]
    rows = []
    for name in names:
        cpu = median_of(rounds, name, lambda t: t.cpu)
        quiet = sum(r[name].is_quiet and r[REFERENCE].is_quiet for r in rounds)
        row: dict[str, Any] = {
            "name": name,
            "cpu": ratio(rounds, name, REFERENCE, lambda t: t.cpu),
            "wall": ratio(rounds, name, REFERENCE, lambda t: t.wall),
            "cpu_ms": 1000 * cpu,
            "system": median_of(rounds, name, lambda t: t.system) / cpu,
            "quiet": quiet >= ENOUGH,
            "loss_difference": difference(found["losses"][name], found["losses"][REFERENCE]),
        }
        if name == BARE:  # each rank trains a model of its own
            row["loss_difference"] = 0.0
        ranks = found["counts"].get(name)
        if ranks:
            row["counts"] = {
                "operations": max(r["operations"] for r in ranks),
                "calls": max(r["calls"] for r in ranks),
                "collectives": sum(ranks[0]["collectives"].values()),
                **{
                    k: mean(r[k] for r in ranks)
                    for k in ("sent", "wire", "resident", "moved")
                    if k in ranks[0]
                },
                "peak": max(r["peak"] for r in ranks),
            }
        rows.append(row)
    return rows


def difference(losses: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The largest relative one, over ranks and steps."""
    return max(
        abs(a - b) / max(abs(b), 1e-12)
        for mine, theirs in zip(losses, others, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def print_table(options: argparse.Namespace, model: str, rows: Sequence[dict[str, Any]]) -> None:
    """One line for each implementation."""
    from tests.figures.gpt import build

    model_bytes = 4 * sum(p.numel() for p in build(model).parameters())
    print(
        f"{model}, {options.world_size} ranks, {options.rounds} rounds of {options.steps} steps; "
        f"ratios to {REFERENCE} [95 %]; ms of all ranks; bytes in P = {model_bytes / 1e6:.2f} MB"
    )
    print(
        f"{'':18}{'CPU time':>21}{'wall time':>21}{'CPU ms':>8}{'kernel':>7}{'ops':>6}{'calls':>7}{'coll':>5}"
        f"{'sent':>6}{'wire':>6}{'held':>6}{'peak':>6}{'copied':>7}  losses"
    )
    figures = ("sent", "wire", "resident", "peak", "moved")
    for row in rows:
        line = (
            f"{row['name']:18}{row['cpu']!s:>21}{row['wall']!s:>21}{row['cpu_ms']:8.1f}{row['system']:7.0%}"
        )
        counts = row.get("counts")
        if counts:
            line += f"{counts['operations']:6d}{counts['calls']:7d}{counts['collectives']:5d}"
            line += "".join(
                f"{counts[k] / model_bytes:6.2f}" if k in counts else f"{'-':>6}" for k in figures
            )
        off = row["loss_difference"]
        line += "  equal" if off < SAME_LOSS else f"  OFF by {off:.1e}"
        print(line + ("" if row["quiet"] else "  (busy machine)"))


def print_overheads(names: Sequence[str], rounds: Sequence[Any]) -> None:
    """What sharding costs beyond the bare model, as a ratio to what it costs with torch's FSDP2."""
    from tests.benchmarks.ratios import overhead_ratio

    if BARE not in names or "torch_fsdp2" not in names:
        return
    print("CPU time beyond that of the bare model, as a ratio to torch_fsdp2's [95 %]:")
    for name in names:
        if name in STAGE_3:
            print(f"{name:18}{overhead_ratio(rounds, name, 'torch_fsdp2', BARE)!s:>21}")


def chosen(text: str) -> list[str]:
    """The implementations that can run here, the reference among them."""
    from tests.benchmarks.contest import missing_package

    names = []
    for name in text.split(","):
        package = missing_package(name)
        if package:
            print(f"{name} is left out: {package} is not installed", file=sys.stderr)
        else:
            names.append(name)
    return names if REFERENCE in names else [REFERENCE, *names]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--models", default="gpt,tinymlp,lora", help="a table for each of these")
    parser.add_argument("--implementations", default=",".join(DEFAULT))
    parser.add_argument("--rate", help="of the network that all ranks share, as tc has it: 2gbit; takes root")
    parser.add_argument("--no-counts", dest="counts", action="store_false", help="times only")
    parser.add_argument("--json", type=Path, help="write everything to this file, too")
    options = parser.parse_args()
    no_wire = enter_private_network()
    if options.rate:
        why = no_wire or throttle(options.rate)
        if why:
            parser.exit(2, f"the network can't be throttled here: {why}\n")
    names = chosen(options.implementations)
    written, ok = {}, True
    for model in options.models.split(","):
        found = measure(options, model, names, not no_wire)
        rows = summary(names, found)
        print_table(options, model, rows)
        print_overheads(names, found["rounds"])
        rounds = [{n: t._asdict() for n, t in r.items()} for r in found["rounds"]]
        written[model] = {"rows": rows, "rounds": rounds, "counts": found["counts"]}
        ok &= all(
            r["loss_difference"] < (ROUNDED_LOSS if "compressed" in r["name"] else SAME_LOSS)
            and math.isfinite(r["cpu"].median)
            for r in rows
        )
    if options.json:
        options.json.write_text(json.dumps(written, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
