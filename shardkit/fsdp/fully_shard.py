"""The door in place: a module that keeps its class, methods and names, and whose parameters are sharded.

Hooks of the module enter and leave its unit. The unit's parameters travel together, and this rank's part of each is
listed where the parameter was, so that names mean what they meant.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..backend import Backend, backend_for, not_compiled
from ..errors import ConfigurationError, LifecycleError
from ..layout import Align, AlignedLayout, EachAlone, RowsLayout
from ..optimizer_state.forms import check_request
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..progress import noting_errors
from ..torch_seams.tensors import cut, is_dtensor, shards_and_replicas_of
from ..torch_seams.wrappers import AccelerateAsks, check_wrappable
from ..types import Args, IncompatibleKeys, Kwargs, Memo, ProcessGroup, StateDict, Tree
from .construct import begin_move, check_copied, check_pickled, end_move, shard, wake
from .engine import check_one_thread
from .forward import Entered, enter, fail, leave
from .originals import check_asker
from .own_forms import extension_of
from .state import Ignored, Options, ShardingState, enter_summon, exit_summon, state_of, units_in
from .state_dict import begin_loading, detach_entries
from .submodule_api import collect_in_place
from .torch_words import (
    TorchsArguments,
    TorchsMethods,
    TorchsWords,
    note_state_for_torch,
    own_class,
    sharded_class,
)
from .wrapper import Door

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")


@noting_errors
def fully_shard(
    module: M,
    *,
    group: ProcessGroup = None,
    replicas: ProcessGroup = None,
    precision: PrecisionPolicy | None = None,
    reshard: ReshardPolicy | None = None,
    offload: OffloadPolicy | None = None,
    reduce: ReducePolicy | None = None,
    align: Align = None,
    sync_module_states: bool = True,
    device: torch.device | str | None = None,
    backend: str | Backend | None = None,
    mesh: DeviceMesh | None = None,
    dtensors: bool | None = None,
    **torchs_words: Unpack[TorchsArguments],
) -> M:
    """Shards a module in place: as :class:`~shardkit.FSDP`, but the module keeps its class, methods and names.

    ::

        for block in model.blocks:
            fully_shard(block)              # what should be gathered together
        fully_shard(model)                  # the rest
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)   # after sharding

    ``parameters()`` and ``named_parameters()`` list this rank's part of each parameter under its name: whole rows,
    ``[rows here, ...]``, maybe none; vectors are cut anywhere, and where rows are very long, parts of rows
    (:func:`~shardkit.layout.rows_layout`). ``state_dict()`` is full, and ``load_state_dict()`` takes a full one (both
    collective). What wrappers have as methods, ``sharding_of(module)`` has. Of several modules each becomes a unit.
    ``align=n`` keeps n rows together. Where execution is lazy (XLA), parts are 1-D and even, and reduced one by one.

    With ``dtensors=True`` the module is as torch's ``fully_shard`` (FSDP2) makes it: DTensors are listed, cut by rows,
    ``state_dict()`` has these, its class has torch's FSDPModule among its bases, several modules are one unit; torch's
    own functions know what to do with it, and each gather costs a copy. Parameters that are DTensors already, by tensor
    parallelism, need this and ``mesh=``. That is the default where all that is said
    is in torch's words (``mesh``, ``reshard_after_forward``, ``mp_policy``, ``offload_policy``, ...), or modules inside
    are listed so.

    Arguments are those of :class:`~shardkit.FSDP`, or those of torch's ``fully_shard`` with torch's policies.
    Returns: what was passed; FSDP2's methods (``unshard``, ``set_requires_gradient_sync``, ...) are attributes of it.
    Raises: ConfigurationError (sharded already) and what :class:`~shardkit.FSDP` raises.
    Source: the shape of torch.distributed.fsdp.fully_shard (FSDP2).
    """
    if unknown := torchs_words.keys() - set(TorchsWords._fields):
        raise TypeError(f"fully_shard() got an unexpected keyword argument {min(unknown)!r}")
    words, given = TorchsWords(**torchs_words), [module] if isinstance(module, nn.Module) else [*module]
    if not given or len(set(given)) < len(given):
        found = "a module twice" if given else "an empty list of modules"
        raise ConfigurationError(f"fully_shard() got {found}: list modules, each once")
    units = list(map(units_in, given))
    if dtensors is None:
        ours = precision, reshard, offload, reduce, align, group, replicas, device, backend
        are_inside = any(s.options.dtensors for found in units for s in found)
        are_torchs = bool(torchs_words) or mesh is not None or are_inside
        dtensors = are_torchs and ours.count(None) == len(ours) and _are_dtensors_meant(given)
    modules = given
    if dtensors and len(given) > 1:  # of modules that lie in others these
        inside = {id(m) for other in given for m in other.modules() if m is not other}
        modules = [m for m in given if id(m) not in inside]
    mesh, words, on_others = words.by_mesh(modules, mesh) if dtensors else (mesh, words, [])
    whole_mesh, mesh = words.meshes(mesh)
    casts = words.mp_policy is None or words.mp_policy.cast_forward_inputs
    if mesh is not None:
        group, replicas = shards_and_replicas_of(mesh, group, replicas)
    options = Options.given(
        group=group,
        replicas=replicas,
        precision=words.precision(precision),
        reshard=words.reshard(reshard),
        offload=words.offload(offload),
        reduce=words.reduce(reduce, modules),
        flatten=False,
        sync_module_states=sync_module_states,
        device=device,
        backend=backend,
        layout=EachAlone(AlignedLayout("rows"), True) if dtensors else RowsLayout(align),
        dtensors=dtensors,
        mesh=mesh,
        whole_mesh=whole_mesh,
        casts_inputs=casts,
        casts_root_inputs=casts,
        placement=words.shard_placement_fn,
        keeps_dtype=words.keeps_dtype(),
    )
    _check(given, units, dtensors)
    companions: list[ShardingState] = []
    for members, other, said in on_others:
        fully_shard(members, mesh=other, sync_module_states=sync_module_states, **said)
        companions += [state for m in members if (state := state_of(m)) is not None]
    ignored = Ignored(parameters=set(words.ignored_params or ()))
    states = [ShardingState(each, each, options, ignored) for each in modules]
    for state in states:
        state.companions = companions
    for home, state in enumerate(states if dtensors and len(states) > 1 else ()):
        state.mates, state.home = states, home
    shard(states)
    for state in states:
        InPlace(state).install()
        if words.mp_policy is not None:
            words.cast_outputs_of(state.module)
    return module


def _are_dtensors_meant(modules: Sequence[nn.Module]) -> bool:
    """Decides where nobody says: by torch's words, on ranks that torch knows, for tensors with memory."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    some = next((p for module in modules for p in module.parameters()), None)
    return backend_for([] if some is None else [some], None).has_storage


def _check(modules: Sequence[nn.Module], units: Sequence[list[ShardingState]], dtensors: bool) -> None:
    """Raises ConfigurationError for modules that can't be sharded, or have been.

    Args:
        units: those of each, and of what is inside.
    """
    may_list = (lambda p: is_dtensor(p) or extension_of(p) is not None) if dtensors else None
    for k, (module, inside) in enumerate(zip(modules, units, strict=True)):
        if inside and inside[0].door is module:
            raise ConfigurationError(
                f"this {type(module).__name__} is sharded already; call fully_shard once for each"
            )
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if dtensors and is_container and type(module).forward is nn.Module.forward:
            raise ConfigurationError(
                f"fully_shard does not support containers that do not implement forward ({type(module).__name__}): "
                "nobody calls them. Shard their members, each or as a list"
            )
        without = [*modules[:k], *(s.module for s in inside if s.options.dtensors)]
        check_wrappable(module, "fully_shard", may_hold=Door, without=without, may_list=may_list)


class InPlace:
    """The hooks of one module."""

    def __init__(self, state: ShardingState) -> None:
        self._state = state
        # forwards in progress, each with the exception that was being handled when it began; None in another call of
        # the same module, which has gathered
        self._calls: list[tuple[Entered | None, BaseException | None]] = []
        self._is_refused = False

    def install(self) -> None:
        module, state = self._state.door, self._state
        handle: Any
        hooks: Any
        module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
        for handle, hooks in (
            (module.register_state_dict_pre_hook(self._begin_state_dict), module._state_dict_pre_hooks),
            (module.register_load_state_dict_pre_hook(self._begin_load), module._load_state_dict_pre_hooks),
        ):
            hooks.move_to_end(handle.id, last=False)  # before those that refuse state dicts of modules inside
        module.register_state_dict_post_hook(partial(self._end_state_dict))  # torch notes something on it
        module.register_load_state_dict_post_hook(self._end_load)
        # what is asked of a module by these names: by its parent, torch.distributed.checkpoint, accelerate
        module.__dict__["_apply"] = self._apply
        module.__dict__["_fqn_modifiers"] = self._fqn_modifiers
        module.__dict__["_is_accelerate_prepared"] = AccelerateAsks()
        if state.options.dtensors:
            module.__class__ = sharded_class(type(module))
            note_state_for_torch(module)
        TorchsMethods(state).install()

    # ------------------------------------------------------------ forward
    @not_compiled
    def _enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        state = self._state
        if state.is_asleep:
            wake(state)
        handled, engine = sys.exc_info()[1], state.engine
        if engine is not None and engine.in_place and (state.is_root or self._calls):
            engine.forget_interrupted()
        try:
            if state.is_computing:
                if engine is not None:
                    check_one_thread(engine, "forward")
                self._calls.append((None, handled))
                return args, kwargs
            if state.summoned is not None:
                exit_summon(state, "unshard")
            entered, args, kwargs = enter(state, args, kwargs)
        except Exception:
            self._is_refused = True  # torch calls _leave next
            raise
        self._calls.append((entered, handled))
        state.is_computing = True
        if entered.engine is not None:
            entered.engine.in_place.append((sys._getframe(1), self._forget))
        return args, kwargs

    def _forget(self) -> None:
        """Ends the forward that nobody is inside of, and tells no other rank."""
        calls, self._calls, self._state.is_computing = self._calls, [], False
        for entered in filter(None, (call[0] for call in calls)):
            fail(self._state, entered, LifecycleError("it was interrupted"))

    @not_compiled
    def _leave(self, module: nn.Module, args: object, kwargs: object, outputs: Tree) -> Tree:
        state = self._state
        if self._is_refused or not self._calls:  # by another hook, before ours
            self._is_refused = False
            return outputs
        entered, handled = self._calls.pop()
        if entered is None:
            return outputs
        state.is_computing = False
        while entered.engine is not None and entered.engine.in_place:
            _, forget = entered.engine.in_place.pop()
            if forget == self._forget:
                break
            forget()  # a module inside, whose KeyboardInterrupt this one has caught
        error = sys.exc_info()[1]
        if error is not None and error is not handled:
            fail(state, entered, error)
            return outputs
        return leave(state, entered, outputs)

    # ------------------------------------------------------------ state dicts
    def _fqn_modifiers(self) -> dict[str, str]:
        """torch.distributed.checkpoint asks for it before it does anything."""
        check_request()
        return {}

    def _begin_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        wake(self._state)
        check_asker(module, keeps_names=True)
        state = self._state
        if state.options.dtensors and torch.is_inference_mode_enabled():
            raise LifecycleError(
                f"rank {state.group.rank}: state_dict() of DTensors under torch.inference_mode(): torch can't detach "
                "them there. Call it outside, or under torch.no_grad()"
            )
        if not state.options.dtensors and not state.state_is_local and state.summoned is None:
            enter_summon(state, writeback=False, purpose="state dict")
        for flat in state.flats if state.options.dtensors else ():  # handed out, to be written to unseen
            if flat.kept_at is not None:
                flat.kept_at = -1, 0
        collect_in_place(1)

    def _end_state_dict(self, module: nn.Module, found: Tree, prefix: str, metadata: object) -> None:
        collect_in_place(-1)
        state = self._state
        if not state.options.dtensors and not state.state_is_local:
            detach_entries(state, found, prefix, {})
        exit_summon(state, "state dict")

    def _begin_load(self, module: nn.Module, state_dict: StateDict, *others: object) -> None:
        state = self._state
        wake(state)
        if state.options.dtensors:
            begin_move(state)  # what is gathered will be old
            prefix = str(others[0])
            for path, m in state.own_modules(prefix.rstrip(".")):
                for name, p in m._parameters.items():
                    key = f"{path}.{name}" if path else name
                    value = state_dict.get(key)
                    # all ranks have the same plain ones, of which this rank gets its part
                    if is_dtensor(p) and isinstance(value, torch.Tensor) and not is_dtensor(value):
                        here = value if p.is_meta else value.to(p._local_tensor.device)
                        state_dict[key] = cut(here, p.device_mesh, p.placements)
        else:
            begin_loading(state, state_dict)
        collect_in_place(1)

    def _end_load(self, module: nn.Module, incompatible: IncompatibleKeys) -> None:
        collect_in_place(-1)
        state = self._state
        if state.options.dtensors and any(flat.param.is_meta for flat in state.flats):  # assigned maybe
            if not state.mates and any(
                s is not None and not s.are_alike() for s in (f.shards for f in state.flats)
            ):
                raise ConfigurationError(
                    f"load_state_dict(assign=True) into a {type(module).__name__} that was sharded on the meta device "
                    "gave values to some of its parameters alone, or of several dtypes: give all, of one dtype, plain "
                    "or cut as state_dict() has them"
                )
            end_move(state)
        exit_summon(state, "state dict")

    # ------------------------------------------------------------ being moved and copied
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        wake(self._state)
        begin_move(self._state)
        own_class(self._state.module)._apply(self._state.module, fn, recurse)
        end_move(self._state)
        return self._state.module

    def __deepcopy__(self, memo: Memo) -> InPlace:
        """Called while the module is copied; the state of the copy is asleep until the copy is whole and used."""
        check_copied(self._state, memo)
        made = InPlace.__new__(InPlace)
        memo[id(self)] = made
        made.__init__(copy.deepcopy(self._state, memo))  # type: ignore[misc]
        return made

    def __getstate__(self) -> StateDict:
        """Returns what a file takes, in which the state is asleep."""
        wake(self._state)
        check_pickled(self._state)
        return {"_state": self._state, "_calls": [], "_is_refused": False}
