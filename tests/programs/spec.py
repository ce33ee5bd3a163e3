"""A training program as plain data: a tree of modules, how they are sharded, an optimizer, and a list of steps.

A program says what every rank does. It holds numbers, strings and tuples only, so that it prints as the Python
expression that makes it (a failing example is copied into a regression test) and pickles into rank processes.

Legend: W world size, B batch, D feature width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

Path = tuple[int, ...]
Reset = Literal["optimizer", "wrapper", "module"]


def short(value: Any) -> str:
    """The expression that makes a program (or a part of it), without what is default."""
    if isinstance(value, tuple):
        return "(" + ", ".join(short(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return "float('inf')" if value == float("inf") else repr(value)
    named = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
    inner = ", ".join(f"{f.name}={short(v)}" for f, v in named if v != f.default)
    return f"{type(value).__name__}({inner})"


class Short:
    """Prints as :func:`short` does."""

    def __repr__(self) -> str:
        return short(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(short(self))  # what hypothesis prints of a failing example


@dataclass(frozen=True, repr=False)
class Unit(Short):
    """Arguments of FullyShardedDataParallel that a program sets; the rest keeps its default. Dtypes by name."""

    flatten_parameters: bool = True
    reshard_after_forward: bool = True
    disable_reshard_on_root: bool = True
    mixed_precision: bool = False
    fp32_reduce_scatter: bool = False
    compute_dtype: str = ""
    buffer_dtype: str = ""
    move_params_to_cpu: bool = False
    cpu_offload: bool = False
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: float = 25
    gradient_predivide_factor: float | None = None
    no_broadcast_optim_state: bool = False
    state_dict_on_rank_0_only: bool = False
    clear_autocast_cache: bool = False
    force_input_to_fp32: bool = False
    verbose: bool = False
    align: str | int | None = None  # of the core's FSDP alone

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments, those that differ from the default only."""
        found: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                found[f.name] = getattr(torch, value) if f.name.endswith("_dtype") else value
        return found

    @property
    def low_dtype(self) -> torch.dtype | None:
        """Dtype of computation where it is another one than the parameters'."""
        if not self.mixed_precision:
            return None
        return getattr(torch, self.compute_dtype or "float16")


@dataclass(frozen=True, repr=False)
class Sharded(Short):
    """Arguments of OSS and ShardedDataParallel, and how many optimizers share the module.

    Attributes:
        wrapper: "sharded" (ShardedDataParallel) or "ddp" (torch's DistributedDataParallel, with OSS alone sharded).
        optimizers: number of OSS; parameters go to them in consecutive runs.
        late: the last node's parameters are in no optimizer until an :class:`AddGroup` step; "frozen" or
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


@dataclass(frozen=True, repr=False)
class Node(Short):
    """A module of the tree; maps features [B, D] to features [B, D].

    Attributes:
        kind: a leaf (of :mod:`tests.programs.leaves`) or a composite (of :mod:`tests.programs.models`).
        children: of a composite.
        unit: options of the FSDP wrapper around this module; None: it belongs to the unit around it.
        frozen: before wrapping: "" nothing, "all", or what the names of parameters end with ("weight", "bias").
    """

    kind: str
    children: tuple[Node, ...] = ()
    unit: Unit | None = None
    frozen: str = ""


@dataclass(frozen=True, repr=False)
class ModelSpec(Short):
    """A chain of nodes and a head to one number.

    Attributes:
        nodes: in the order of forward; a path names a node by its index here, then among its parent's children.
        width: D.
        dtype: of parameters and inputs.
        seed: of the start values.
        head_frozen: whether the head, which is the root unit's own, is frozen before wrapping.
    """

    nodes: tuple[Node, ...]
    width: int = 4
    dtype: str = "float64"
    seed: int = 0
    head_frozen: bool = False

    def walk(self) -> list[tuple[Path, Node]]:
        """All nodes with their paths, parents first."""
        found: list[tuple[Path, Node]] = []

        def visit(path: Path, node: Node) -> None:
            found.append((path, node))
            for i, child in enumerate(node.children):
                visit((*path, i), child)

        for i, node in enumerate(self.nodes):
            visit((i,), node)
        return found

    @property
    def kinds(self) -> set[str]:
        return {node.kind for _, node in self.walk()}


def stack(*kinds: str, width: int = 4, dtype: str = "float64", seed: int = 0) -> ModelSpec:
    """A chain of leaves."""
    return ModelSpec(tuple(Node(kind) for kind in kinds), width, dtype, seed)


@dataclass(frozen=True, repr=False)
class OptimizerSpec(Short):
    """Which optimizer, and how parameters are put into groups.

    Attributes:
        name: a key of :data:`tests.programs.optimizers.OPTIMIZERS`.
        lr: of group 0; group i has ``lr / (i + 1)``.
        groups: parameters go round-robin into this many param groups (each with its own lr).
        form: what the constructor is given: "parameters" (one list), "groups" (dicts), "even_groups" (dicts with the
            same lr), "named" and "named_groups" (with names), "empty_group" (one group more, empty).
        scheduler: name of an lr scheduler, or "".
    """

    name: str = "sgd"
    lr: float = 0.05
    groups: int = 1
    form: str = "parameters"
    scheduler: str = ""


# ------------------------------------------------------------------------------------------------ steps
@dataclass(frozen=True, repr=False)
class Train(Short):
    """Forward and backward on this rank's own batch.

    Attributes:
        mode: "once"; "two" (two forwards, then their backwards one after the other); "sum" (two forwards, one
            backward of the sum); "twice" (one forward, backward twice with retain_graph).
        no_sync: inside the wrapper's ``no_sync()``.
    """

    mode: str = "once"
    no_sync: bool = False


@dataclass(frozen=True, repr=False)
class Evaluate(Short):
    """A forward without backward.

    Attributes:
        mode: "no_grad" and "inference" (in eval mode), or "dropped" (a training forward whose loss nobody uses).
        only_rank_0: the other ranks do nothing (not with FSDP).
    """

    mode: str = "no_grad"
    only_rank_0: bool = False


@dataclass(frozen=True, repr=False)
class Fail(Short):
    """Every rank raises; the program catches it, zeroes gradients (to None; not for "no_sync") and goes on.

    Attributes:
        where: "forward" (after all nodes), "backward" (before the first node is done) or "no_sync" (before its
            forward).
    """

    where: str = "backward"


@dataclass(frozen=True, repr=False)
class ZeroGrad(Short):
    target: Reset = "wrapper"
    set_to_none: bool = True


@dataclass(frozen=True, repr=False)
class Step(Short):
    """The optimizers step; with ``closure`` each re-evaluates its own batch (zero_grad, forward, backward)."""

    closure: bool = False


@dataclass(frozen=True, repr=False)
class Clip(Short):
    max_norm: float = 0.5
    norm_type: float = 2.0


@dataclass(frozen=True, repr=False)
class SetTrainable(Short):
    """Freezes or unfreezes parameters of one node after wrapping.

    Attributes:
        names: "all", or what the names of parameters end with.
    """

    path: Path
    trainable: bool
    names: str = "all"


@dataclass(frozen=True, repr=False)
class Reload(Short):
    """Saves, builds a fresh model, wrapper and optimizer, loads into them, and goes on with those.

    Attributes:
        form: of FSDP's model: "full" (state_dict), "local" (local_state_dict), "consolidated" (local dicts and
            metadata of all ranks made into a full one).
        optimizer: of FSDP: "full" (gathered on rank 0, then each rank takes its part), "local" (the optimizer's own
            state dict of this rank).
    """

    form: str = "full"
    optimizer: str = "full"


# ------------------------------------------------------------------------------------------------ steps of OSS
@dataclass(frozen=True, repr=False)
class AddGroup(Short):
    """The late parameters become trainable and a group of the last optimizer."""


@dataclass(frozen=True, repr=False)
class Save(Short):
    """Consolidates on one rank (-1: all) and takes the state dict there."""

    recipient: int = -1


@dataclass(frozen=True, repr=False)
class Schedule(Short):
    """Each scheduler steps."""


# ------------------------------------------------------------------------------------------------ steps of FSDP
@dataclass(frozen=True, repr=False)
class Look(Short):
    """Takes the full state dict."""


@dataclass(frozen=True, repr=False)
class Summon(Short):
    """Reads all parameters within ``summon_full_params``; ``write`` adds a constant to each.

    With ``volatile``, nobody promises what becomes of a write, so there is none.
    """

    write: bool = False
    volatile: bool = False


@dataclass(frozen=True, repr=False)
class Peek(Short):
    """Reaches for every parameter between steps, where most have no values: that is right, or refused by name.

    Attributes:
        how: "print", "sum", "clone", "lerp" (into another tensor), "numpy", "write" (its own values) or "copy" (of the
            module).
    """

    how: str = "sum"


@dataclass(frozen=True, repr=False)
class Inspect(Short):
    """Takes what others read of the formats: names, local state dict, metadata, the optimizer's full state dict."""

    optimizer: bool = True


AnyStep = (
    Train | Evaluate | Fail | ZeroGrad | Step | Clip | SetTrainable | Reload
    | AddGroup | Save | Schedule | Look | Summon | Peek | Inspect
)  # fmt: skip
MOMENTUM = OptimizerSpec("momentum")


@dataclass(frozen=True, repr=False)
class Program(Short):
    """What every rank does.

    Attributes:
        options: of the root's FSDP wrapper (:class:`Unit`), or of OSS and ShardedDataParallel (:class:`Sharded`).
        data_seed: of the batches, which also depend on the step and the rank.
        routing: which branch a "branch" block takes: "same" on all ranks, "by_rank" different ones, "rank_0" the
            second branch on rank 0 only.
    """

    model: ModelSpec
    options: Unit | Sharded = Unit()
    optimizer: OptimizerSpec = MOMENTUM
    steps: tuple[AnyStep, ...] = ()
    data_seed: int = 0
    routing: str = "same"

    @property
    def sharded(self) -> Sharded | None:
        """The options of a program for OSS and ShardedDataParallel."""
        return self.options if isinstance(self.options, Sharded) else None

    def units(self) -> list[tuple[Path, Unit]]:
        """Paths and options of all FSDP units, the root's first."""
        root = [] if isinstance(self.options, Sharded) else [((), self.options)]
        return [*root, *((p, n.unit) for p, n in self.model.walk() if n.unit is not None)]

    @property
    def low_dtype(self) -> torch.dtype | None:
        """Dtype of computation where it is another one than the parameters'."""
        return None if isinstance(self.options, Sharded) else self.options.low_dtype
