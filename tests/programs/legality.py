"""Which programs one process with plain torch defines the outcome of."""

from __future__ import annotations

import math

from .optimizers import STEPLESS
from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Fail,
    Node,
    Program,
    Reload,
    SetTrainable,
    Sharded,
    Step,
    Train,
    Unit,
    ZeroGrad,
)

UNEVENLY_USED = {"branch", "unused", "cut"}
REENTRANT = {"checkpoint_reentrant", "recomputed_reentrant", "checkpointed"}
RECOMPUTING = {"checkpoint", "recomputed", *REENTRANT}


class Ledger:
    """What gradients exist between the steps of a program.

    Attributes:
        waiting: gradients of ranks that have not been combined.
        reduced: gradients that have been.
    """

    def __init__(self, kinds: set[str], options: Unit | Sharded) -> None:
        self._kinds = kinds
        self._units = isinstance(options, Unit)
        self.waiting = self.reduced = False

    def allows(self, step: AnyStep) -> bool:
        """Whether one process defines what comes of it."""
        if isinstance(step, Train):
            return self._trains(step)
        if isinstance(step, Clip):
            if step.norm_type == math.inf and "empty" in self._kinds:
                return False  # torch: no maximum of nothing
            if "sparse" in self._kinds:
                return False  # torch has no norm of sparse gradients
        if isinstance(step, Fail) and step.where == "backward" and "cut" in self._kinds:
            return False  # ranks that fail in different places of backward are out of step
        if isinstance(step, (SetTrainable, AddGroup)):
            # what a frozen parameter does with the gradient that it still has is nobody's promise
            return not self.waiting and not self.reduced
        if not self.waiting:
            return True
        if self._units:  # nobody looks at what ranks have not combined
            return step.set_to_none if isinstance(step, ZeroGrad) else not isinstance(step, (Step, Clip))
        # also a zeroing to None would do, but which ranks hold a gradient at all may then differ
        return step == Fail("no_sync")

    def _trains(self, step: Train) -> bool:
        if self._units and step.mode == "twice" and self._kinds & RECOMPUTING:
            return False  # torch frees what it computed anew
        # DistributedDataParallel refuses that, too: one backward runs several of them for the same parameters
        return not (self._kinds & REENTRANT and step.mode == "sum" and (self._units or not step.no_sync))

    def note(self, step: AnyStep) -> None:
        if isinstance(step, Train):
            self.waiting = step.no_sync
            self.reduced = self.reduced or not step.no_sync
        elif isinstance(step, Step) and step.closure:
            self.reduced = True
        elif isinstance(step, ZeroGrad):
            if step.set_to_none:
                self.waiting = self.reduced = False
        elif isinstance(step, Reload) or (isinstance(step, Fail) and step.where != "no_sync"):
            self.waiting = self.reduced = False


def meaningful(program: Program) -> bool:
    """Whether one process defines the outcome of every step."""
    kinds = program.model.kinds
    if any(_repeats_reentrant(node) or _cuts_reentrant(node) for node in program.model.nodes):
        return False
    sums = any(isinstance(s, Train) and s.mode == "sum" for s in program.steps)
    if program.sharded is None and sums and "cut" in kinds and program.routing != "same":
        return False  # one backward of two forwards has no plan, through which ranks that leave early could go on
    if program.model.head_frozen and "cut" in kinds:
        return False  # a backward of nothing
    if program.optimizer.name == "adafactor" and "empty" in kinds:
        return False  # divides by the number of elements
    if program.optimizer.name == "sgd_fused" and uneven(program):
        return False  # torch's kernel refuses a first gradient where others have momentum already
    if program.sharded is None and uneven(program) and program.optimizer.name not in STEPLESS:
        return False
    if Fail("backward") in program.steps and program.routing != "same" and "branch" in kinds:
        return False  # a rank may wait for gradients that others have not sent when they fail
    ledger = Ledger(kinds, program.options)
    for step in program.steps:
        if not ledger.allows(step):
            return False
        ledger.note(step)
    return True


def _repeats_reentrant(node: Node, twice: bool = False) -> bool:
    """Whether one backward runs a re-entrant checkpoint twice whose parameters belong to a unit around it.

    Each run ends as if all gradients of the unit were there; DistributedDataParallel refuses that, too.
    """

    def outside(n: Node) -> bool:
        return n.unit is None and (not n.children or any(outside(c) for c in n.children))

    if twice and node.kind in REENTRANT and (not node.children or any(outside(c) for c in node.children)):
        return True
    return any(_repeats_reentrant(c, twice or node.kind == "twice") for c in node.children)


def _cuts_reentrant(node: Node, within: bool = False) -> bool:
    """Whether all that a re-entrant checkpoint returns may be cut off: its backward is an error of torch's."""
    within = within or node.kind in REENTRANT
    return (within and node.kind == "cut") or any(_cuts_reentrant(c, within) for c in node.children)


def uneven(program: Program) -> bool:
    """Whether a parameter may have no gradient while its neighbours have one."""
    frozen_later = any(isinstance(s, SetTrainable) for s in program.steps)
    return frozen_later or bool(program.model.kinds & UNEVENLY_USED)
