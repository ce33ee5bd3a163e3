"""A training program for FullyShardedDataParallel as plain data: a tree of modules, options, and a list of steps.

A program says what every rank does. It holds numbers, strings and tuples only, so that it prints as the Python
expression that makes it (a failing example is copied into a regression test) and pickles into rank processes.

Legend: W world size, B batch, D feature width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from tests.programs.spec import Clip, OptimizerSpec, Step, Train, ZeroGrad

Path = tuple[int, ...]


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
class Options(Short):
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
class Node(Short):
    """A module of the tree; maps features [B, D] to features [B, D].

    Attributes:
        kind: a leaf (a block of :mod:`tests.programs.models`, or "shared") or a composite of
            :mod:`tests.fsdp_programs.models`.
        children: of a composite.
        unit: options of the wrapper around this module; None: it belongs to the unit around it.
        frozen: before wrapping: "" nothing, "all", or what the names of parameters end with ("weight", "bias").
    """

    kind: str
    children: tuple[Node, ...] = ()
    unit: Options | None = None
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


# ------------------------------------------------------------------------------------------------ steps
@dataclass(frozen=True)
class Evaluate:
    """A forward without backward.

    Attributes:
        mode: "no_grad" and "inference" (in eval mode), or "dropped" (a training forward whose loss nobody uses).
    """

    mode: str = "no_grad"


@dataclass(frozen=True)
class Fail:
    """Every rank raises; the program catches it, zeroes gradients (to None; not for "no_sync") and goes on.

    Attributes:
        where: "forward" (after all nodes), "backward" (before the first node is done) or "no_sync" (before its
            forward).
    """

    where: str = "backward"


@dataclass(frozen=True)
class SetTrainable:
    """Freezes or unfreezes parameters of one node after wrapping.

    Attributes:
        names: "all", or what the names of parameters end with.
    """

    path: Path
    trainable: bool
    names: str = "all"


@dataclass(frozen=True)
class Look:
    """Takes the full state dict."""


@dataclass(frozen=True)
class Summon:
    """Reads all parameters within ``summon_full_params``; ``write`` adds a constant to each.

    With ``volatile``, nobody promises what becomes of a write, so there is none.
    """

    write: bool = False
    volatile: bool = False


@dataclass(frozen=True)
class Peek:
    """Reaches for every parameter between steps, where most have no values: that is right, or refused by name.

    Attributes:
        how: "print", "sum", "clone", "lerp" (into another tensor), "numpy", "write" (its own values) or "copy" (of the
            module).
    """

    how: str = "sum"


@dataclass(frozen=True)
class Reload:
    """Saves, builds a fresh model, wrapper and optimizer, loads into them, and goes on with those.

    Attributes:
        form: "full" (state_dict), "local" (local_state_dict), "consolidated" (local dicts and metadata of all ranks
            made into a full one).
        optimizer: "full" (gathered on rank 0, then each rank takes its part), "local" (the optimizer's own state
            dict of this rank).
    """

    form: str = "full"
    optimizer: str = "full"


@dataclass(frozen=True)
class Inspect:
    """Takes what others read of the formats: names, local state dict, metadata, the optimizer's full state dict."""

    optimizer: bool = True


MOMENTUM = OptimizerSpec("momentum")
AnyStep = (
    Train | ZeroGrad | Step | Clip | Evaluate | Fail | SetTrainable | Look | Peek | Summon | Reload | Inspect
)


@dataclass(frozen=True, repr=False)
class Program(Short):
    """What every rank does.

    Attributes:
        options: of the root's wrapper.
        data_seed: of the batches, which also depend on the step and the rank.
        routing: which branch a "branch" block takes: "same" on all ranks, "by_rank" different ones, "rank_0" the
            second branch on rank 0 only.
    """

    model: ModelSpec
    options: Options = Options()
    optimizer: OptimizerSpec = MOMENTUM
    steps: tuple[AnyStep, ...] = ()
    data_seed: int = 0
    routing: str = "same"

    def units(self) -> list[tuple[Path, Options]]:
        """Paths and options of all units, the root's first."""
        return [((), self.options), *((p, n.unit) for p, n in self.model.walk() if n.unit is not None)]
