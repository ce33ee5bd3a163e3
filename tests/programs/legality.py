"""Which programs a library can be held to.

Two kinds of rules. :func:`meaningful` keeps programs whose result plain torch defines. :func:`fairscale_limit` names
why a program is outside of what fairscale 0.4.13 does right; what it names is exactly what shardkit does better, and is
compared with the truth alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from .optimizers import OPTIMIZERS
from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Evaluate,
    FailInBackward,
    FailInNoSync,
    Program,
    Reload,
    SetTrainable,
    Step,
    Train,
    ZeroGrad,
)

UNEVENLY_USED = {"branch", "unused"}
SCALAR_STATE = {"asgd", "nadam"}


def _pending(steps: tuple[AnyStep, ...]) -> Iterator[tuple[AnyStep, bool, bool]]:
    """Each step with two facts before it: local gradients wait for their reduction; reduced gradients exist."""
    waiting = reduced = False
    for step in steps:
        yield step, waiting, reduced
        if isinstance(step, Train):
            waiting = step.no_sync
            reduced = reduced or not step.no_sync
        elif isinstance(step, FailInBackward) or (isinstance(step, ZeroGrad) and step.set_to_none):
            waiting = reduced = False
        elif isinstance(step, Step) and step.closure:
            reduced = True
        elif isinstance(step, Reload):
            waiting = reduced = False


def meaningful(program: Program) -> bool:
    """Whether one process defines the outcome: nobody looks at gradients that ranks have not combined yet."""
    if program.optimizer.name == "adafactor" and "empty" in program.model.blocks:
        return False  # divides by the number of elements
    if "sparse" in program.model.blocks and _has(program, Clip):
        return False  # torch has no norm of sparse gradients
    if "empty" in program.model.blocks and any(
        isinstance(s, Clip) and s.norm_type == math.inf for s in program.steps
    ):
        return False  # torch: no maximum of nothing
    for step, waiting, reduced in _pending(program.steps):
        if waiting and not isinstance(step, (Train, FailInNoSync)):
            # also a zeroing to None would do, but which ranks hold a gradient at all may then differ
            return False
        if isinstance(step, (SetTrainable, AddGroup)) and reduced:
            return (
                False  # what a frozen parameter does with the gradient that it still has is nobody's promise
            )
    return True


def refused(program: Program) -> bool:
    """Whether shardkit may refuse it: one backward runs several re-entrant checkpoints of the same parameters.

    DistributedDataParallel refuses that too; the other kind of checkpoint (``use_reentrant=False``) works.
    """
    blocks = "checkpoint_reentrant" in program.model.blocks
    return blocks and any(isinstance(s, Train) and s.mode == "sum" and not s.no_sync for s in program.steps)


# ------------------------------------------------------------------------------------ what fairscale gets wrong
Limit = Callable[[Program, int], bool]


def _bucketed(program: Program, world_size: int) -> bool:
    return program.options.reduce_buffer_size > 0 and world_size > 1


def _has(program: Program, *kinds: type) -> bool:
    return any(isinstance(s, kinds) for s in program.steps)


def _zeroed_behind_its_back(program: Program, world_size: int) -> bool:
    return _bucketed(program, world_size) and any(
        isinstance(s, ZeroGrad) and s.target != "wrapper" and s.set_to_none for s in program.steps
    )


def _adds_to_reduced(program: Program, world_size: int) -> bool:
    grown = False  # gradients are there that have been reduced
    for step in program.steps:
        if isinstance(step, Train):
            if grown or step.mode in ("two", "twice"):
                return True
            grown = not step.no_sync
        elif isinstance(step, ZeroGrad):
            grown = grown and step.target == "optimizer" and bool(program.options.late)
        elif isinstance(step, (Reload, FailInBackward)):
            grown = False
        elif isinstance(step, Step) and step.closure:
            grown = True
    return False


def _stale_buffers(program: Program, world_size: int) -> bool:
    """Its buffers are brought around at the next forward outside of no_sync, so one inside starts with old ones."""
    return (
        program.options.broadcast_buffers
        and "running_mean" in program.model.blocks
        and any(isinstance(s, Train) and s.no_sync for s in program.steps)
    )


def _eval_with_gradients(program: Program, world_size: int) -> bool:
    """Eval rebuilds the buckets: gradients that are there no longer belong to them."""
    return any(isinstance(s, Evaluate) and reduced for s, _, reduced in _pending(program.steps))


def _clip_remembers(program: Program, world_size: int) -> bool:
    """The first clipping decides for good which parameters count."""
    return _has(program, Clip) and bool(set(program.model.blocks) & UNEVENLY_USED)


LIMITS: dict[str, Limit] = {
    "zero_grad to None of the optimizer or the inner module, with buckets": _zeroed_behind_its_back,
    "adds to gradients that were reduced already": _adds_to_reduced,
    "an exception in no_sync or in backward": lambda p, w: _has(p, FailInNoSync, FailInBackward),
    "freezing after construction": lambda p, w: _has(p, SetTrainable),
    "parameters outside of the optimizer, or added later": lambda p, w: bool(p.options.late),
    # Without buckets it hangs; with them ranks may send two buckets in different orders, and what nobody used gets a
    # gradient of zeros in place of none.
    "parameters that not all ranks use": lambda p, w: bool(set(p.model.blocks) & UNEVENLY_USED),
    "eval on one rank": lambda p, w: any(isinstance(s, Evaluate) and s.only_rank_0 for s in p.steps),
    "eval while gradients exist": _eval_with_gradients,
    "named or empty groups": lambda p, w: p.optimizer.form in ("named", "named_groups", "empty_group"),
    "schedulers that read defaults": lambda p, w: p.optimizer.scheduler in ("one_cycle", "cyclic"),
    "LBFGS": lambda p, w: p.optimizer.name == "lbfgs",
    "sparse gradients": lambda p, w: (
        "sparse" in p.model.blocks or OPTIMIZERS[p.optimizer.name].sparse == "must"
    ),
    "several dtypes": lambda p, w: "mixed_dtype" in p.model.blocks,
    "re-entrant checkpoints": lambda p, w: "checkpoint_reentrant" in p.model.blocks,
    "parameters without elements": lambda p, w: "empty" in p.model.blocks,
    "buffers inside no_sync": _stale_buffers,
    "clipping when gradients come and go": _clip_remembers,
    "clipping in double": lambda p, w: _has(p, Clip) and p.model.dtype == "float64",
    # torch casts floating state to the parameter's dtype, fairscale keeps what it is given
    "scalar state after loading": lambda p, w: p.optimizer.name in SCALAR_STATE and _has(p, Reload),
    "the wrapper's own options": lambda p, w: bool(p.options.partition),
    "broadcast_fp16 with other than fp32": lambda p, w: (
        p.options.broadcast_fp16 and p.model.dtype != "float32"
    ),
}


def fairscale_limit(program: Program, world_size: int) -> str | None:
    """Why fairscale can't be the reference for this program; None if it can."""
    for why, holds in LIMITS.items():
        if holds(program, world_size):
            return why
    return None
