"""docs/RELIABILITY.md from the cases, which are run for it: ``python -m tests.faults.report [case ...]``.

Takes about 15 minutes: most of it is waiting for ranks that hang. The page is written after each outcome, so that
nothing measured is lost; with names of cases it measures these again and keeps what the page says of the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

from tests.faults.cases import CASES, OTHERS, Case
from tests.faults.running import HANGS, KILLED, Outcome, run_case

REPORT = Path(__file__).resolve().parents[2] / "docs" / "RELIABILITY.md"
LIMIT = 30.0  # seconds
AT_ONCE = 4
NOT_MEASURED = "not measured"
NAMES = {"fsdp": "FSDP", "sharded_ddp": "ShardedDDP + OSS", "ddp": "torch DDP", "fsdp2": "torch FSDP2"}
Cells = dict[tuple[str, str], str]  # by names of case and strategy

HEAD = """\
# When ranks lose each other

One rank has a batch more than the others, or is killed, or swallows an error: what do the other ranks do then? This
page says it for each case of `tests/faults/cases.py`, which `tests/faults/test_cases.py` runs too. It is made by
`python -m tests.faults.report`.

Each case is one small training on processes of one machine, connected by gloo. The columns:

- **case**, **what happens**: the case's name, and what goes wrong after a first step that went well.
- **FSDP**, **ShardedDDP + OSS**: the training with shardkit's wrappers.
- **torch DDP**, **torch FSDP2**: the same program with torch's, where it makes sense there.

A cell says how those ranks end that the case itself neither ends nor puts to sleep, and after how many seconds the
last of them does, counted from the end of the first step. Each was measured once, with torch {torch} on Linux, with
{cores} CPU cores, four cases at a time and beside other programs: small differences between cells mean nothing.
`tests/faults/test_cases.py` asserts that shardkit's errors come within 10 s and what the machine held the ranks up.

- `OutOfStepError`, `RankLostError`: shardkit's own. Other errors are torch's.
- *goes on*: no error. Right for what is only slow, and where the strategy does not mind (DDP gathers no parameters, so
  it doesn't matter in which order blocks are called). Otherwise it is a program that trains on with other numbers than
  it should.
- *hangs*: was waited for {limit:.0f} s. Without that it would wait for the process group's timeout, which is 30 minutes
  unless `init_process_group(timeout=)` says something else.
- *crashes*: the process ends without a Python error.
{not_measured}- a dash: makes no sense with that strategy.

What is not covered:

- A view of a gathered weight (`weight.t()`, `weight[0]`, `weight.data[0]`) that is kept outside of modules, in a list,
  and read between forward and backward, or with torch 2.9 at any time, ends the process (SIGSEGV), as with FSDP2: keep
  a `clone()`. After backward, or a forward without gradients, it raises a LifecycleError.
- CUDA with NCCL: shardkit doesn't watch waits there. They end when NCCL's own watchdog ends the job, after the process
  group's timeout. Gathers in another order are noticed, by the rank that leaves the order; the other ranks hear of it
  when they gather or reduce next, or a few seconds after their host began to wait for the device.
- TPUs: nothing compares what the chips run. On XLA replicas on a CPU these are refused on all ranks: units or modules
  in another order, another learning rate, and a gradient that one rank clears (with FSDP, and with an `OSS` alone).
- A learning rate that changes in every step costs one agreement through the job's store a step, 0.4 ms at 2 ranks and
  1.1 ms at 8 here, a barrier of gloo's 0.4 and 2.9 ms.
- `ShardedDDP` with `OSS`: a gradient counts where its owner has it. One that another rank clears is not missed, and all
  ranks get the owner's result. A rank that owns no gradient at all (there are more ranks than parameters) takes no part
  in `torch.nn.utils.clip_grad_norm_`: all raise OutOfStepError; `OSS.clip_grad_norm` asks all ranks.
- Parameters of a `ShardedDDP` that a program updates by itself (`p.data -= lr * p.grad`, or `p.sub_`): their owners
  alone have gradients, so that each rank changes other ones, and ranks part in silence. Step an `OSS`.
- What writes `param.grad` by itself in backward, as fused kernels of other libraries do, is not reduced by
  `ShardedDDP`.
- A tensor with a graph that leaves a module otherwise than in what it returns or keeps as an attribute (in a
  generator, a closure, a global list), and through which alone backward comes to the unit, is not waited for: its
  weights are not gathered again, and backward raises a LifecycleError that names rank and parameter. Return it.
- A rank of `ShardedDDP` that catches an error in forward or in its loss and goes on is out of step, also if it goes
  on with the same batch (anew, or in halves): nothing tells that from the next one. Evaluations there are in `eval()`
  or without gradients: a forward with them that one rank alone runs counts as one whose backward was left out. Inside
  of `no_sync` nothing is counted. Where ranks agree to leave out a batch of which one of them has run no forward,
  they do so inside of `uneven()`.
- A program that catches OutOfStepError or RankLostError on all ranks and goes on in the same groups: over gloo, what
  nobody has taken of the calls that differed may meet a later one, which then waits for the process group's timeout.
  Let the ranks end (`shardkit run --restarts` begins anew from the last checkpoint), or make other groups.
- Replicas of shards that one rank holds alone (`NO_SHARD`, a mesh of (replicas, 1)): a step that one rank leaves out is
  not noticed. Where shards are cut, the ranks that hold the others' parts notice it.
- A step that one rank leaves out just before `torch.distributed.checkpoint` saves `state_dict()` with DTensors, or
  `sharded_state_dict()`, and the job ends: neither asks the other ranks, since one alone may ask for its part, and what
  DCP sends is torch's. Ranks' parts of two steps are saved then. `shardkit.save_training` refuses it, and whatever
  follows (a forward, a step) raises the OutOfStepError.
- Norms, means and largest elements that a program takes by itself of what `parameters()` lists are those of this rank's
  part (over flat parameters and rows), in a loss, too (sums of terms by element, as L1 and L2, are right). Norms of
  gradients are warned of once. `summon_full_params()` gives whole values, and `fully_shard(dtensors=True)` DTensors.
- Start values drawn into what `parameters()` lists (`nn.init.normal_(p)`, `p.data.normal_()`) over flat parameters and
  rows are this rank's: ranks with one seed draw equal parts, and fans are those of parts. Draw before sharding, or
  inside of `summon_full_params()`.
- Norms: ranks that clip the gradients of two models in another order get a norm of both. (Gathers, backwards, steps and
  state dicts of two models in another order are refused.)
- Adam and other optimizers that count steps, over flat parameters (`FSDP`, `torch_fsdp` with `use_orig_params=False`):
  a parameter that sits out a step and takes part again (layer drop, freezing for a while) gets the count of the others
  in its flat parameter, so that its bias correction is another than in one process. All ranks say so once, in the log,
  with the parameter's name; `fully_shard` gives the numbers of one process. On XLA, where `OSS` updates flat segments
  too, a rank says what it knows of its own gradients: a param group of its own is the remedy there.
- A rank that is stopped, or whose network link goes down, can only be told from a slow one by the process group's
  timeout. The case below sets it to 6 s. `tests/faults/test_network.py` takes a link down where it may (Linux, root).
- More than one machine: all ranks of these cases share one.

"""


def _table(page: str) -> list[list[str]]:
    """The cells of each row that a page shows."""
    rows = [line.removeprefix("| ").removesuffix(" |") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.split(" | ")] for row in rows[1:]]


def _applies(case: Case, strategy: str) -> bool:
    return strategy in case.strategies or (strategy in OTHERS and case.compared)


def _cell(case: Case, outcomes: list[Outcome]) -> str:
    """How those ranks ended that the case itself neither ends nor puts to sleep."""
    told = [o for o in outcomes if not {KILLED, HANGS} & set(case.errors[o.rank])]
    hanging = [o for o in told if o.kind == HANGS]
    ended = [o for o in told if o.kind != HANGS]
    kinds = sorted({{"": "goes on", KILLED: "crashes"}.get(o.kind, o.kind) for o in ended})
    how = f"{', '.join(kinds)}: {max(o.seconds for o in ended):.1f} s" if ended else ""
    if not hanging:
        return how
    hangs = f"hangs (> {LIMIT:.0f} s)"
    return f"rank {', '.join(str(o.rank) for o in hanging)} {hangs}; {how}" if ended else hangs


def _unexpected(case: Case, outcomes: list[Outcome]) -> bool:
    return any(o.kind not in kinds for o, kinds in zip(outcomes, case.errors, strict=True))


def page_of(cells: Cells) -> str:
    lines = [
        f"| case | what happens | {' | '.join(NAMES.values())} |",
        "|---|---|" + "---|" * len(NAMES),
    ]
    for case in CASES:
        missing = {name: NOT_MEASURED if _applies(case, name) else "-" for name in NAMES}
        shown = " | ".join(cells.get((case.name, name), missing[name]) for name in NAMES)
        lines.append(f"| {case.name} | {case.description} | {shown} |")
    release = version("torch").split("+")[0]
    table = "\n".join(lines) + "\n"
    note = f"- *{NOT_MEASURED}*: nothing is known of it here.\n" if NOT_MEASURED in table else ""
    return HEAD.format(limit=LIMIT, torch=release, cores=os.cpu_count(), not_measured=note) + table


def known() -> Cells:
    """What the page says already."""
    rows = _table(REPORT.read_text()) if REPORT.exists() else []
    return {(row[0], name): cell for row in rows for name, cell in zip(NAMES, row[2:], strict=True)}


def measure(cases: Iterable[Case], cells: Cells) -> bool:
    """Runs cases and writes the page after each outcome.

    Args:
        cells: what is known; filled.

    Returns:
        Whether every case could be run, and ended with shardkit as :data:`CASES` says.
    """
    fine = True
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {pool.submit(run_case, c, n, LIMIT): (c, n) for n in NAMES for c in cases if _applies(c, n)}
        for done in as_completed(jobs):
            case, name = jobs[done]
            try:
                outcomes = done.result()
            except (TimeoutError, EOFError) as error:  # its ranks did not start
                sys.stderr.write(f"{name}: {case.name}: {error!r}\n")
                fine = False
                continue
            cells[case.name, name] = _cell(case, outcomes)
            REPORT.write_text(page_of(cells))
            sys.stdout.write(f"{name}: {case.name}: {cells[case.name, name]}\n")
            sys.stdout.flush()
            if name not in OTHERS and _unexpected(case, outcomes):
                sys.stderr.write(f"{name}: {case.name}: not as expected: {outcomes}\n")
                fine = False
    return fine


def main(names: list[str]) -> int:
    """Measures the named cases again, or all from the beginning."""
    cases = [case for case in CASES if case.name in names or not names]
    return 0 if measure(cases, known() if names else {}) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
