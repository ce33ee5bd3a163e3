"""What raises because it has no meaning now, with the names of what it is about."""

from __future__ import annotations

from itertools import islice

from torch import nn

from ..errors import ConfigurationError, LifecycleError
from ..torch_seams.callers import callers
from .originals import FlatParamLike, Listing, name_of_original

# Functions of peft's that look for names of modules among the keys of a state dict: the wrapper's names are longer.
_BY_NAMES_OF_MODULES = {
    "get_peft_model_state_dict": "get_peft_model_state_dict(model.module, state_dict=model.state_dict())",
    "set_peft_model_state_dict": (
        "it inside of `with model.summon_full_params():` for the wrapped module, "
        "set_peft_model_state_dict(model.module, state)"
    ),
}


def replaced_shard(flat: Listing) -> LifecycleError:
    """What is raised where somebody put another tensor in the place of a shard."""
    module, name = flat.places[0]
    found = module._parameters.get(name)
    kind = "nothing" if found is None else f"another {type(found).__name__}"
    return LifecycleError(
        f"rank {flat.group.rank}: in place of the shard {name!r} ({flat.label}) there is {kind}, "
        "which forward would ignore (functional_call does this, and assigning a parameter). Change parameters inside "
        "of summon_full_params(), or pass functional_call the FSDP module's own parameters"
    )


def replaced_original(param: nn.Parameter, rank: int) -> LifecycleError:
    """What is raised where somebody put a tensor in the place of a parameter that is in a flat parameter."""
    return LifecycleError(
        f"rank {rank}: parameter {name_of_original(param)!r} of an FSDP module is replaced by another tensor, which "
        "forward would ignore (functional_call does this). " + _FUNCTIONAL
    )


_FUNCTIONAL = (
    "Change parameters inside of summon_full_params(), and call functional_call there on a module that has no FSDP "
    "modules below; or call it on a module that is not wrapped and has loaded this one's state_dict()"
)


def put_into_wrapper(name: str) -> LifecycleError:
    """What is raised where a parameter or buffer gets the name of what the wrapped module has."""
    return LifecycleError(
        f"{name!r} is a parameter or buffer of the module that FSDP wraps and can't be replaced through the wrapper "
        "(functional_call does this). " + _FUNCTIONAL
    )


def unknown_root(flat: FlatParamLike, number: int) -> LifecycleError:
    """What is raised where backward reaches a unit that no FSDP forward was run for."""
    name = name_of_original(flat.originals[number].param)
    return LifecycleError(
        f"rank {flat.group.rank}: backward reached parameter {name!r}, but the FSDP module that holds it was never "
        "called; call the FSDP module, not what it wraps, or its shards get no gradients"
    )


def backward_when_summoned(flat: FlatParamLike) -> LifecycleError:
    """What is raised where backward needs what a forward inside of ``summon_full_params`` computed with."""
    return LifecycleError(
        f"rank {flat.group.rank}: backward through {flat.label} inside of summon_full_params, or "
        "through a forward that was run there, is not possible; leave the context first"
    )


def written_original(flat: FlatParamLike) -> LifecycleError:
    """What is raised, once, where the memory of gathered original parameters is given back that somebody wrote to."""
    name, flat.written = name_of_original(flat.originals[flat.written[0]].param), []
    return LifecycleError(
        f"rank {flat.group.rank}: parameter {name!r} was written to while it was gathered (in forward, or before the "
        "backward that followed). It is a copy of what the shards hold, and the change is lost. Write inside of "
        "summon_full_params(), between steps; a value that changes in forward can be a buffer"
    )


def backward_with_graph(flat: FlatParamLike) -> LifecycleError:
    """What is raised where a backward that builds a graph gives gradients of parameters, or execution is lazy."""
    return LifecycleError(
        f"rank {flat.group.rank}: a backward with create_graph=True that gives gradients of an FSDP module's "
        "parameters (a Hessian of the weights) is not possible: they are reduced over ranks, and no graph leads back "
        "through that. Gradients of inputs may be in a graph, but on XLA: torch.autograd.grad(outputs, inputs, "
        "create_graph=True); for others use finite differences"
    )


def changed_since_forward(flat: FlatParamLike) -> LifecycleError:
    """What is raised where backward reaches a unit whose shard was written to after forward."""
    return LifecycleError(
        f"rank {flat.group.rank}: backward through a forward of before the last change of "
        f"{flat.label} (by optimizer.step(), say): it would compute with the new values. Call "
        "backward before the optimizer's step, or forward again after it"
    )


def copy_when_summoned(rank: int) -> LifecycleError:
    """What is raised where an FSDP module is copied or pickled inside of its ``summon_full_params``."""
    return LifecycleError(
        f"rank {rank}: copying or pickling an FSDP module inside of summon_full_params is not possible, for it may "
        "have changes that no shard has yet; leave the context first. Modules without FSDP modules below can be copied"
    )


def check_asker(door: nn.Module, keeps_names: bool) -> None:
    """Refuses a state dict to those who would do nothing with it, and say nothing.

    Args:
        keeps_names: modules have the names that keys have.

    Raises:
        ConfigurationError: on every rank alike, before anything is gathered.
    """
    for frame in islice(callers(), 1, 9):
        name, where = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if name in _BY_NAMES_OF_MODULES and where.startswith("peft."):
            if frame.f_locals.get("model") is door and not keeps_names:
                raise ConfigurationError(
                    f"{name} finds no adapters in an FSDP module, whose modules have other names than its state dict. "
                    f"Call {_BY_NAMES_OF_MODULES[name]}, on all ranks"
                )
            return
        if where == "transformers.trainer" and name == "_save":
            raise ConfigurationError(
                "transformers' Trainer saves on rank 0 alone, and a sharded model is put together by all ranks. Let it "
                "know: trainer = shardkit.integrations.huggingface.ShardkitPlugin().attach(trainer); or pass "
                "save_strategy='no'"
            )
        if where == "timm.utils.model_ema":
            average = frame.f_locals.get("self")
            if door in (getattr(average, "ema", None), getattr(average, "module", None)):
                raise ConfigurationError(
                    f"timm's {type(average).__name__} writes to the values of a state dict, and those of an FSDP "
                    "module are copies, so its averages would never change. Use torch.optim.swa_utils.AveragedModel("
                    "model, multi_avg_fn=get_ema_multi_avg_fn(decay)), which averages shards; or make the average of "
                    "the model before it is wrapped"
                )
            return
