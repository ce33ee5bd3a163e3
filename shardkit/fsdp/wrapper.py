"""FSDP: a module whose parameters, gradients and optimizer state are sharded over ranks (ZeRO stage 3)."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend, Group, backend_for
from ..checks.same_everywhere import check_one_device
from ..errors import ConfigurationError, LifecycleError
from ..flattening.flat_parameter import FlatParameter
from ..layout import ShardLayout
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..progress import noting_errors
from ..torch_seams.compiling import callees_compiled, not_compiled
from ..torch_seams.forward_signature import signed_as_wrapped
from ..torch_seams.hooks import NO_BACKWARD, current_backward, tensors_in, tensors_of, watch_outputs
from ..torch_seams.other_wrappers import check_wrappable, note_wrapper
from . import construct, local_checkpoint, norms, optim_state
from . import state_dict as state_dicts
from .calls import cast_inputs, lends_memory, run_summoned, without_lent_memory
from .engine import Engine, Watcher
from .flat_param import FlatParam
from .gradients import predivide_factor
from .groups import neighbours_of
from .inside import answer_for
from .lazy import saving_members_by_name
from .listed import flat_of_listed
from .members import are_copied, note_copying
from .refusals import check_asker, copy_when_summoned, replaced_member, replaced_shard
from .registrations import note_taken
from .standing_in import WRAPPED, StandingIn
from .state_of_shards import mark_shards
from .threads import NO_THREAD, check_one_thread, this_thread
from .tracing import COMPILED_AUTOGRAD, check_forward, jit_tracing, transform_level
from .unit import Unit, UnitCall
from .unit_module import UnitModule, exposed


class FSDP(StandingIn):
    """Shards a module's parameters evenly over ranks; each forward and backward gathers them unit by unit.

    ::

        block = FSDP(block)                 # units: wrap what should be gathered together
        model = FSDP(model)                 # the root holds the rest
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)   # after wrapping

    ``parameters()`` lists this rank's shards: a vector for each unit (and dtype), or with ``flatten=False`` one for
    each parameter. After backward their ``grad`` is this rank's shard of the mean over ranks. Any optimizer that works
    element by element gives the results of plain training. Attributes of the wrapped module are reached through the
    wrapper; its parameters have values only inside forward, backward and :meth:`summon_full_params`. Elsewhere they
    tell their shapes and gradients, and raise :class:`LifecycleError` for all that needs values.

    Source: ZeRO (arXiv 1910.02054); naming and layout are those of fairscale 0.4.13.

    Args:
        module: any module on one device. Parts of it that are FSDP already keep what they hold; weights that they share
            with the rest stay one weight.
        group: ranks among which parameters are sharded; None for all.
        replicas: ranks that hold the same shard as this one (hybrid sharding); gradients are averaged over them too.
        precision: dtypes of compute, inputs and buffers.
        reshard: when gathered parameters are given back.
        offload: what lives in host memory.
        reduce: dtype and division of gradients on the wire.
        flatten: one vector for the module, not one for each parameter.
        sync_module_states: start from rank 0's values. Otherwise ranks must hold the same ones.
        device: where to compute; by default where the parameters are.
        backend: name or instance of the backend; by default that of the device.

    Raises:
        ConfigurationError: parameters on several devices; options that exclude each other.
        RankMismatchError: parameters of two ranks differ in names, shapes, dtypes (or, without
            ``sync_module_states``, in values).
    """

    @noting_errors
    def __init__(
        self,
        module: nn.Module,
        *,
        group: Any = None,
        replicas: Any = None,
        precision: PrecisionPolicy | None = None,
        reshard: ReshardPolicy | None = None,
        offload: OffloadPolicy | None = None,
        reduce: ReducePolicy | None = None,
        flatten: bool = True,
        sync_module_states: bool = True,
        device: torch.device | str | None = None,
        backend: str | Backend | None = None,
    ) -> None:
        super().__init__()
        check_wrappable(module, type(self).__name__, may_hold=FSDP)
        self._precision = precision or PrecisionPolicy()
        self._reshard = reshard or ReshardPolicy()
        self._offload = offload or OffloadPolicy()
        self._reduce = reduce or ReducePolicy()
        self._flatten = flatten
        self._process_group = group
        self._replica_group = replicas
        self._backend_choice = backend
        self._nesting = construct.nesting_of(module, FSDP)
        found = construct.Found(module, FSDP)
        check_one_device(m.param for m in found.members)
        self._compute_device = torch.device(device) if device is not None else None
        example = found.members[0].param if found.members else None
        self._connect_group(example, construct.backend_nearby(module, found.borrowed, FSDP))
        options = {
            "flatten": flatten, "precision": self._precision, "reshard": self._reshard, "offload": self._offload,
            "reduce": self._reduce, "sync_module_states": sync_module_states, "replicas": replicas is not None,
        }  # fmt: skip
        for ranks in (self._group, self._replicas):
            if ranks is not None:
                construct.check_ranks_agree(found, ranks, options)
        construct.check_options(self._reduce, self._offload, self._group.backend)
        construct.check_no_writers(module, self._group, FSDP)
        self._connect_neighbours()
        if flatten:
            construct.check_names(module, found, self._group.rank)
        self._fsdp_wrapped_module = UnitModule(module)
        self._engine: Engine | None = None
        self._is_root: bool | None = None
        self._buffers_cast = False
        self._buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self._summoned: contextlib.ExitStack | None = None
        self._loading = False
        self._clears_autocast_cache = False
        self._state_is_local = self._state_on_rank_0_only = False
        self._state_dict_device: torch.device | None = None
        self._keeps_optimizer_state = (
            False  # a part of the model that is this rank's alone, such as an expert
        )
        self._uncollected: dict[int, Any] = {}
        self._build(found, sync_module_states)
        note_taken(module, FSDP)
        answer_for(module, FSDP)
        state_dicts.register_hooks(self)

    # ------------------------------------------------------------ construction
    def _connect_group(self, example: torch.Tensor | None, nearby: Backend | None) -> None:
        """Finds the backend: the chosen one, or that of a tensor of its own, or that of other units."""
        device = self._compute_device
        tensors = [torch.empty(0, device=device)] if device is not None else []
        if example is not None and not tensors:
            tensors = [example]
        choice = self._backend_choice
        backend = backend_for(tensors, nearby if choice is None and not tensors else choice)
        self._group: Group = backend.group(self._process_group)
        self._replicas: Group | None = (
            None if self._replica_group is None else backend.group(self._replica_group)
        )

    def _connect_neighbours(self) -> None:
        """Groups that keep parameters between forward and backward; one for all units that ask alike."""
        count = self._reshard.after_forward
        self._neighbours: Group | None = None
        if isinstance(count, bool) or count >= self._group.world_size:
            return
        if not self._group.backend.has_storage:
            raise ConfigurationError(
                f"after_forward={count}: on {self._group.backend.name} the compiler decides what is kept between "
                "forward and backward; use True or False"
            )
        self._neighbours = neighbours_of(self._group, count)

    def _build(self, found: construct.Found, from_rank_0: bool) -> None:
        wrapped = self._fsdp_wrapped_module
        indices = range(len(found.members))
        parts = construct.alike(indices, found.members) if self._flatten else [[i] for i in indices]
        self._flats: list[FlatParam] = []
        for part in parts:
            members = [found.members[i] for i in part]
            device = self._compute_device or members[0].param.device
            layout = self._layout([m.shape for m in members])
            shard = construct.shard_of(members, layout, self._group, device, from_rank_0)
            if self._replicas is not None and from_rank_0 and not shard.is_meta:
                self._replicas.channel("buffers").broadcast(shard, 0, label="parameters of the first replica")
            if not self._flatten and self._group.world_size == 1:
                shard = shard.view(members[0].shape)
            if self._offload.parameters:
                shard = self._group.backend.pin(shard.cpu())
            infos = [found.infos[i] for i in part]
            shared = [s for s in found.shared if (s[1], s[4], s[5]) in infos]
            listed, holder = wrapped.adopt(members, infos, shared, shard, self._flatten)
            flat = FlatParam(
                members, [found.names[i] for i in part], listed, holder, layout, self._group,
                self._precision.compute, self._compute_device, self._neighbours,
            )  # fmt: skip
            self._flats.append(flat)
        self._shared_paths = [
            (f"{there}.{source}" if there else source, f"{here}.{name}" if here else name)
            for here, there, _, name, _, source in found.shared
        ]
        self._make_unit(found.borrowed)

    def _layout(self, shapes: Sequence[torch.Size]) -> ShardLayout:
        """How members of these shapes are cut; subclasses may round shards up."""
        return ShardLayout(tuple(shape.numel() for shape in shapes), self._group.world_size)

    def _make_unit(self, borrowed: list[FlatParam]) -> None:
        for flat in self._flats:
            flat.modules = [m for _, m in construct.modules_outside_units(self.module, FSDP)]
        self._unit = Unit(
            self._flats,
            borrowed,
            self._reshard.after_forward is False,
            self._reduce.dtype,
            self._divisors(),
            self._replicas,
        )

    def _divisors(self) -> tuple[float, float]:
        world = self._group.world_size
        before = self._reduce.predivide
        if before is None:
            before = float(predivide_factor(world))
        return before, world / before

    # ------------------------------------------------------------ forward
    @not_compiled
    def _become_root(self) -> Engine:
        wrappers = [m for m in self.modules() if isinstance(m, FSDP)]
        names = {m: n for n, m in self.named_modules() if isinstance(m, FSDP)}
        for w in wrappers:
            w._unit.name = state_dicts.clean(names[w])
            for k, flat in enumerate(w._flats):
                flat.label = f"parameters {k} of {w._unit.name or 'the root'}"
                flat.path = w._unit.name
            w._is_root = w is self
        self._unit.keep_after_forward = self._reshard.after_forward is False or not self._reshard.root
        engine = Engine([w._unit for w in wrappers], self._reshard.prefetch)
        for w in wrappers:
            w._engine = engine
            w._cast_buffers()
        members = sum(len(flat.members) for w in wrappers for flat in w._flats)
        construct.announce(self, len(wrappers), members, self._group)
        return engine

    @signed_as_wrapped
    @callees_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with its parameters gathered."""
        dtype = self._precision.inputs or self._precision.compute
        inner: Any = self._modules[WRAPPED]._modules["_fpw_module"]  # type: ignore[union-attr]
        if self._summoned is not None:
            self._cast_buffers()
            if dtype is not None:
                args, kwargs = cast_inputs((args, kwargs), dtype)
            return run_summoned(inner, self._unit.needs, args, kwargs)
        if (
            jit_tracing() is not None or transform_level() is not None or COMPILED_AUTOGRAD in sys.modules
            or torch.fx._symbolic_trace._is_fx_tracing_flag or torch.compiler._is_exporting_flag
        ):  # fmt: skip
            check_forward(self._unit)
        engine = self._engine or self._become_root()
        unit = self._unit
        for flat in self._flats:
            if flat.holder.module._parameters[flat.holder.name] is not flat.param:
                raise replaced_shard(flat)
            for member in flat.members:
                for module, name in member.places:
                    found = module._parameters.get(name)
                    if found is not None and found is not flat.param:
                        raise replaced_member(member.param)
        in_backward = current_backward() != NO_BACKWARD
        is_outermost = self._is_root and engine.forwards == 0 and not in_backward
        if not in_backward:
            me, other = this_thread(), engine.thread
            if other not in (me, NO_THREAD):
                check_one_thread(engine, "forward")
            engine.thread = me
        try:
            if is_outermost:
                engine.begin_forward()
            engine.before_forward(unit, (args, kwargs))
            if dtype is not None:
                args, kwargs = cast_inputs((args, kwargs), dtype)
            call = None
            if unit.has_frozen and torch.is_grad_enabled():
                call = UnitCall.watching(unit, tensors_in((args, kwargs)))
            outputs = (saving_members_by_name(inner) if engine.is_lazy else inner)(*args, **kwargs)
            tensors = (outputs,) if isinstance(outputs, torch.Tensor) else tensors_of(outputs)
            if lends_memory(unit, tensors):
                outputs = without_lent_memory(unit, outputs)
                tensors = tensors_of(outputs)
        except BaseException as error:
            engine.fail_forward(bool(is_outermost))
            if engine.forwards <= 0:
                engine.thread = NO_THREAD
            # what is refused is refused on all ranks; else other ranks may wait in the next unit's gather
            if is_outermost and not engine.is_lazy and not isinstance(error, LifecycleError):
                self._group.abort(f"its forward raised {type(error).__name__}: {error}")
            raise
        engine.after_forward(unit)
        if torch.is_grad_enabled():
            watcher: Watcher = unit if call is None else call
            watched = engine.watching(watcher) if is_outermost else watcher
            is_reached = watch_outputs(tensors, watched.enter_backward)
            engine.note_outputs(unit, is_reached)
        if is_outermost:
            engine.end_forward()
        if engine.forwards == 0:
            engine.thread = NO_THREAD
        if self._clears_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates this rank's gradients; the next backward outside reduces them too.

        Costs memory for full gradients on every rank.

        Raises:
            LifecycleError: called on a unit below the root.
        """
        engine = self._engine or self._become_root()
        if not self._is_root:
            raise LifecycleError("no_sync is for the outermost FSDP module; call it there")
        before = engine.set_accumulating(True)
        try:
            yield
        finally:
            engine.set_accumulating(before)

    # ------------------------------------------------------------ full parameters
    @contextlib.contextmanager
    def summon_full_params(self, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
        """Inside, the module's own parameters are there under their own names, full and in full precision (collective).

        Forward inside runs on this rank alone, with the parameters that are summoned: evaluation or ``generate`` on one
        rank needs no other. Backward inside is refused.

        Args:
            recurse: those of units below too.
            writeback: changes to them are kept. Ranks must make the same changes.

        Raises:
            LifecycleError: inside of forward or backward, of this or another thread.
        """
        with self._summon(recurse, writeback):
            yield

    @contextlib.contextmanager
    def _summon(self, recurse: bool, writeback: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            wrappers = [m for m in self.modules() if isinstance(m, FSDP)] if recurse else [self]
            for w in wrappers:
                if w._summoned is None:
                    w._enter_summon(writeback)
                    stack.callback(w._exit_summon)
            yield

    def _enter_summon(self, writeback: bool) -> None:
        if self._engine is not None:
            self._engine.check_idle("summon_full_params")
        self._unit.release()
        stack = contextlib.ExitStack()
        for flat in [*self._flats, *self._unit.borrowed]:
            if not flat.is_summoned:  # by another unit that uses it
                stack.enter_context(flat.summoned(writeback))
                stack.enter_context(exposed(flat))
        self._summoned = stack

    def _exit_summon(self) -> None:
        stack, self._summoned = self._summoned, None
        self._unit.release()  # asked for meanwhile
        if stack is not None:
            stack.close()

    def apply(self, fn: Callable[[nn.Module], None]) -> FSDP:
        """As ``nn.Module.apply`` of the wrapped module, with full parameters whose changes are kept (collective).

        ``fn`` gets the modules of the unwrapped model, once each, and no wrappers: these have the attributes of what
        they wrap, so that a function that looks for a ``weight`` would initialize it once more.
        """
        with self._summon(recurse=False, writeback=True):
            self.module.apply(fn)
        return self

    # ------------------------------------------------------------ gradients
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over all ranks is at most ``max_norm`` (collective).

        Returns:
            The norm before, 0-dim.

        Raises:
            LifecycleError: called on a unit below the root.
        """
        if self._engine is None:
            self._engine = self._become_root()
        if not self._is_root:
            raise LifecycleError("clip_grad_norm_ is for the outermost FSDP module; call it there")
        self._engine.check_idle("clip_grad_norm_")
        return norms.clip(self, float(max_norm), float(norm_type))

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """Parameters (shards) of this module and below that have a gradient."""
        return [p for p in self.parameters() if p.grad is not None]

    def set_divisors(self, before: float, after: float) -> None:
        """Gradients are divided by the one before and by the other after their sum over ranks."""
        self._unit.divisors = (before, after)
        self._unit.attach()

    # ------------------------------------------------------------ being moved and copied
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FSDP:
        if torch.__future__.get_swap_module_params_on_conversion():
            raise ConfigurationError(
                "an FSDP module can't be moved or cast by swapping its parameters, which are views of one vector; "
                "call torch.__future__.set_swap_module_params_on_conversion(False) first"
            )
        self._unit.release()
        for flat in self._flats:
            flat.drop()
        super()._apply(fn, recurse)
        self._rebind()
        return self

    def _rebind(self) -> None:
        """After parameters were moved, cast, or replaced by other objects."""
        for flat in self._flats:
            holder = flat.holder
            param = holder.module._parameters[holder.name]
            if param is not None and param is not flat.param:
                if isinstance(flat.param, FlatParameter) and not isinstance(param, FlatParameter):
                    param = flat.param._like_this(param)
                    holder.module._parameters[holder.name] = param
                flat.param = param
                if not flat.is_listed_flat:
                    for place in flat.members[0].places:
                        place.module._parameters[place.name] = param
        if self._flats and self._compute_device is None:
            kind = self._flats[0].param.device.type
            if kind not in (self._group.backend.device_type, "meta"):
                self._connect_group(self._flats[0].param, None)
                for flat in self._flats:
                    flat.group = self._group
        for flat in self._flats:
            flat.adopt()
        self._unit.attach()

    @noting_errors
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a full state dict (collective); each rank keeps its shard. Arguments and result are ``nn.Module``'s."""
        return state_dicts.load(self, super().load_state_dict, state_dict, strict, assign)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards, 1-D and padded, under fairscale's names; loads at the same world size only."""
        with state_dicts.local_state(self):
            state = FSDP.state_dict(self, *args, **kwargs)  # a subclass's may have called this
        local_checkpoint.mark(self, state)
        mark_shards(self, state)
        return state

    @noting_errors
    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads what :meth:`local_state_dict` returned on this rank (collective).

        Raises:
            ConfigurationError: on all ranks, if it is another rank's, world size's or model's; nothing is loaded.
        """
        if "flat_param" in state_dict and "flat_param_0" not in state_dict:  # its name in old checkpoints
            state_dict = {"flat_param_0" if k == "flat_param" else k: v for k, v in state_dict.items()}
        local_checkpoint.check_own(self, state_dict)
        with state_dicts.local_state(self):
            return FSDP.load_state_dict(self, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What :meth:`consolidate_shard_weights` needs to know of this rank's shards."""
        return local_checkpoint.metadata(self)

    consolidate_shard_weights = staticmethod(local_checkpoint.consolidate)

    @noting_errors
    def gather_full_optim_state_dict(self, optim: Optimizer, **ignored: Any) -> dict[str, Any] | None:
        """The optimizer's full state on rank 0, None on others (collective); see ``optim_state.py`` for the format."""
        flats, uncollected = self._all_flats()
        state = optim.state_dict()
        index = {id(p): i for i, p in enumerate(p for g in optim.param_groups for p in g["params"])}
        self._uncollected = {
            index[id(f.param)]: copy.deepcopy(state["state"].get(index[id(f.param)], {}))
            for f in uncollected
            if id(f.param) in index
        }
        is_first = self._group.rank == 0 and (self._replicas is None or self._replicas.rank == 0)
        return optim_state.gather_full(flats, uncollected, state, optim, is_first)

    @noting_errors
    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a full optimizer state, for ``optimizer.load_state_dict``.

        Raises:
            ConfigurationError: it belongs to another model.
        """
        shard = optim_state.shard_full(self._all_flats()[0], full_optim_state_dict)
        for local in full_optim_state_dict.get("uncollected_local_ids", []):
            if local in self._uncollected:
                shard["state"][local] = self._uncollected[local]
        return shard

    def _all_flats(self) -> tuple[list[FlatParam], list[FlatParam]]:
        """All vectors, and those whose optimizer state is this rank's alone."""
        wrappers = [m for m in self.modules() if isinstance(m, FSDP)]
        flats = [f for w in wrappers for f in w._flats]
        return flats, [f for w in wrappers if w._keeps_optimizer_state for f in w._flats]

    def _cast_buffers(self) -> None:
        dtype = self._precision.buffers
        if dtype is None or self._buffers_cast:
            return
        self._buffers_cast = True
        for _, m in construct.modules_outside_units(self.module, FSDP):
            for name, buffer in m._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    self._buffer_dtypes[m, name] = buffer.dtype
                    m._buffers[name] = buffer.to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDP:
        if not are_copied(self._unit.needs, memo):
            units = [m for m in self.modules() if isinstance(m, FSDP)]
            if any(w._summoned is not None for w in units):
                raise copy_when_summoned(self._group.rank)
            note_copying([f for w in units for f in w._unit.needs], memo)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = copy.deepcopy(self._state_without_groups(), memo)
        state["_process_group"], state["_replica_group"] = self._process_group, self._replica_group
        made.__setstate__(state)
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self._summoned is not None:
            raise copy_when_summoned(self._group.rank)
        if self._replicas is not None:
            raise ConfigurationError(
                "an FSDP module with replicas can't be pickled: groups of ranks can't, and without them gradients "
                "would not be averaged. Save state_dict(), or use copy.deepcopy(), which keeps the groups"
            )
        return self._state_without_groups()

    def _state_without_groups(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        groups = ("_group", "_neighbours", "_replicas", "_process_group", "_replica_group")
        for name in ("_engine", "_unit", *groups):
            state[name] = None
        state["_is_root"] = None
        state["_borrowed"] = self._unit.borrowed
        state["_divided"] = self._unit.divisors
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        borrowed, divisors = state.pop("_borrowed"), state.pop("_divided")
        super().__setstate__(state)
        example = self._flats[0].param if self._flats else None
        self._connect_group(example, construct.backend_nearby(self.module, borrowed, FSDP))
        for flat in self._flats:
            if flat.layout.world_size != self._group.world_size:
                raise ConfigurationError(
                    f"this FSDP module was pickled as a shard of {flat.layout.world_size} and is loaded by "
                    f"{self._group.world_size} ranks: groups of ranks are not pickled. Save state_dict() instead"
                )
            flat.connect(self._group, self._neighbours)
        self._make_unit(borrowed)
        self._unit.divisors = divisors
        self._unit.attach()
        note_taken(self.module, FSDP)
        answer_for(self.module, FSDP)

    @noting_errors
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Full parameters under the wrapped module's own names, in full precision, on every rank (collective).

        They are copies: writing to one changes nothing here.
        """
        check_asker(self)
        return state_dicts.full(self, super().state_dict, *args, **kwargs)


note_wrapper(FSDP, owns=lambda param: flat_of_listed(param) is not None)
