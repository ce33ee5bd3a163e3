"""Tracers of torch that would see shards where the program has parameters, and what to do instead.

``torch.compile`` runs around what gathers and reduces. Others record a forward or a backward as one graph of tensors:
of a sharded module that would be a rank's part, with collectives left out. They are refused by name, on all ranks.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import LifecycleError
from ..torch_seams.callers import callers

if TYPE_CHECKING:
    from .unit import Unit

EXPORT = "torch.export._trace"
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
# Of this thread from torch 2.14 on, of the process before.
_fx: Any = torch.fx._symbolic_trace
fx_tracing = getattr(_fx, "_get_is_fx_tracing", None) or functools.partial(
    getattr, _fx, "_is_fx_tracing_flag"
)
jit_tracing = torch._C._get_tracing_state
transform_level = torch._C._functorch.maybe_current_level
_INSTEAD = (
    "Do it with a module that is not wrapped: build the model anew and load this one's state_dict() into it. "
    "torch.compile works with FSDP modules"
)


def check_forward(unit: Unit) -> None:
    """Raises LifecycleError where a forward is recorded by something that can't know of gathering."""
    if jit_tracing() is not None:
        raise refusal(unit, "torch.jit.trace (torch.onnx.export too)")
    if torch.compiler._is_exporting_flag:
        raise refusal(unit, "torch.export (torch.onnx.export too)")
    if fx_tracing():
        raise refusal(unit, "tracing with torch.fx (symbolic_trace, make_fx)")
    check_backward(unit)
    if transform_level() is not None and not all(flat.store.is_whole for flat in unit.needs):
        keys = {level.key() for level in torch._C._functorch.get_interpreter_stack() or []}
        kinds = torch._C._functorch.TransformType
        if keys & {kinds.Grad, kinds.Jvp}:
            raise refusal(
                unit,
                "torch.func.grad (vjp, jvp, jacrev, hessian, ...)",
                "torch.autograd.grad with respect to inputs",
            )


def is_listed_for_export(export: ModuleType) -> bool:
    """Whether torch.export, strict or not, is about to list what a model has."""
    code = getattr(getattr(export, "_get_original_state_dict", None), "__code__", None)
    return any(frame.f_code is code for frame in list(callers()))


def check_backward(unit: Unit) -> None:
    """Raises LifecycleError where autograd's graph is compiled."""
    compiled: Any = sys.modules.get(COMPILED_AUTOGRAD)
    if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
        raise refusal(
            unit,
            "compiled autograd",
            "torch.compile without it (torch._dynamo.config.compiled_autograd = False)",
        )


def refusal(unit: Unit, what: str, instead: str = "") -> LifecycleError:
    """What is raised, with what to call instead."""
    remedy = f"Use {instead}, or do it with a module that is not wrapped" if instead else _INSTEAD
    return LifecycleError(
        f"{_where(unit)}: {what} of an FSDP module ({unit.name or 'the root'}) is not possible: its parameters are "
        f"gathered and given back while it runs. {remedy}"
    )


def _where(unit: Unit) -> str:
    group = unit.group
    return "FSDP" if group is None else f"rank {group.ranks[group.rank]}"
