"""What fairscale 0.4.13 gets wrong: why it can't be the reference for a program.

What is named here is what shardkit does better; such programs are compared with the truth alone. A program on which
fairscale is wrong shows as a missing rule, as fairscale is held to the truth, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .legality import UNEVENLY_USED, Ledger
from .models import Tree
from .optimizers import OPTIMIZERS
from .spec import (
    Clip,
    Evaluate,
    Fail,
    Inspect,
    Path,
    Peek,
    Program,
    Reload,
    SetTrainable,
    Sharded,
    Step,
    Train,
    ZeroGrad,
)

SCALAR_STATE = {"asgd", "nadam"}


def _has(program: Program, *kinds: type) -> bool:
    return any(isinstance(s, kinds) for s in program.steps)


# ------------------------------------------------------------------------------------ OSS and ShardedDataParallel
def _bucketed(program: Program, options: Sharded, world_size: int) -> bool:
    return options.reduce_buffer_size > 0 and world_size > 1


def _zeroed_behind_its_back(program: Program, options: Sharded, world_size: int) -> bool:
    return _bucketed(program, options, world_size) and any(
        isinstance(s, ZeroGrad) and s.target != "wrapper" and s.set_to_none for s in program.steps
    )


def _adds_to_reduced(program: Program, options: Sharded, world_size: int) -> bool:
    grown = False  # gradients are there that have been reduced
    for step in program.steps:
        if isinstance(step, Train):
            if grown or step.mode in ("two", "twice"):
                return True
            grown = not step.no_sync
        elif isinstance(step, ZeroGrad):
            grown = grown and step.target == "optimizer" and bool(options.late)
        elif isinstance(step, Reload) or step == Fail("backward"):
            grown = False
        elif isinstance(step, Step) and step.closure:
            grown = True
    return False


def _stale_buffers(program: Program, options: Sharded, world_size: int) -> bool:
    """Its buffers are brought around at the next forward outside of no_sync, so one inside starts with old ones."""
    return (
        options.broadcast_buffers
        and "running_mean" in program.model.kinds
        and any(isinstance(s, Train) and s.no_sync for s in program.steps)
    )


def _eval_with_gradients(program: Program, options: Sharded, world_size: int) -> bool:
    """Eval rebuilds the buckets: gradients that are there no longer belong to them."""
    ledger = Ledger(program.model.kinds, options)
    for step in program.steps:
        if isinstance(step, Evaluate) and ledger.reduced:
            return True
        ledger.note(step)
    return False


def _clip_remembers(program: Program, options: Sharded, world_size: int) -> bool:
    """The first clipping decides for good which parameters count."""
    return _has(program, Clip) and bool(program.model.kinds & UNEVENLY_USED)


SHARDED: dict[str, Callable[[Program, Sharded, int], bool]] = {
    "zero_grad to None of the optimizer or the inner module, with buckets": _zeroed_behind_its_back,
    "adds to gradients that were reduced already": _adds_to_reduced,
    "an exception in no_sync or in backward": lambda p, o, w: _has(p, Fail),
    "freezing after construction": lambda p, o, w: _has(p, SetTrainable),
    "parameters outside of the optimizer, or added later": lambda p, o, w: bool(o.late),
    # Without buckets it hangs; with them ranks may send two buckets in different orders, and what nobody used gets a
    # gradient of zeros in place of none.
    "parameters that not all ranks use": lambda p, o, w: bool(p.model.kinds & UNEVENLY_USED),
    "eval on one rank": lambda p, o, w: any(isinstance(s, Evaluate) and s.only_rank_0 for s in p.steps),
    "eval while gradients exist": _eval_with_gradients,
    "named or empty groups": lambda p, o, w: p.optimizer.form in ("named", "named_groups", "empty_group"),
    "schedulers that read defaults": lambda p, o, w: p.optimizer.scheduler in ("one_cycle", "cyclic"),
    "LBFGS": lambda p, o, w: p.optimizer.name == "lbfgs",
    "sparse gradients": lambda p, o, w: (
        "sparse" in p.model.kinds or OPTIMIZERS[p.optimizer.name].sparse == "must"
    ),
    "several dtypes": lambda p, o, w: "mixed_dtype" in p.model.kinds,
    "re-entrant checkpoints": lambda p, o, w: "checkpoint_reentrant" in p.model.kinds,
    "parameters without elements": lambda p, o, w: "empty" in p.model.kinds,
    "buffers inside no_sync": _stale_buffers,
    "clipping when gradients come and go": _clip_remembers,
    "clipping in double": lambda p, o, w: _has(p, Clip) and p.model.dtype == "float64",
    # torch casts floating state to the parameter's dtype, fairscale keeps what it is given
    "scalar state after loading": lambda p, o, w: p.optimizer.name in SCALAR_STATE and _has(p, Reload),
    "the wrapper's own options": lambda p, o, w: bool(o.partition),
    "broadcast_fp16 with other than fp32": lambda p, o, w: o.broadcast_fp16 and p.model.dtype != "float32",
}


# ------------------------------------------------------------------------------------ FSDP
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


FULLY_SHARDED: dict[str, Callable[[Program, Units, int], bool]] = {
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
    "loading full optimizer state that there is none of": lambda p, u, w: (
        p.optimizer.name == "sgd" and any(isinstance(s, Reload) and s.optimizer == "full" for s in p.steps)
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
    # the whole state has one count for all parameters; Adagrad, which starts with a state, alone has other ones
    "full optimizer state of frozen units": lambda p, u, w: (
        _gathers(p)
        and p.optimizer.name == "adagrad"
        and any(not x.requires_grad for params in u.params.values() for x in params.values())
    ),
    "local states into units below a fresh root": lambda p, u, w: (
        len(u.params) > 1
        and (w > 1 or any(o.move_params_to_cpu or o.cpu_offload for _, o in p.units()))
        and any(isinstance(s, Reload) and s.form == "local" for s in p.steps)
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
    if isinstance(program.options, Sharded):
        options = program.options
        return next((why for why, holds in SHARDED.items() if holds(program, options, world_size)), None)
    units = Units(program)
    return next((why for why, holds in FULLY_SHARDED.items() if holds(program, units, world_size)), None)
