"""Estimated peaks beside measured ones: 11 models x 4 strategies on gloo.

python -m tests.benchmarks.estimates [ranks]
"""

from __future__ import annotations

import sys

from shardkit.tools.estimate import STRATEGIES, estimate
from tests.estimate.subjects import SUBJECTS, measured
from tests.pools import rank_pool


def main(ranks: int) -> None:
    """Prints a line for each."""
    pool = rank_pool(ranks)
    print(f"{ranks} ranks; peaks in MB, and estimated / measured")
    for name, subject in SUBJECTS.items():
        for strategy in STRATEGIES:
            batch = 32 if name.startswith(("layers", "images")) else 4
            found = estimate(subject, strategy, ranks, batch, on_host=True).peak
            real = max(memory.peak for memory in pool.run(measured, name, strategy, batch))
            print(
                f"{name:24} {strategy:12} {found / 1e6:9.2f} {real / 1e6:9.2f}  {found / real:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
