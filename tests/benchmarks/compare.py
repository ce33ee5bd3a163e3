"""Times and counts ways to train data-parallel against each other, interleaved in one run.

    python tests/benchmarks/compare.py --rounds 12 --world-size 2 --model gpt

Each implementation has rank processes of its own that stay alive. One of them runs a block of steps while all others
wait; the order rotates and turns around from round to round, and each time is divided by DistributedDataParallel's
of the same round. What is printed is the median of these ratios and its 95 % interval (bootstrap). The row ``ddp#2`` is
the same implementation a second time: differences within its interval are none.

CPU time is that of all threads of all ranks; on a busy machine it stays readable when wall time does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.figures.network import enter_private_network

DEFAULT = ("ddp", "ddp#2", "ddp_view", "ddp_zero", "fairscale", "shardkit", "balanced")
REFERENCE = "ddp"
QUIET = 0.10  # share of the machine that others may use in a quiet block
ENOUGH = 5  # quiet rounds that are enough to leave out the others
COMPARED_LOSSES = 6

_trainer: dict[str, Any] = {}


# ------------------------------------------------------------------------------------------------ in the ranks
def prepare(rank: int, implementation: str, model: str) -> list[float]:
    """Builds the trainer; the losses of its first steps."""
    import torch

    from tests.figures.gpt import build
    from tests.figures.implementations import IMPLEMENTATIONS

    torch.set_num_threads(1)
    _trainer["it"] = IMPLEMENTATIONS[implementation](build(model))
    return [_step(model, count, rank) for count in range(COMPARED_LOSSES)]


def _step(model: str, count: int, rank: int) -> float:
    from tests.figures.gpt import loss

    trainer = _trainer["it"]
    value = loss(model, trainer.model, count, rank)
    value.backward()
    trainer.optimizer.step()
    trainer.zero_grad()
    return float(value.detach())


def run_block(rank: int, model: str, steps: int) -> tuple[float, float]:
    """CPU and wall seconds of some steps."""
    import torch.distributed as dist

    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for count in range(steps):
        _step(model, count, rank)
    dist.barrier()
    return time.process_time() - cpu, time.perf_counter() - wall


# ------------------------------------------------------------------------------------------------ the controller
class Block(NamedTuple):
    """One implementation's turn in a round; ``foreign`` is the share of the machine that others used."""

    cpu: float
    wall: float
    foreign: float


def _machine() -> tuple[float, float]:
    """Seconds that the machine's cores were busy, and seconds in all."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - fields[3] - fields[4]) / ticks, sum(fields) / ticks


def timed_block(pool: Any, model: str, steps: int) -> Block:
    busy, total = _machine()
    ranks = pool.run(run_block, model, steps)
    busy_after, total_after = _machine()
    cpu = sum(r[0] for r in ranks)
    whole = total_after - total
    foreign = max(0.0, (busy_after - busy - cpu) / whole) if whole > 0 else 0.0
    return Block(cpu, max(r[1] for r in ranks), foreign)


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """Median and the 95 % interval of it by bootstrap."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(draws))
    return median(values), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def ratios(
    rounds: Sequence[dict[str, Block]], name: str, of: Callable[[Block], float]
) -> tuple[list[float], bool]:
    """Ratios to the reference of the same round, from quiet rounds if there are enough (then True)."""
    quiet = [r for r in rounds if max(r[name].foreign, r[REFERENCE].foreign) < QUIET]
    chosen = quiet if len(quiet) >= ENOUGH else rounds
    return [of(r[name]) / of(r[REFERENCE]) for r in chosen], len(quiet) >= ENOUGH


def order_of(round_number: int, names: Sequence[str]) -> list[str]:
    start = round_number % len(names)
    turned = [*names[start:], *names[:start]]
    return turned if round_number % 2 == 0 else turned[::-1]


def measure(options: argparse.Namespace, names: Sequence[str], wire: bool) -> dict[str, Any]:
    """All rounds, then the counted figures."""
    from shardkit.backends.processes import RankPool
    from tests.figures.measure import count_step

    environment = {"OMP_NUM_THREADS": "1"}
    pools = {n: RankPool(options.world_size, timeout=600, environment=environment) for n in names}
    try:
        losses = {n: pools[n].run(prepare, n.partition("#")[0], options.model) for n in names}
        rounds: list[dict[str, Block]] = []
        for number in range(options.rounds):
            rounds.append(
                {n: timed_block(pools[n], options.model, options.steps) for n in order_of(number, names)}
            )
            if sys.stderr.isatty():
                print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr)
        counts = {}
        if options.counts:
            counts = {
                n: pools[n].run(count_step, n.partition("#")[0], options.model, wire)
                for n in names
                if "#" not in n
            }
    finally:
        for pool in pools.values():
            pool.close(kill=True)
    return {"losses": losses, "rounds": rounds, "counts": counts}


def summary(options: argparse.Namespace, names: Sequence[str], found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each implementation."""
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name}
        for kind, of in (("cpu", lambda b: b.cpu), ("wall", lambda b: b.wall)):
            values, quiet = ratios(found["rounds"], name, of)
            row[kind], row["quiet"] = interval(values), quiet
        row["cpu_ms"] = (
            1000 * median(r[name].cpu for r in found["rounds"]) / options.steps / options.world_size
        )
        row["loss_difference"] = max(
            abs(a - b) / max(abs(b), 1e-12)
            for mine, other in zip(found["losses"][name], found["losses"][REFERENCE], strict=True)
            for a, b in zip(mine, other, strict=True)
        )
        ranks = found["counts"].get(name)
        if ranks:
            row["counts"] = {
                "operations": max(r["operations"] for r in ranks),
                "calls": max(r["calls"] for r in ranks),
                "collectives": sum(ranks[0]["collectives"].values()),
                **{k: mean(r[k] for r in ranks) for k in ("sent", "wire", "resident") if k in ranks[0]},
                "peak": max(r["peak"] for r in ranks),
            }
        rows.append(row)
    return rows


def print_table(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    from tests.figures.gpt import build

    model_bytes = 4 * sum(p.numel() for p in build(options.model).parameters())
    print(
        f"{options.model}, {options.world_size} ranks, {options.rounds} rounds of {options.steps} steps; "
        f"ratios to {REFERENCE} [95 %]; bytes in P = {model_bytes / 1e6:.1f} MB"
    )
    print(
        f"{'':22}{'CPU time':>21}{'wall time':>22}{'ms/step':>9}{'ops':>6}{'calls':>7}{'coll':>6}"
        f"{'sent':>7}{'wire':>7}{'held':>7}{'peak':>7}  losses"
    )
    for row in rows:
        times = "".join("{:7.3f} [{:.3f}, {:.3f}]".format(*row[k]) for k in ("cpu", "wall"))
        counts = row.get("counts", {})
        shown = (
            f"{counts['operations']:6d}{counts['calls']:7d}{counts['collectives']:6d}"
            + "".join(
                f"{counts[k] / model_bytes:7.2f}" if k in counts else f"{'-':>7}"
                for k in ("sent", "wire", "resident", "peak")
            )
            if counts
            else " " * 47
        )
        same = "equal" if row["loss_difference"] < 1e-5 else f"OFF by {row['loss_difference']:.1e}"
        print(
            f"{row['name']:22}{times}{row['cpu_ms']:9.1f}{shown}  {same}{'' if row['quiet'] else '  (busy machine)'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--model", choices=["gpt", "tinymlp"], default="gpt")
    parser.add_argument("--implementations", default=",".join(DEFAULT))
    parser.add_argument("--no-counts", dest="counts", action="store_false", help="times only")
    parser.add_argument("--json", type=Path, help="write everything to this file, too")
    options = parser.parse_args()
    no_wire = enter_private_network()
    names = [n for n in options.implementations.split(",") if _installed(n)]
    if REFERENCE not in names:
        names.insert(0, REFERENCE)
    found = measure(options, names, not no_wire)
    rows = summary(options, names, found)
    print_table(options, rows)
    if options.json:
        rounds = [{n: b._asdict() for n, b in r.items()} for r in found["rounds"]]
        options.json.write_text(
            json.dumps({"rows": rows, "rounds": rounds, "counts": found["counts"]}, indent=1)
        )
    return 0 if all(math.isfinite(r["cpu"][0]) and r["loss_difference"] < 1e-5 for r in rows) else 1


def _installed(name: str) -> bool:
    import importlib.util

    library = name.partition("_")[0].partition("#")[0]
    if library != "fairscale" or importlib.util.find_spec("fairscale") is not None:
        return True
    print(f"{name} is left out: fairscale is not installed", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
