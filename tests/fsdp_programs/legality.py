"""Which programs a library can be held to.

Two kinds of rules. :class:`Ledger` and :func:`meaningful` keep programs whose result plain torch defines.
:func:`fairscale_limit` names why a program is outside of what fairscale 0.4.13 does right; what it names is what
shardkit does better, and is compared with the truth alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from tests.programs.spec import Clip, Step, Train, ZeroGrad

from .models import Tree
from .spec import AnyStep, Fail, Inspect, Node, Path, Peek, Program, Reload, SetTrainable

UNEVENLY_USED = {"branch", "unused", "cut"}
REENTRANT = {"checkpoint_reentrant", "recomputed_reentrant", "checkpointed"}
RECOMPUTING = {"checkpoint", "recomputed", *REENTRANT}
# No count of steps in their state: a vector has one count for all of its parameters. (torch's fused SGD fails where
# a parameter has its first gradient later than others.)
STEPLESS = ("sgd", "momentum", "rmsprop", "adagrad", "adadelta")
COUNTING = ("sgd_fused", "adam", "adam_foreach", "adam_fused", "adamw_fused", "adamw_loop", "radam", "adamax")


class Ledger:
    """What gradients exist between the steps of a program.

    Attributes:
        waiting: gradients of ranks that have not been combined.
        reduced: gradients that have been.
    """

    def __init__(self, kinds: set[str]) -> None:
        self._kinds = kinds
        self.waiting = self.reduced = False

    def allows(self, step: AnyStep) -> bool:
        """Whether one process defines what comes of it."""
        if isinstance(step, Train):
            return self._trains(step)
        if isinstance(step, Clip) and step.norm_type == math.inf and "empty" in self._kinds:
            return False  # torch: no maximum of nothing
        if isinstance(step, Fail) and step.where == "backward" and "cut" in self._kinds:
            return False  # ranks that fail in different places of backward are out of step
        if isinstance(step, SetTrainable):
            # what a frozen parameter does with the gradient that it still has is nobody's promise
            return not self.waiting and not self.reduced
        if self.waiting:
            if isinstance(step, ZeroGrad):
                return step.set_to_none
            return not isinstance(step, (Step, Clip))  # nobody looks at what ranks have not combined
        return True

    def _trains(self, step: Train) -> bool:
        if step.mode == "twice" and self._kinds & RECOMPUTING:
            return False  # torch frees what it computed anew
        # DistributedDataParallel refuses that, too: one backward runs several of them for the same parameters
        return not (self._kinds & REENTRANT and step.mode == "sum")

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
    if any(_repeats_reentrant(node) for node in program.model.nodes):
        return False
    if program.model.head_frozen and "cut" in kinds:
        return False  # a backward of nothing
    if uneven(program) and program.optimizer.name not in STEPLESS:
        return False
    ledger = Ledger(kinds)
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


def uneven(program: Program) -> bool:
    """Whether a parameter may have no gradient while its neighbours have one."""
    return bool(program.model.kinds & UNEVENLY_USED) or _has(program, SetTrainable)


# ------------------------------------------------------------------------------------ units
class Units:
    """What a program's units hold, with their options.

    Attributes:
        params: for each unit, its own parameters: name -> (parameter, whether it is trainable).
        options: by path.
    """

    def __init__(self, program: Program) -> None:
        tree = Tree(program.model)
        self.options = dict(program.units())
        self.params: dict[Path, dict[str, nn.Parameter]] = {path: {} for path in self.options}
        names = {m: n for n, m in tree.model.named_modules()}
        owners: dict[nn.Module, Path] = dict.fromkeys(tree.model.modules(), ())
        for path in sorted(self.options, key=len):
            owners |= dict.fromkeys(tree.modules[path].modules(), path)
        for m, path in owners.items():
            self.params[path] |= {f"{names[m]}.{n}": getattr(m, n) for n in tree.attributes[m]}
        self.buffers = dict(tree.model.named_buffers())
        self.persistent = set(tree.model.state_dict())

    def flat(self, flattened: bool) -> list[dict[str, nn.Parameter]]:
        """Parameters of the units that are flattened, or of those that aren't."""
        return [p for path, p in self.params.items() if self.options[path].flatten_parameters == flattened]

    def shared_across(self) -> bool:
        """Whether two units use one parameter."""
        sets = [set(p.values()) for p in self.params.values()]
        return sum(map(len, sets)) > len(set().union(*sets))


# ------------------------------------------------------------------------------------ what fairscale gets wrong
def _has(program: Program, *kinds: type) -> bool:
    return any(isinstance(s, kinds) for s in program.steps)


def _trains_again(program: Program) -> bool:
    """Whether reduced gradients are added to."""
    grown = False
    for step in program.steps:
        if isinstance(step, Train):
            if grown:
                return True
            grown = not step.no_sync
        elif isinstance(step, (ZeroGrad, Reload, Fail)):
            grown = False
    return False


def _gathers(program: Program) -> bool:
    return any(
        (isinstance(s, Reload) and s.optimizer == "full") or (isinstance(s, Inspect) and s.optimizer)
        for s in program.steps
    )


def _steps_after_gathering(program: Program, units: Units, world_size: int) -> bool:
    """It makes numbers of the counts of steps, which torch wants as tensors."""
    asked = [i for i, s in enumerate(program.steps) if isinstance(s, Inspect) and s.optimizer]
    return (
        bool(asked)
        and program.optimizer.name not in ("sgd", "momentum", "sgd_fused")
        and any(isinstance(s, Step) for s in program.steps[asked[0] :])
    )


Limit = Callable[[Program, Units, int], bool]
LIMITS: dict[str, Limit] = {
    "reading parameters between steps": lambda p, u, w: _has(p, Peek),
    "this library's checkpoints": lambda p, u, w: "checkpointed" in p.model.kinds,
    "dtypes": lambda p, u, w: p.model.dtype != "float32" or "mixed_dtype" in p.model.kinds,
    "a vector of frozen and trainable parameters": lambda p, u, w: any(
        len({x.requires_grad for x in params.values()}) > 1 for params in u.flat(True)
    ),
    "a parameter in two units": lambda p, u, w: u.shared_across(),
    "tied parameters without a vector": lambda p, u, w: any(
        len(set(params.values())) < len(params) for params in u.flat(False)
    ),
    "adding to one element without a vector": lambda p, u, w: (
        _trains_again(p) and any(x.numel() == 1 for params in u.flat(False) for x in params.values())
    ),
    "frozen parameters without a vector": lambda p, u, w: any(
        not x.requires_grad for params in u.flat(False) for x in params.values()
    ),
    "offloading a unit without parameters": lambda p, u, w: any(
        not u.params[path] and (o.move_params_to_cpu or o.cpu_offload) for path, o in p.units()
    ),
    "full optimizer state without a vector, or of one rank": lambda p, u, w: (
        _gathers(p) and (w == 1 or any(not o.flatten_parameters for _, o in p.units()))
    ),
    "loading full optimizer state where a unit has none": lambda p, u, w: (
        any(isinstance(s, Reload) and s.optimizer == "full" for s in p.steps)
        and any(params and not any(x.requires_grad for x in params.values()) for params in u.params.values())
    ),
    "loading full optimizer state of single numbers": lambda p, u, w: (
        any(isinstance(s, Reload) and s.optimizer == "full" for s in p.steps)
        and any(x.dim() == 0 for params in u.params.values() for x in params.values())
    ),
    "dividing by more than the number of ranks": lambda p, u, w: any(
        (o.gradient_predivide_factor or 0) > w for _, o in p.units()
    ),
    "numbers without a vector on one rank": lambda p, u, w: (
        w == 1 and any(x.dim() == 0 for params in u.flat(False) for x in params.values())
    ),
    "a step after the full optimizer state was asked for": _steps_after_gathering,
    "local states into units below a fresh root": lambda p, u, w: (
        len(u.params) > 1 and w > 1 and any(isinstance(s, Reload) and s.form == "local" for s in p.steps)
    ),
    "consolidating tied parameters": lambda p, u, w: (
        any(len(set(params.values())) < len(params) for params in u.params.values())
        and any(isinstance(s, Reload) and s.form == "consolidated" for s in p.steps)
    ),
    "consolidating without a vector on one rank": lambda p, u, w: (
        w == 1
        and bool(u.flat(False))
        and any(isinstance(s, Reload) and s.form == "consolidated" for s in p.steps)
    ),
    "compute dtype": lambda p, u, w: any(o.low_dtype not in (None, torch.float16) for _, o in p.units()),
    "mixed precision with two calls in one backward": lambda p, u, w: (
        any(o.mixed_precision for _, o in p.units())
        and ("twice" in p.model.kinds or any(isinstance(s, Train) and s.mode == "sum" for s in p.steps))
    ),
    "consolidating buffers that state dicts leave out": lambda p, u, w: (
        bool(set(u.buffers) - u.persistent)
        and any(isinstance(s, Reload) and s.form == "consolidated" for s in p.steps)
    ),
}


def fairscale_limit(program: Program, world_size: int) -> str | None:
    """Why fairscale can't be the reference for this program; None if it can."""
    units = Units(program)
    for why, holds in LIMITS.items():
        if holds(program, units, world_size):
            return why
    return None
