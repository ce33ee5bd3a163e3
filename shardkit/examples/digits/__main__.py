"""Command line of the digits example."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import shardkit

from . import report
from .train import STRATEGIES, Job, Outcome, prepare, run_rank

EPOCHS = 20
ALL = "all"
ACCURACY_GOAL = 0.97  # of a full run
# A process that torchrun started is one rank already, and runs all of this.
STARTED_RANK = int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
STARTED_RANKS = int(os.environ["WORLD_SIZE"]) if STARTED_RANK is not None else None
# Ranks add up gradients in another order than one process; over a full run fp32 differences stay below this.
LOSS_TOLERANCE = 1e-4


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python -m shardkit.examples.digits",
        description="Trains a small vision transformer on scikit-learn's handwritten digits and compares the "
        "run with one process (losses) and with DDP (bytes a rank).",
    )
    parser.add_argument("--backend", default="gloo", help="gloo, cuda, xla, simulated or a third party's")
    parser.add_argument(
        "--ranks",
        type=int,
        default=STARTED_RANKS or 2,
        help="ranks that train together (default: 2, or as many as torchrun started)",
    )
    parser.add_argument(
        "--strategy",
        choices=[ALL, *STRATEGIES],
        default=ALL,
        help="what is trained to the end (default: all, one after the other); the others run one epoch, to stand "
        "beside it in the table",
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default: {EPOCHS}")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images a step, over all ranks (default: 64)"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws weights and order (default: 0)")
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.epochs < 1 or args.batch_size % args.ranks:
        parser.error(
            f"--ranks {args.ranks} --epochs {args.epochs} --batch-size {args.batch_size}: the first two must be "
            "at least 1, and the batch size a multiple of the ranks"
        )
    if STARTED_RANKS not in (None, args.ranks):
        parser.error(f"--ranks {args.ranks}, but torchrun started {STARTED_RANKS}; leave --ranks out")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; 0 if all losses agree with one process (and full runs reach the accuracy goal)."""
    args = parse(argv)
    began = time.perf_counter()
    start = prepare(args.seed)

    def job(strategy: str, world_size: int, stop_after: int) -> Job:
        return Job(
            strategy,
            args.backend,
            world_size,
            args.epochs,
            stop_after,
            batch_size=args.batch_size,
            seed=args.seed,
        )

    trained = STRATEGIES if args.strategy == ALL else (args.strategy,)
    jobs = [job(name, args.ranks, args.epochs) for name in trained]
    jobs += [job(name, args.ranks, 1) for name in STRATEGIES if name not in trained]
    single = [job("single", 1, args.epochs)]
    reference = Outcome()
    if STARTED_RANK is None:
        reference = shardkit.launch(run_rank, 1, backend=args.backend, args=(single, start))[0][0]
    elif STARTED_RANK == 0:
        reference = run_rank(0, single, start)[0]
    ranks = shardkit.launch(run_rank, args.ranks, backend=args.backend, args=(jobs, start))
    if STARTED_RANK:
        return 0  # rank 0 reports

    outcomes = {j.strategy: [rank[i] for rank in ranks] for i, j in enumerate(jobs)}
    rows = [report.compare(name, outcomes[name], reference.losses) for name in STRATEGIES]
    worst = max(row.loss_difference for row in rows)
    print()
    report.show([report.compare("single", [reference], reference.losses), *rows])
    print(f"\n{args.ranks} ranks on {args.backend}, held-out accuracy and training time:")
    finished = {name: outcomes[name][0] for name in trained}
    for name, outcome in {"one process": reference, **finished}.items():
        print(f"  {name:11}  {outcome.accuracy:.2%}  {outcome.seconds:5.1f} s")
    print(f"All losses equal those of one process within {worst:.1e} (relative, worst step).")
    print(f"{time.perf_counter() - began:.1f} s in all")
    lowest = min(outcome.accuracy for outcome in finished.values())
    return verdict(lowest, worst, full=args.epochs >= EPOCHS)


def verdict(accuracy: float, loss_difference: float, *, full: bool) -> int:
    """Exit code; says what is wrong."""
    problems = []
    if not loss_difference <= LOSS_TOLERANCE:
        problems.append(
            f"losses differ by {loss_difference:.1e} from one process; at most {LOSS_TOLERANCE} was expected"
        )
    if full and accuracy < ACCURACY_GOAL:
        problems.append(f"held-out accuracy is {accuracy:.2%}; at least {ACCURACY_GOAL:.0%} was expected")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
