"""The door in place: a module that keeps its class, methods and names, and whose parameters are sharded.

Hooks of the module enter and leave its unit. The unit's parameters travel together, and this rank's part of each is
listed where the parameter was, so that names mean what they meant.

It takes the arguments of torch's ``fully_shard`` (FSDP2), and has its methods. Some of these tell torch what is found
out here: the order of units, which is that of the last forward, or when an optimizer has stepped. That is taken, and
changes nothing.

[Note: FSDP2's class] Programs and libraries ask ``isinstance(module, FSDPModule)``. So where DTensors are listed, as
torch lists them, a module's class becomes one that has torch's FSDPModule before its own class among its bases, as
torch makes it; its methods are these. Methods that torch's own ``register_fsdp_forward_method`` sets on it are
registered as ours does it, which sees where one raises; torch's wrapper tells nobody.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict, TypeVar, cast

import torch
from torch import nn

from ..backend import Backend, backend_for, is_group, not_compiled
from ..errors import ConfigurationError, LifecycleError, check_kinds, noting_errors
from ..layout import Align, AlignedLayout, EachAlone, RowsLayout
from ..optimizer_state.forms import check_request
from ..optimizers.shards import listing_of
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..reduction.ordered import refuse_local
from ..torch_seams.hooks import callers, watch_halves
from ..torch_seams.tensors import WholeMesh, cut, is_dtensor, shards_and_replicas_of
from ..torch_seams.wrappers import AccelerateAsks, check_modules, check_wrappable
from ..types import AnyCallable, Args, IncompatibleKeys, Kwargs, Memo, ProcessGroup, StateDict, Tree
from .construct import begin_move, check_copied, check_pickled, end_move, shard, wake
from .engine import check_one_thread
from .forward import Entered, become_root, call_method, cast_inputs, enter, fail, leave, run_gathered
from .originals import check_asker
from .own_forms import extension_of
from .state import (
    Ignored,
    Options,
    ShardingState,
    enter_summon,
    exit_summon,
    modules_outside_units,
    state_of,
    units_in,
)
from .state_dict import begin_loading, detach_entries
from .submodule_api import collect_in_place, refuse_sharing
from .unit import Comm, Hook
from .wrapper import Door

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, UnshardHandle
    from torch.distributed.fsdp import OffloadPolicy as TorchsOffloadPolicy
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
    if torchs_words:
        from torch.distributed import fsdp

        kinds = {"mp_policy": fsdp.MixedPrecisionPolicy, "offload_policy": fsdp.OffloadPolicy}
        check_kinds(torchs_words, ignored_params=Iterable, reshard_after_forward=int, **kinds)
    one: Tree = module
    is_one = isinstance(one, nn.Module) or not isinstance(one, Iterable)
    words, given = TorchsWords(**torchs_words), [one] if is_one else [*one]
    check_modules(given, "fully_shard()")
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
    _refuse_both("dtensors=True", "align", align if dtensors else None)
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
        if words.mp_policy is not None and words.mp_policy.output_dtype is not None:
            state.module.register_forward_hook(partial(_cast_outputs, words.mp_policy.output_dtype))
    return module


def _are_dtensors_meant(modules: Sequence[nn.Module]) -> bool:
    """Decides where nobody says: by torch's words, on ranks that torch knows, for tensors with memory."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    some = next((p for module in modules for p in module.parameters()), None)
    return backend_for([] if some is None else [some], None).has_storage


def _check(modules: Sequence[nn.Module], units: Sequence[list[ShardingState]], dtensors: bool) -> None:
    """Raises ConfigurationError for modules that can't be sharded, or have been; ``units`` has those inside, too."""
    may_list = (lambda p: is_dtensor(p) or extension_of(p) is not None) if dtensors else None
    for k, (module, inside) in enumerate(zip(modules, units, strict=True)):
        if inside and inside[0].door is module:
            raise ConfigurationError(
                f"this {type(module).__name__} is sharded already. Each distinct composable distributed API can only "
                "be applied to a module once."
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
        from torch.distributed._composable.contract import REGISTRY_KEY

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
        own = module.__dict__
        own["_apply"], own["_fqn_modifiers"] = self._apply, self._fqn_modifiers
        own["_is_accelerate_prepared"] = AccelerateAsks()
        own[REGISTRY_KEY] = Registry(own.get(REGISTRY_KEY, ()))
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
        """Is asked for by torch.distributed.checkpoint before that does anything."""
        check_request()
        return {}

    def _begin_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        wake(self._state)
        check_asker(module, keeps_names=True)
        state = self._state
        exit_summon(state, "unshard")
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
        exit_summon(state, "unshard")
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
            if not state.mates and not all(f.shards is None or f.shards.are_alike() for f in state.flats):
                raise ConfigurationError(
                    f"load_state_dict(assign=True) into a {type(module).__name__} that was sharded on the meta device "
                    "gave values to some of its parameters alone, or of several dtypes: give all, of one dtype, plain "
                    "or cut as state_dict() has them"
                )
            end_move(state)
        for listing in state.listings:  # of DTensors each rank loads by itself
            listing.has_loaded = True
        exit_summon(state, "state dict")

    # ------------------------------------------------------------ being moved and copied
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        wake(self._state)
        if self._state.options.dtensors:
            refuse_sharing(self._state.module, fn)
        exit_summon(self._state, "unshard")
        begin_move(self._state)
        own_class(self._state.module)._apply(self._state.module, fn, recurse)
        end_move(self._state)
        return self._state.module

    def __deepcopy__(self, memo: Memo) -> InPlace:
        """Copies it with its module; the state of the copy is asleep until the copy is whole and used."""
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


class TorchsArguments(TypedDict, total=False):
    """Arguments that may be passed; see :class:`TorchsWords`."""

    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: TorchsOffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    shard_placement_fn: Callable[[nn.Parameter], object] | None
    dp_mesh_dims: DataParallelMeshDims | None


class TorchsWords(NamedTuple):
    """Reads what was said in torch's words; None where nothing was."""

    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: TorchsOffloadPolicy | None = None
    ignored_params: set[nn.Parameter] | None = None
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None

    def meshes(self, given: DeviceMesh | None) -> tuple[WholeMesh | None, DeviceMesh | None]:
        """Returns a mesh of which some dimensions are said to be for data, and that of these: replicas first."""
        dims = self.dp_mesh_dims
        if dims is None or given is None:
            return None, given
        shard, replicate = dims.shard_names, dims.replicate_names
        unknown = [name for name in (*shard, *replicate) if name not in (given.mesh_dim_names or ())]
        if unknown or not shard:
            nothing = "nothing is sharded, which is DistributedDataParallel's"
            why = f"it has no {unknown[0]!r}" if unknown else nothing
            raise ConfigurationError(
                f"dp_mesh_dims={dims} of a mesh with the dimensions {given.mesh_dim_names}: {why}"
            )
        whole = WholeMesh(given, replicate + shard)
        if len(shard) == 1 and len(replicate) <= 1:
            return whole, given[replicate + shard]
        from torch.distributed.device_mesh import DeviceMesh

        parts = [given[names]._flatten("_".join(names)) for names in (replicate, shard) if names]
        return whole, parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def by_mesh(
        self, modules: Sequence[nn.Module], mesh: DeviceMesh | None
    ) -> tuple[DeviceMesh | None, TorchsWords, list[tuple[list[nn.Module], DeviceMesh, TorchsArguments]]]:
        """Returns mesh and words for modules' own parameters, and lists modules inside that are on other meshes.

        It is ``shard_placement_fn`` that puts parameters there.

        Raises:
            ConfigurationError: parameters in one of the modules are to be over several meshes.
        """
        if self.shard_placement_fn is None:
            return mesh, self, []
        ignored, (_, of_call) = self.ignored_params or (), self.meshes(mesh)
        said: dict[Tree, Tree] = {of_call: (mesh, self.dp_mesh_dims)}
        meshes_of: dict[nn.Module, list[Tree]] = {}
        for m in (m for each in modules for _, m in modules_outside_units(each)):
            meshes_of[m] = here = []
            for p in (p for p in m._parameters.values() if p is not None and p not in ignored):
                info = getattr(self.shard_placement_fn(p), "mesh_info", None)
                here.append(of_call if info is None else info.mesh)
                whole, dims = getattr(info, "spmd_mesh", None), getattr(info, "dp_mesh_dims", None)
                said.setdefault(here[-1], (whole or here[-1], dims))
        home = next((other for m in modules for other in meshes_of[m]), of_call)
        found: dict[Tree, list[nn.Module]] = {}
        for m, meshes in meshes_of.items():
            if all(other == home for other in meshes):
                continue
            below = {home} if m in modules else set()
            below.update(other for _, inside in modules_outside_units(m) for other in meshes_of[inside])
            if len(below) > 1:
                raise ConfigurationError(
                    f"shard_placement_fn gives parameters in a {type(m).__name__} the meshes {below}: those that are "
                    "over another one have to lie in modules of their own, which become units"
                )
            found.setdefault(meshes[0], []).append(m)
        inside = self
        if self.mp_policy is not None:  # what is around casts for them
            policy = replace(self.mp_policy, cast_forward_inputs=False, output_dtype=None)
            inside = self._replace(mp_policy=policy)
        words = {other: inside._replace(dp_mesh_dims=dims)._asdict() for other, (_, dims) in said.items()}
        others = [
            (each, said[other][0], cast("TorchsArguments", words[other])) for other, each in found.items()
        ]
        return said[home][0], self._replace(dp_mesh_dims=said[home][1]), others

    def precision(self, given: PrecisionPolicy | None) -> PrecisionPolicy | None:
        """Returns the dtypes of compute."""
        if self.mp_policy is None:
            return given
        _refuse_both("mp_policy", "precision", given)
        return PrecisionPolicy(compute=self.mp_policy.param_dtype)

    def keeps_dtype(self) -> Callable[[nn.Parameter], bool] | None:
        """Returns what says whether a parameter is computed with in its own dtype, as torch 2.15's policies can."""
        policy: Tree = self.mp_policy
        if getattr(policy, "param_dtype_override_fn", None) is None:
            return None
        return lambda param: policy._resolve_for_param(param).param_dtype != policy.param_dtype

    def reduce(self, given: ReducePolicy | None, modules: Sequence[nn.Module]) -> ReducePolicy | None:
        """Returns the dtype on the wire: from torch 2.15 on that of the parameters, where none is said."""
        policy = self.mp_policy
        dtype = None if policy is None else policy.reduce_dtype
        if dtype is not None:
            _refuse_both("mp_policy.reduce_dtype", "reduce", given)
        elif policy is not None and policy.param_dtype and given is None and torch.__version__ >= "2.15":
            own = {
                p.dtype for m in modules for p in m.parameters() if p.is_floating_point() and p.requires_grad
            }
            dtype = functools.reduce(torch.promote_types, own, policy.param_dtype)
        return given if dtype is None else ReducePolicy(dtype=dtype)

    def reshard(self, given: ReshardPolicy | None) -> ReshardPolicy | None:
        """Says when parameters are given back; True and numbers are for a root too, as in torch."""
        if self.reshard_after_forward is None:
            return given
        _refuse_both("reshard_after_forward", "reshard", given)
        return ReshardPolicy(after_forward=self.reshard_after_forward, root=True)

    def offload(self, given: OffloadPolicy | None) -> OffloadPolicy | None:
        """Returns what is on the host."""
        if self.offload_policy is None:
            return given
        from torch.distributed.fsdp import CPUOffloadPolicy

        _refuse_both("offload_policy", "offload", given)
        return OffloadPolicy(parameters=isinstance(self.offload_policy, CPUOffloadPolicy))


def _checked(comm: Comm | None) -> Comm | None:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise ConfigurationError(
            f"a {type(comm).__name__} sends no messages: it needs allocate(size, dtype=, device=) and a call, as "
            "torch.distributed.fsdp's AllGather and ReduceScatter have them"
        )
    return comm


def _run_in(stream: torch.Stream, hook: Hook, gradients: torch.Tensor) -> None:
    here = torch.accelerator.current_stream(gradients.device)
    stream.wait_stream(here)
    with stream:
        hook(gradients)
    here.wait_stream(stream)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: object, outputs: Tree) -> Tree:
    return cast_inputs(outputs, dtype)


def _refuse_both(torchs: str, ours: str, given: object) -> None:
    if given is not None:
        raise ConfigurationError(f"both {torchs} and {ours} were passed, which both say how; leave one out")


_NEEDLESS = (
    "set_is_last_backward",
    "set_manual_backward_finalization",
    "set_requires_all_reduce",
    "set_unshard_in_backward",
    "_set_unshard_async_op",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
)


def _handle(is_asked_for: bool) -> UnshardHandle | None:
    """Returns torch's handle, where the caller wants to wait, for what has happened already."""
    from torch.distributed.fsdp import UnshardHandle

    return UnshardHandle() if is_asked_for else None


class TorchsMethods:
    """These methods of one module."""

    def __init__(self, state: ShardingState) -> None:
        self._state = state

    def install(self) -> None:
        """Gives the module them, except those that its class has itself."""
        module = self._state.door
        for name, method in METHODS.items():
            if not hasattr(type(module), name):
                module.__dict__[name] = MethodType(method, self)
        # may call a part of the module: an encoder, say
        if callable(getattr(type(module), "generate", None)):
            register_fsdp_forward_method(module, "generate")

    def _states(self, recurse: bool) -> list[ShardingState]:
        wake(self._state)
        return self._state.states() if recurse else [self._state, *self._state.companions]

    # ------------------------------------------------------------ values between steps
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the unit's own parameters as a forward has them, until :meth:`reshard` or the next one (collective).

        Changes to them are kept, each rank's part as that rank has it, or refused where it computes in another dtype.
        ``summon_full_params``, moves and state dicts end this. Inside of forward and backward, where the next unit is
        gathered anyway, it does nothing.
        """
        for state in self._states(recurse=False):
            if state.summoned is None and (state.engine is None or state.engine.forwards == 0):
                enter_summon(state, writeback=None, purpose="unshard")
        return _handle(async_op)

    def reshard(self) -> None:
        """Ends :meth:`unshard`; gives back frozen values that are kept. What forward has gathered goes by itself."""
        for state in self._states(recurse=False):
            exit_summon(state, "unshard")
            if not state.unit.is_held:
                state.unit.give_back_frozen()

    # ------------------------------------------------------------ gradients
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Lets backwards, with False, only accumulate this rank's gradients of these units, as in ``no_sync``."""
        for state in self._states(recurse):
            if not requires_gradient_sync:
                refuse_local(state.unit.reduce)
                watch_halves(listing_of)
            state.unit.accumulates = not requires_gradient_sync
        if (engine := self._state.engine) is not None:
            engine.set_accumulating([unit.accumulates for unit in engine.units])

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum of gradients over ranks (replicas included) by this, in place of their number."""
        for state in self._states(recurse=False):
            before = min(state.divisors[0], factor)
            copies = 1 if state.replicas is None else state.replicas.world_size
            state.unit.divide(before, factor / (before * copies))

    # ------------------------------------------------------------ memory
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether parameters are given back after forward, from the next one on.

        Raises:
            ConfigurationError: a number, which :func:`~shardkit.fully_shard` alone takes.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigurationError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}: fully_shard takes numbers"
            )
        for state in self._states(recurse):
            options, keeps = state.options, not reshard_after_forward
            policy = replace(options.reshard, after_forward=not keeps, root=not keeps)
            state.options, state.unit.keep_after_forward = replace(options, reshard=policy), keeps

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Keeps gathered parameters, with False, for the next forward, unless shards have changed by then."""
        for state in self._states(recurse):
            state.unit.keep_after_backward = not reshard_after_backward

    def reset_iter_state(self) -> None:
        """Forgets a forward or backward that has raised, which the next forward does too (an optimizer's step too).

        Raises:
            LifecycleError: inside of a forward or backward.
        """
        if self._state.engine is not None:
            self._state.engine.check_idle("reset_iter_state")

    def _needless(self, *args: object, **kwargs: object) -> None:
        """Does nothing: it is found out here."""

    def set_symm_mem_for_comm(self, *args: object, **kwargs: object) -> None:
        """Does nothing: where messages lie is decided here, or by an object that sends them.

        Raises:
            ConfigurationError: there is one (:meth:`set_custom_all_gather`), as in torch.
        """
        comms = self._state.unit.comms
        if (comms.gather, comms.scatter) != (None, None):
            raise ConfigurationError(
                "what set_custom_all_gather or set_custom_reduce_scatter got says where they lie; pass None there first"
            )

    # ------------------------------------------------------------ messages that others send
    def set_custom_all_gather(self, comm: Comm | None) -> None:
        """Gathers the unit's values, to compute with them, by this; None: as before.

        Gathers among few ranks (``reshard_after_forward=2``) and of full state stay what they are.

        Raises:
            ConfigurationError: it is no AllGather; compressed or lazy messages.
        """
        self._send_through("set_custom_all_gather", gather=_checked(comm))

    def set_custom_reduce_scatter(self, comm: Comm | None) -> None:
        """Reduces the unit's gradients by this, in turn with what is computed, as :meth:`set_custom_all_gather`.

        Its ``op`` is a mean or, where the divisor is another one, a sum.
        """
        self._send_through("set_custom_reduce_scatter", scatter=_checked(comm))

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Asks what :meth:`set_custom_reduce_scatter` has set for sums alone."""
        self._send_through("set_force_sum_reduction_for_comms", sums=enable)

    def set_all_reduce_hook(self, hook: Hook | None, *, stream: torch.Stream | None = None) -> None:
        """Calls this with the mean of the unit's gradients over the ranks, replicas included, to be changed in place.

        What all ranks of a group do to it has to be the same for what is behind the gradients: flags of missing ones.

        Args:
            stream: where it runs, if ranks have no replicas and their device has streams.
        """
        if stream is not None and hook is not None:
            if self._state.replicas is not None:
                raise ConfigurationError("set_all_reduce_hook(stream=...) is not for ranks with replicas")
            hook = hook if self._state.compute_device.type == "cpu" else partial(_run_in, stream, hook)
        self._send_through("set_all_reduce_hook", hook=hook)

    def _send_through(self, method: str, **changes: Tree) -> None:
        state = self._state
        wake(state)
        if state.engine is not None:
            state.engine.check_idle(method)
        options, precision, reduce = state.options, state.options.precision, state.options.reduce
        are_plain = not (
            precision.compression or reduce.compression or reduce.order or options.reshard.sends_changes
        )
        group = options.group or torch.distributed.group.WORLD
        comms = replace(state.unit.comms, process_group=group, **changes)
        are_plain = are_plain and state.group.backend.has_storage and not state.companions
        if comms.are_custom and (is_group(group) or not are_plain):
            raise ConfigurationError(
                f"{method} is for plain messages over a process group of torch's; not with compression, "
                "ReducePolicy(order=), ReshardPolicy(sends_changes=True), lazy execution, a group of shardkit's, or "
                "modules inside on another mesh"
            )
        state.unit.send_through(comms)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Lets all that follows wait for an optimizer's step: at once, where devices have events."""
        if self._state.compute_device.type != "cpu":
            event.wait()

    # ------------------------------------------------------------ torch 2.15's
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refuses to switch it on."""
        if keep:
            raise ConfigurationError(
                "set_keep_unsharded_storage: the memory of gathered parameters is released with them here, and lies "
                "elsewhere the next time. Leave it out"
            )

    def finalize_backward(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Reduces gradients that backwards without gradient sync have kept (collective); others are reduced already."""
        if self._state.engine is not None:
            self._state.engine.reduce_now()
        return _handle(async_op)

    # ------------------------------------------------------------ other methods that compute
    @not_compiled
    def call(self, method: AnyCallable, *args: object, **kwargs: object) -> Tree:
        """Returns a method of the module, run as its forward is; what calls the module itself inside included.

        ``generate`` runs so where it calls a part of the module, in the mode in which that is: without gradients, say.
        """
        state = self._state
        wake(state)
        exit_summon(state, "unshard")
        if state.summoned is not None or state.is_computing:
            return method(state.module, *args, **kwargs)
        if method.__name__ == "generate":
            return call_method(state, partial(method, state.module), args, kwargs)
        state.is_computing = True
        try:
            return run_gathered(state, partial(method, state.module), args, kwargs)
        finally:
            state.is_computing = False


# Those of torch's FSDPModule, by name.
METHODS: dict[str, AnyCallable] = {
    **{n: f for n, f in vars(TorchsMethods).items() if n[0] != "_" and n not in ("install", "call")},
    "set_reduce_scatter_divide_factor": TorchsMethods.set_gradient_divide_factor,
    "set_allocate_memory_from_process_group_for_comm": TorchsMethods.set_symm_mem_for_comm,
    **dict.fromkeys(_NEEDLESS, TorchsMethods._needless),
}


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gives a method of a module that :func:`~shardkit.fully_shard` has sharded its parameters, as forward has.

    It is needed for methods that use the module's own parameters without calling it. Wrappers (:class:`~shardkit.FSDP`)
    do this by themselves; of other modules nothing changes, as in torch.

    Raises:
        ConfigurationError: there is no such method.

    Source: torch.distributed.fsdp.register_fsdp_forward_method.
    """
    if state_of(module) is None:
        return
    if not callable(getattr(module, method_name, None)):  # torch.compile's module has its own's
        raise ConfigurationError(f"{own_class(module)} does not have a method {method_name} to register")
    _register(module, method_name, getattr(module, method_name))


def _register(module: nn.Module, name: str, method: AnyCallable) -> None:
    """Registers a method as the module has it: of its class, of the program's, or registered before."""
    state, function = state_of(module), cast("AnyCallable", getattr(type(module), name, method))
    if not isinstance(method, partial) and getattr(method, "__self__", None) is not module:
        function = update_wrapper(lambda _, *args, **kwargs: method(*args, **kwargs), method)
    elif isinstance(method, MethodType):
        function = method.__func__
    if state is not None and state.door is state.module:
        module.__dict__[name] = update_wrapper(partial(TorchsMethods(state).call, function), method)


# ------------------------------------------------------------ FSDP2's class
_classes: dict[type, type[nn.Module]] = {}


def sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class with torch's FSDPModule in front of a module's own, as torch makes it, and these methods."""
    if kind in _classes:
        return _classes[kind]
    from torch.distributed.fsdp import FSDPModule

    def set_attribute(self: nn.Module, name: str, value: Tree) -> None:
        if type(value) is MethodType and value.__func__.__code__ in _torchs_codes():
            _register(self, name, vars(value.__func__)["__wrapped__"])
        else:
            kind.__setattr__(self, name, value)

    theirs = [name for name, value in vars(FSDPModule).items() if callable(value) and name[:2] != "__"]
    own: dict[str, object] = {name: _method(name) for name in dict.fromkeys([*METHODS, *theirs])}
    own.update(_get_fsdp_state=_torchs_state, _apply=kind._apply, __setattr__=set_attribute)
    # Trainer knows by its name that a model's labels are shifted
    own.update(__reduce_ex__=_reduced, __module__=kind.__module__, _get_name=lambda self: kind.__name__)
    _classes[kind] = made = type(f"FSDP{kind.__name__}", (FSDPModule, kind), own)
    return made


@functools.cache
def _torchs_codes() -> set[CodeType]:
    """Returns the code of what torch's own ``register_fsdp_forward_method`` makes of a method."""
    from torch.distributed.fsdp import register_fsdp_forward_method as theirs

    return {code for code in theirs.__code__.co_consts if isinstance(code, CodeType)}


def own_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module was written with."""
    kind = type(module)
    return kind.__mro__[2] if vars(kind).get("__reduce_ex__") is _reduced else kind


def _method(name: str) -> AnyCallable:
    def call(self: nn.Module, *args: object, **kwargs: object) -> Tree:
        state = state_of(self)
        if state is None or name not in METHODS:
            why = "it is a copy without its shards" if state is None else "of a torch newer than shardkit"
            raise ConfigurationError(f"{name} of this {own_class(self).__name__}: {why}")
        return METHODS[name](TorchsMethods(state), *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _reduced(self: nn.Module, protocol: object) -> tuple[object, ...]:
    """Returns what copies and files are made of: the class is made anew of the module's own."""
    return _made, (own_class(self),), *cast("tuple[object, ...]", object.__reduce_ex__(self, 2))[2:]


def _made(kind: type[nn.Module]) -> nn.Module:
    made = kind.__new__(kind)
    made.__class__ = sharded_class(kind)
    return made


# ------------------------------------------------------------ what torch's own functions ask for
def _torchs_state(self: nn.Module) -> AsTorchsState:
    from torch.distributed._composable_state import _get_module_state

    if (state := state_of(self)) is None:
        raise ConfigurationError(f"this {own_class(self).__name__} is a copy without its shards")
    return cast("AsTorchsState | None", _get_module_state(self)) or AsTorchsState(state)


class AsTorchsState:
    """Stands for torch's state of a module, and its parameters' group, to those that need little of it.

    These are pipelines, which reduce gradients after their last micro-batch; trainers that ask whether a module is
    sharded (torch's ``_get_module_fsdp_state``), in which dtype it computes, or what is kept (NeMo Automodel, verl,
    axolotl). What else is read or set is refused.
    """

    # set by verl, where torch's own had to be told what is found out here
    __slots__ = ("__weakref__", "_auto_reshard_after_forward", "_state", "_training_state")

    def __init__(self, state: ShardingState) -> None:
        self._state = state

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        return FSDPState

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options = self._state.options
        hooks: list[Any] = list(self._state.module._forward_hooks.values())
        cast_to = [hook.args[0] for hook in hooks if getattr(hook, "func", None) is _cast_outputs]
        return MixedPrecisionPolicy(
            options.precision.compute, options.reduce.dtype, (*cast_to, None)[0], options.casts_inputs
        )

    @property
    def reshard_after_backward(self) -> bool:
        """Says whether parameters are given back."""
        return not self._state.unit.keep_after_backward

    # until torch 2.10 a module had one group; verl's copy of set_reshard_after_forward asks for its mesh
    _state_ctx = _fsdp_param_group = mesh_info = property(lambda state: state)
    _fsdp_param_groups = property(lambda state: [state])
    _comm_ctx = comm_ctx = property(lambda state: state, lambda state, ctx: None)  # shared already
    all_states = property(lambda state: [_torchs_state(s.door) for s in state._state.states()])
    _is_root = property(lambda state: state._state.is_root, lambda state, _: _refuse_torchs())
    shard_mesh_size = property(lambda state: state._state.group.world_size)
    post_forward_mesh_info = property(
        lambda state: None if state._state.unit.keep_after_forward else state,
        lambda state, value: TorchsMethods(state._state).set_reshard_after_forward(value is not None, False),
    )

    def _lazy_init(self) -> None:
        if self._state.engine is None:
            become_root(self._state)

    def post_backward(self) -> None:
        """Reduces gradients that backwards have kept (collective)."""
        TorchsMethods(self._state).finalize_backward()

    _root_post_backward_final_callback = TorchsMethods._needless

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name} of torch's state of an FSDPModule: this module is sharded by shardkit, whose state is another. "
            "Torch's fully_shard can't be around it"
        )


def _refuse_torchs() -> NoReturn:
    raise ConfigurationError(
        "torch's fully_shard can't be around a module that is sharded by shardkit: it would shard the shards. Shard "
        "all of the model with one of them; where ours lists rows, torch's can leave them out (ignored_params)"
    )


class Registry(dict[str, object]):
    """Lists torch's composable functions of a module; of these ``fully_shard`` asks here if the module is for it."""

    def __contains__(self, name: object) -> bool:
        asking = sys._getframe(1)
        if asking.f_code.co_name == "_is_composable_with_fsdp":
            found = [
                f.f_locals["ignored_params"] for f in callers() if f.f_code.co_name == "_get_managed_modules"
            ]
            is_sharding = any(f.f_code.co_name == "fully_shard" for f in callers())
            if is_sharding and not {*asking.f_locals["module"].parameters()} <= set(*filter(None, found)):
                _refuse_torchs()
        return super().__contains__(name)


def note_state_for_torch(module: nn.Module) -> None:
    """Lets torch's ``fully_shard.state(module)`` and ``_get_module_fsdp_state(module)`` find it."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
    from torch.distributed._composable_state import _insert_module_state

    module.__dict__[STATE_KEY] = states = ComposableStates(module, module.__dict__.get(STATE_KEY, {}))
    states.of_module = _torchs_state(module)
    _insert_module_state(module, cast("Any", states.of_module))  # which holds it weakly
    module.__dict__[REGISTRY_KEY]["fully_shard"] = RegistryItem()  # for torch's replicate


class ComposableStates(dict[object, object]):
    """Answers where torch's ``fully_shard.state(module)`` looks for it, of one module, and has others' states."""

    def __init__(self, module: nn.Module, others: dict[object, object]) -> None:
        super().__init__(others)
        self._module = module
        self.of_module: AsTorchsState | None = None  # of copies none

    def get(self, key: object, default: object = None) -> object:
        """Returns that of ``fully_shard``, or another's."""
        is_ours = getattr(key, "__name__", "") == "fully_shard"
        return _torchs_state(self._module) if is_ours else super().get(key, default)

    def __deepcopy__(self, memo: dict[int, Tree]) -> ComposableStates:
        return ComposableStates(memo.get(id(self._module), self._module), copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> tuple[object, ...]:
        return ComposableStates, (self._module, dict(self))
