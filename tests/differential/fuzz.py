"""Draws new programs for as long as told, and keeps what fails as tests: ``make fuzz MINUTES=30``.

    python -m tests.differential.fuzz --minutes 30
    python -m tests.differential.fuzz --minutes 30 --seed 5 tests/differential/test_fsdp_truth.py

Beside programs, ways in which ranks lose each other are drawn (``tests/faults/test_drawn.py``). Each file has an
equal share of the time, so that the last ones have their turn; who ends early leaves time for a second round.

A failing example is made small and written to ``tests/differential/found/``, where ``make test`` finds it. Move it to
the named regressions when its cause is known.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.differential.keeping import FOUND

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMES = 4  # as many examples a round as a normal run has


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="the first round's; default: new ones"
    )
    parser.add_argument(
        "tests",
        nargs="*",
        help="files to draw from; default: all that draw",
    )
    options = parser.parse_args()
    drawing = [*HERE.glob("test_*.py"), ROOT / "tests" / "faults" / "test_drawn.py"]
    files = options.tests or sorted(str(p.relative_to(ROOT)) for p in drawing)
    end, before = time.monotonic() + 60 * options.minutes, set(FOUND.glob("*.py"))
    counts: Counter[str] = Counter()
    seed, share = options.seed, 60 * options.minutes / len(files)
    while time.monotonic() < end:
        for file in files:
            left = end - time.monotonic()
            if left > 0:
                counts += _draw(file, min(left, share), seed)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}\n{'check':40} {'examples':>10}")
    for name, count in sorted(counts.items()):
        print(f"{name:40} {count:10}")
    found = sorted(set(FOUND.glob("*.py")) - before)
    print(f"{len(found)} failures" + "".join(f"\n  {path.relative_to(ROOT)}" for path in found))
    return 1 if found else 0


def _draw(file: str, seconds: float, seed: int) -> Counter[str]:
    """One round of a file's drawn tests, at most so many seconds; examples that each check has seen."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        drawing = {"SHARDKIT_FUZZ": str(TIMES), "SHARDKIT_SHRINK": "1", "SHARDKIT_FUZZ_COUNTS": str(counts)}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "--timeout=0", file]
        command.append(f"--hypothesis-seed={seed}")
        # with a session of its own: what pytest started would outlive it
        drawn = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **drawing}, start_new_session=True)
        try:
            drawn.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"{file}: time is over")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(drawn.pid, signal.SIGKILL)
            drawn.wait()
        lines = counts.read_text().splitlines() if counts.exists() else []
    return Counter({name: int(count) for name, count in (line.split() for line in lines)})


if __name__ == "__main__":
    sys.exit(main())
