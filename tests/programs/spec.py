"""A training program as plain data: a model, an optimizer, options, and a list of steps.

A program says what every rank does. It holds nothing but numbers, strings and tuples, so that it prints as the Python
expression that makes it (a failing example is copied into a regression test), pickles into rank processes and
converts to JSON.

Legend: W world size, B batch, D feature width.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

Reset = Literal["optimizer", "wrapper", "module"]


@dataclass(frozen=True)
class ModelSpec:
    """A stack of blocks on features [B, D]; see :mod:`tests.programs.models` for what each block's name means.

    Attributes:
        blocks: names of the blocks, in order.
        width: D.
        dtype: of parameters and inputs. Programs default to double, where rounding can't hide a wrong result.
        seed: of the start values.
    """

    blocks: tuple[str, ...]
    width: int = 4
    dtype: str = "float64"
    seed: int = 0


@dataclass(frozen=True)
class OptimizerSpec:
    """Which optimizer, and how parameters are put into groups.

    Attributes:
        name: a key of :data:`tests.programs.optimizers.OPTIMIZERS`.
        lr: of group 0; group i has ``lr / (i + 1)``.
        groups: parameters go round-robin into this many param groups (each with its own lr).
        form: what the constructor is given: "parameters" (one list; needs groups=1), "groups" (dicts), "named" and
            "named_groups" (with names), "empty_group" (one group more, empty).
        scheduler: name of an lr scheduler, or "".
    """

    name: str = "sgd"
    lr: float = 0.05
    groups: int = 1
    form: str = "parameters"
    scheduler: str = ""


@dataclass(frozen=True)
class Options:
    """Arguments of the wrapper, and how many optimizers share the module.

    Attributes:
        wrapper: "sharded" (ShardedDataParallel) or "ddp" (torch's DistributedDataParallel, with OSS alone sharded).
        optimizers: number of OSS; parameters go to them in consecutive runs.
        late: the last block's parameters are in no optimizer until an :class:`AddGroup` step; "frozen" or
            "trainable" says what they are before, "" that there are none.
        partition: OSS's own argument (shardkit only); "" leaves it out.
    """

    broadcast_buffers: bool = True
    reduce_buffer_size: int = 2**23
    reduce_fp16: bool = False
    broadcast_fp16: bool = False
    optimizers: int = 1
    late: str = ""
    partition: str = ""
    wrapper: str = "sharded"


# ------------------------------------------------------------------------------------------------ steps
@dataclass(frozen=True)
class Train:
    """Forward and backward on this rank's own batch.

    Attributes:
        mode: "once"; "two" (two forwards, then their backwards one after the other); "sum" (two forwards, one
            backward of the sum); "twice" (one forward, backward twice with retain_graph).
        no_sync: inside the wrapper's ``no_sync()``.
    """

    mode: str = "once"
    no_sync: bool = False


@dataclass(frozen=True)
class FailInNoSync:
    """An exception leaves ``no_sync()`` before its forward; the program catches it and goes on."""


@dataclass(frozen=True)
class FailInBackward:
    """Every rank's backward raises halfway; the program catches it, zeroes gradients (to None) and goes on."""


@dataclass(frozen=True)
class ZeroGrad:
    target: Reset = "wrapper"
    set_to_none: bool = True


@dataclass(frozen=True)
class Step:
    """The optimizers step; with ``closure`` each re-evaluates its own batch (zero_grad, forward, backward)."""

    closure: bool = False


@dataclass(frozen=True)
class Clip:
    max_norm: float = 0.5
    norm_type: float = 2.0


@dataclass(frozen=True)
class SetTrainable:
    """Freezes or unfreezes all parameters of one block."""

    block: int
    trainable: bool


@dataclass(frozen=True)
class AddGroup:
    """The late parameters become trainable and a group of the last optimizer."""


@dataclass(frozen=True)
class Evaluate:
    """A forward in eval mode without gradients, on all ranks or on rank 0 alone."""

    only_rank_0: bool = False


@dataclass(frozen=True)
class Save:
    """Consolidates on one rank (-1: all) and takes the state dict there."""

    recipient: int = -1


@dataclass(frozen=True)
class Reload:
    """Saves everything, builds a fresh model, optimizers and wrapper, loads into them, and goes on with those."""


@dataclass(frozen=True)
class Schedule:
    """Each scheduler steps."""


AnyStep = (
    Train
    | FailInNoSync
    | FailInBackward
    | ZeroGrad
    | Step
    | Clip
    | SetTrainable
    | AddGroup
    | Evaluate
    | Save
    | Reload
    | Schedule
)
_STEPS: dict[str, type[Any]] = {c.__name__: c for c in get_args(AnyStep)}


@dataclass(frozen=True)
class Program:
    """What every rank does.

    Attributes:
        data_seed: of the batches, which also depend on the step and the rank.
        routing: which branch a "branch" block takes: "same" on all ranks, "by_rank" different ones, "rank_0" the
            second branch on rank 0 only.
    """

    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    options: Options = Options()
    steps: tuple[AnyStep, ...] = ()
    data_seed: int = 0
    routing: str = "same"

    def to_json(self) -> str:
        body = dataclasses.asdict(self)
        body["steps"] = [{"step": type(s).__name__, **dataclasses.asdict(s)} for s in self.steps]
        return json.dumps(body)

    @staticmethod
    def from_json(text: str) -> Program:
        body = json.loads(text)
        model = {**body["model"], "blocks": tuple(body["model"]["blocks"])}
        steps = tuple(_STEPS[s.pop("step")](**s) for s in body["steps"])
        return Program(
            ModelSpec(**model),
            OptimizerSpec(**body["optimizer"]),
            Options(**body["options"]),
            steps,
            body["data_seed"],
            body["routing"],
        )
