"""Takes a module's parameters apart into flat parameters, when it is wrapped.

Legend: W world size, S shard numel.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..backend import Backend, Group, backend_for
from ..checks import (
    all_gather_facts,
    check_one_device,
    check_same_everywhere,
    new_run_id,
    number_of,
    option_facts,
    proposed_run_id,
)
from ..errors import ConfigurationError, LifecycleError, RankMismatchError
from ..flattening.flat_parameter import FLAT_PREFIX, ParamInfo, SharedParamInfo
from ..layout import PackedLayout, Piece, ShardLayout, local_shape, packed_layout
from ..policy import OffloadPolicy, ReducePolicy
from ..reduction.compression import check_compressible
from ..torch_seams.dtensors import is_dtensor, mesh_over, rows_here
from ..torch_seams.strided_views import memory_of
from ..types import Kwargs, ProcessGroup
from .flat_param import FlatParam
from .flat_values import AlignedLayout, RowsLayout, own_shard, put_together, report_padding
from .groups import post_forward_mesh
from .local_steps import step_locally
from .originals import OriginalParameter, Place, managing
from .registered_shard import RegisteredShard, RegisteredShards
from .registrations import note_taken
from .registries import hide, register
from .state import Options, ShardingState, owners_of, state_of
from .unit_module import UnitModule, list_in_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("shardkit")


def check_options(reduce: ReducePolicy, offload: OffloadPolicy, backend: Backend) -> None:
    """Raises ConfigurationError for options that would have no effect."""
    if reduce.bucket_numel is not None:
        raise ConfigurationError(
            f"bucket_numel={reduce.bucket_numel} is for ShardedDDP; FSDP reduces the gradients of a unit together: "
            "wrap smaller units to send less at a time"
        )
    if offload.gradients and not offload.parameters and backend.device_type != "cpu":
        raise ConfigurationError(
            f"gradients=True without parameters=True: the shards are on {backend.device_type}, and gradients are where "
            "their parameters are; offload both"
        )


def _check_compression(options: Options, found: Found, backend: Backend) -> None:
    computed = [
        options.precision.compute or m.param.dtype for m in found.originals if m.param.dtype.is_floating_point
    ]
    check_compressible(options.precision.compression, computed, backend)
    check_compressible(options.reduce.compression, [options.reduce.dtype or d for d in computed], backend)


_CALLS_OF_A_UNIT = 20  # Python frames, at most, that a unit adds to a walk over modules or a forward


def nesting_of(state: ShardingState) -> int:
    """How many units lie one inside another in a module that becomes the next; makes room for calls through them.

    Python ends recursion at a depth that a plain module of some hundred levels stays below. Wrappers add levels of
    their own, which are not to end what works without them.
    """
    deepest, waiting, seen = 0, [state.module], {state.module}
    while waiting:
        m = waiting.pop()
        below = state_of(m)
        if below is not None and below is not state:
            deepest = max(deepest, below.nesting)
            continue
        for child in m._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    nesting = deepest + 1
    if nesting > 10:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + _CALLS_OF_A_UNIT * nesting))
    return nesting


class Found:
    """What a module holds outside of other units.

    Attributes:
        originals: parameters of its own, once each, with all places.
        names: path of each original parameter's first place.
        borrowed: flat parameters of other units that manage parameters which this module uses too.
    """

    def __init__(self, state: ShardingState) -> None:
        self.originals: list[OriginalParameter] = []
        self.names: list[str] = []
        self.borrowed: list[FlatParam] = []
        self.infos: list[ParamInfo] = []  # first places as FlattenParamsWrapper tells them
        self.shared: list[SharedParamInfo] = []  # and further ones
        self.lazy: list[str] = []  # those whose shape is not known yet
        by_param: dict[nn.Parameter, int] = {}
        for path, m in state.own_modules():
            for name, p in list(m._parameters.items()):
                if p is None or p in state.ignored.parameters:
                    continue
                full = f"{path}.{name}" if path else name
                flat = managing(p)
                if isinstance(flat, FlatParam):
                    self._borrow(flat, p, Place(m, name))
                elif p in by_param:
                    self.originals[by_param[p]].places.append(Place(m, name))
                    first_path, first, attribute = self.infos[by_param[p]]
                    self.shared.append((path, first_path, m, name, first, attribute))
                else:
                    by_param[p] = len(self.originals)
                    self.originals.append(OriginalParameter(p, [Place(m, name)]))
                    self.names.append(full)
                    if is_lazy(p):
                        self.lazy.append(full)
                    self.infos.append((path, m, name))

    def _borrow(self, flat: FlatParam, param: nn.Parameter, place: Place) -> None:
        for original in flat.originals:
            if original.param is param:
                original.places.append(place)
        hide(place, param)
        for listing in flat.listings:
            if is_dtensor(listing.param) and listing.originals[0].param is param:
                register(place, cast("nn.Parameter", listing.param))  # state dicts have it under each name
        flat.is_borrowed = True
        if flat not in self.borrowed:
            self.borrowed.append(flat)


def alike(originals: Iterable[int], all_originals: list[OriginalParameter]) -> list[list[int]]:
    """Indices of parameters grouped by dtype and by whether they are trainable, in order of first appearance."""
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i in originals:
        p = all_originals[i].param
        groups.setdefault((p.dtype, p.requires_grad), []).append(i)
    return list(groups.values())


def shard_module(state: ShardingState, unit_module: UnitModule | None = None) -> None:
    """Takes the parameters of a state's module out of it, and lists this rank's shards (collective).

    Args:
        unit_module: lists flat parameters where they are listed as such; of a module sharded in place, None.

    Raises:
        ConfigurationError, RankMismatchError: see :class:`~shardkit.FSDP`; nothing was changed.
    """
    options, module = state.options, state.module
    for below in state.states()[1:]:
        wake(below)
    state.nesting = nesting_of(state)
    found = Found(state)
    check_one_device(m.param for m in found.originals)
    connect(state, found.originals[0].param if found.originals else None, found.borrowed)
    facts = {
        "flatten": options.flatten, "precision": options.precision, "reshard": options.reshard,
        "offload": options.offload, "reduce": options.reduce, "sync_module_states": options.sync_module_states,
        "replicas": options.replicas is not None, "layout": options.layout,
        "dtensors": options.dtensors,
    }  # fmt: skip
    proposed = check_ranks_agree(found, state.group, facts, values=not options.sync_module_states)
    if state.replicas is not None:
        check_ranks_agree(found, state.replicas, facts)
    check_options(options.reduce, options.offload, state.group.backend)
    _check_compression(options, found, state.group.backend)
    check_no_writers(state)
    mesh = _mesh_of_dtensors(state) if options.dtensors and found.originals else None
    state.run_id = new_run_id(state.group, proposed)
    _connect_mesh(state)
    if options.flatten:
        check_names(module, found, state.group.rank)
    indices = range(len(found.originals))
    # where a compiler decides on memory, views of one shard would be copied anew in each step
    together = options.flatten or state.group.backend.has_storage
    parts = alike(indices, found.originals) if together else [[i] for i in indices]
    state.flats.extend(_flat_of(state, found, part, unit_module, mesh) for part in parts)
    name_flats(state)
    state.shared_paths = [
        (f"{there}.{source}" if there else source, f"{here}.{name}" if here else name)
        for here, there, _, name, _, source in found.shared
    ]
    state.make_unit(found.borrowed)
    note_taken(state)
    step_locally([listing.param for listing in state.listings])


def name_flats(state: ShardingState, path: str = "") -> None:
    """Gives flat parameters labels that no others have in this job: ranks compare them when they gather or reduce.

    Args:
        path: of the unit in its root, as soon as that is known; two roots have the same.
    """
    unit = f"{path or type(state.module).__name__}, unit {number_of(state.group, state.run_id)}"
    for k, flat in enumerate(state.flats):
        flat.label = f"parameters {k} of {unit}"


def _flat_of(
    state: ShardingState, found: Found, part: list[int], unit_module: UnitModule | None, mesh: DeviceMesh | None
) -> FlatParam:  # fmt: skip
    """The flat parameter of these original parameters."""
    options, group = state.options, state.group
    originals = [found.originals[i] for i in part]
    device = options.device or originals[0].param.device
    layout = _layout_of(state, [m.shape for m in originals])
    report_padding(layout, f"{found.names[part[0]]!r} and {len(part) - 1} more parameters", group.rank)
    shard = shard_of(originals, layout, group, device, options.sync_module_states)
    if state.replicas is not None and options.sync_module_states and not shard.is_meta:
        state.replicas.channel("buffers").broadcast(shard, 0, label="parameters of the first replica")
    if options.offload.parameters:
        shard = shard if shard.is_meta else group.backend.pin(shard.cpu())
    param: nn.Parameter = nn.Parameter(shard, requires_grad=False)
    places: list[Place] = []
    if options.flatten and unit_module is not None:
        infos = [found.infos[i] for i in part]
        shared = [s for s in found.shared if (s[1], s[4], s[5]) in infos]
        param, place = unit_module.list_flat(originals, infos, shared, shard)
        places = [place]
    elif not group.backend.has_storage:
        param, places = list_in_place(originals, shard, group.world_size), originals[0].places
    if unit_module is not None:
        unit_module.num_params_managed += len(originals)
    flat = FlatParam(
        originals, [found.names[i] for i in part], param, places, layout, group,
        options.precision.compute, options.device, state.post_forward_mesh, options.precision.compression,
    )  # fmt: skip
    if not places:
        flat.list_each(RegisteredShards(_registered(flat, part, mesh), shard))
    return flat


def _layout_of(state: ShardingState, shapes: Sequence[torch.Size]) -> ShardLayout:
    """How the original parameters of one flat parameter are cut."""
    options, group = state.options, state.group
    cut = options.layout
    if not group.backend.has_storage and isinstance(cut, RowsLayout):
        cut = AlignedLayout(None)  # all ranks run one program: their parts have to be of one size
    if options.flatten or isinstance(cut, RowsLayout):
        return cut(shapes, group.world_size)
    each = [cut([shape], group.world_size) for shape in shapes]
    if options.dtensors and group.world_size > 1:
        each = [one if shape else replace(one, copies=True) for one, shape in zip(each, shapes, strict=True)]
    return packed_layout(each)


def _registered(flat: FlatParam, part: list[int], mesh: DeviceMesh | None) -> list[RegisteredShard]:
    """What modules list for each original parameter: this rank's part, a view of the shard."""
    layout, rank = flat.layout, flat.group.rank
    values, world_size = flat.param.data, layout.world_size
    offsets = list(accumulate(layout.part_sizes, initial=0)) if isinstance(layout, PackedLayout) else []
    pieces: list[dict[int, Piece]] = [{} for _ in part]
    for p in layout.pieces():
        pieces[p.item][p.rank] = p
    made: list[RegisteredShard] = []
    for number, (original, position) in enumerate(zip(flat.originals, part, strict=True)):
        shape, spec = original.shape, None
        here = pieces[number].get(rank)
        offset, numel = (0, 0) if here is None else (here.offset, here.numel)
        if world_size == 1:
            alone, listed = ShardLayout((shape.numel(),), 1), tuple(shape)
            offset = layout.offsets()[number]
        elif isinstance(layout, PackedLayout):
            alone, offset = layout.each[number], offsets[number]
            listed = (alone.shard_numel,)
        elif layout.grains is None:
            alone, listed, offset = layout, (layout.shard_numel,), 0
        else:
            there = [pieces[number].get(r) for r in range(world_size)]
            ends = accumulate([0 if p is None else p.start + p.numel for p in there], max)
            alone = ShardLayout((shape.numel(),), world_size, cuts=tuple(ends))
            listed = local_shape(shape, layout.grains[number], numel)
        if mesh is not None:
            dtensor = rows_here(values, mesh, shape)
            spec, listed = dtensor._spec, tuple(dtensor._local_tensor.shape)
        made.append(RegisteredShard(flat, number, position, alone, offset, listed, values, spec))
    return made


def _mesh_of_dtensors(state: ShardingState) -> DeviceMesh:
    options = state.options
    if options.mesh is None and options.replicas is not None:
        raise ConfigurationError(
            "dtensors=True with replicas needs mesh=, with two dimensions: init_device_mesh(device, (replicas, shards))"
        )
    return mesh_over(options.group if options.mesh is None else options.mesh, state.group.backend.device_type)


def connect(state: ShardingState, example: torch.Tensor | None, borrowed: list[FlatParam]) -> None:
    """Finds the backend and the groups: the chosen backend, or that of a tensor of its own, or that of other units."""
    options = state.options
    tensors = [torch.empty(0, device=options.device)] if options.device is not None else []
    if example is not None and not tensors:
        tensors = [example]
    choice = options.backend
    nearby = backend_nearby(state, borrowed)
    backend = backend_for(tensors, nearby if choice is None and not tensors else choice)
    state.group = backend.group(options.group)
    state.replicas = None if options.replicas is None else backend.group(options.replicas)


def _connect_mesh(state: ShardingState) -> None:
    """Groups that keep parameters between forward and backward; one for all units that ask alike."""
    count, group = state.options.reshard.after_forward, state.group
    if isinstance(count, bool) or count >= group.world_size:
        return
    if not group.backend.has_storage:
        raise ConfigurationError(
            f"after_forward={count}: on {group.backend.name} the compiler decides what is kept between "
            "forward and backward; use True or False"
        )
    state.post_forward_mesh = post_forward_mesh(group, count)


def wake(state: ShardingState) -> None:
    """Makes states that were copied, of a unit and of those below it, work: groups, units, memory to gather into.

    Raises:
        ConfigurationError: it is a shard of another number of ranks.
    """
    if state.is_asleep:
        for s in reversed(state.states()):
            if s.is_asleep:
                _wake(s)


def _wake(state: ShardingState) -> None:
    borrowed, divisors = state.__dict__.pop("borrowed"), state.__dict__.pop("divided")
    for owner in owners_of(borrowed):
        if owner.is_asleep:
            _wake(owner)
    connect(state, state.flats[0].listings[0].param if state.flats else None, borrowed)
    for flat in state.flats:
        if flat.layout.world_size != state.group.world_size:
            raise ConfigurationError(
                f"this FSDP module was pickled as a shard of {flat.layout.world_size} and is loaded by "
                f"{state.group.world_size} ranks: groups of ranks are not pickled. Save state_dict() instead"
            )
        flat.connect(state.group, state.post_forward_mesh)
    name_flats(state)
    state.make_unit(borrowed)
    state.unit.divisors = divisors
    state.unit.attach()
    note_taken(state)


def reconnect(state: ShardingState, process_group: ProcessGroup) -> None:
    """Makes a group of as many ranks the one that a state's shards are of (collective); they agree on its run id.

    Raises:
        ConfigurationError: its size, or this rank's place in it, is another one.
        LifecycleError: the root has run already.
    """
    before, now = state.group, state.group.backend.group(process_group)
    if (now.rank, now.world_size) != (before.rank, before.world_size):
        raise ConfigurationError(
            f"this FSDP module holds shard {before.rank} of {before.world_size}; the group that it gets has rank "
            f"{now.rank} of {now.world_size} here. Save state_dict() and load it into a module of that group"
        )
    state.forget_root()
    if state.engine is not None:
        raise LifecycleError(
            "the process group is set of the outermost FSDP module first, then of those below it"
        )
    told = all_gather_facts(now.channel("control"), proposed_run_id(), label="a process group that is set")
    state.run_id = new_run_id(now, told[0])
    state.options, state.group = replace(state.options, group=process_group), now
    state.unit.release()
    for flat in state.flats:
        flat.group = now
        flat.adopt()
    name_flats(state)
    state.unit.attach()


def announce(root: nn.Module, units: int, parameters: int, group: Group) -> None:
    """One line about what was wrapped, for the log."""
    held = sum(p.numel() * p.element_size() for p in root.parameters())
    logger.info(
        "rank %d: %s of %d units, %d parameters in shards of %d bytes a rank; backend %s, world size %d",
        group.rank, type(root).__name__, units, parameters, held, group.backend.name, group.world_size,
    )  # fmt: skip


def check_names(module: nn.Module, found: Found, rank: int) -> None:
    """Raises ConfigurationError if the module has attributes by the names that its flat parameters are to have."""
    for k in range(len(alike(range(len(found.originals)), found.originals))):
        name = f"{FLAT_PREFIX}{k}"
        if hasattr(module, name):
            raise ConfigurationError(
                f"rank {rank}: {type(module).__name__} has an attribute {name!r}, the name that FSDP lists its shard "
                "under; rename it, or pass flatten=False (in the compat API: flatten_parameters=False)"
            )


def check_no_writers(state: ShardingState) -> None:
    """Raises ConfigurationError for layers that write to their own parameters in forward, where that would be lost."""
    group = state.group
    if group.world_size == 1:
        return
    for path, m in state.own_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            raise ConfigurationError(
                f"rank {group.rank}: {path or 'the module'!r} is an {type(m).__name__} with max_norm={m.max_norm}, "
                "which writes to its weight in forward; in an FSDP module that is a copy of what the shards hold, and "
                "the change would be lost. Leave it outside of what is wrapped, or set its max_norm to None and "
                "renormalise between steps, inside of summon_full_params()"
            )


def backend_nearby(state: ShardingState, borrowed: list[FlatParam]) -> Backend | None:
    """That of units below, or of units whose parameters the module uses."""
    for m in state.module.modules():
        below = state_of(m)
        if below is not None and below is not state:
            return below.group.backend
    return borrowed[0].group.backend if borrowed else None


def check_ranks_agree(found: Found, group: Group, options: Kwargs, *, values: bool = False) -> str:
    """Raises RankMismatchError on all ranks if options differ, or parameters in names, shapes or dtypes.

    Args:
        found: the parameters.
        group: the ranks.
        options: by name.
        values: compares the parameters' values, too.

    Returns:
        The run id that the group's first rank proposes. All of it is one exchange, which costs a sync on some devices.
    """
    facts: list[tuple[str, object]] = []
    for name, original in zip(found.names, found.originals, strict=True):
        shape = "no shape yet" if is_lazy(original.param) else tuple(original.shape)
        trainable = "trainable" if original.param.requires_grad else "frozen"
        facts.append((name, (shape, str(original.param.dtype), trainable)))
    facts += option_facts(**options)
    digests = [_digest(m.param) for m in found.originals] if values and group.world_size > 1 else []
    aside = proposed_run_id(), digests
    told = check_same_everywhere(group, facts, "parameters of the wrapped module or options", aside)
    if found.lazy:
        raise ConfigurationError(
            f"rank {group.rank}: {', '.join(map(repr, found.lazy))} of the wrapped module have no shape before its "
            "first forward (lazy modules); run one forward on example inputs, alike on all ranks, then wrap it"
        )
    _compare_values(found, group, [theirs for _, theirs in told])
    run_id: str = told[0][0]
    return run_id


@torch.no_grad()
def _digest(param: nn.Parameter) -> str:
    """Of the values; nothing where there are none yet."""
    if param.is_meta or is_lazy(param):
        return ""
    return hashlib.sha1(memory_of(param.detach().cpu().contiguous())).hexdigest()


def _compare_values(found: Found, group: Group, everybody: list[list[str]]) -> None:
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            k = next(i for i, (a, b) in enumerate(zip(theirs, everybody[0], strict=True)) if a != b)
            raise RankMismatchError(
                f"parameter {k} of the wrapped module, {found.names[k]!r} of shape {tuple(found.originals[k].shape)}, "
                f"has other values on rank {group.ranks[rank]} than on rank {group.ranks[0]}; the shards would mix "
                "both. Seed all ranks alike, or pass sync_module_states=True to start from rank 0's"
            )


@torch.no_grad()
def shard_of(
    originals: list[OriginalParameter],
    layout: ShardLayout,
    group: Group,
    device: torch.device,
    from_rank_0: bool,
) -> torch.Tensor:
    """This rank's shard of the original parameters, [S], in their dtype.

    Args:
        layout: of the flat parameter.
        device: where the original parameters are gathered; the shard is there too.
        from_rank_0: rank 0's values count; else ranks hold the same ones.
    """
    dtype = originals[0].param.dtype
    if any(m.param.is_meta for m in originals):
        return torch.empty(layout.shard_numel, dtype=dtype, device="meta")
    rows = [m.param.detach().reshape(-1).to(device) for m in originals]
    flat = put_together(rows, layout)
    if group.world_size == 1:
        return flat
    if from_rank_0:
        group.channel("buffers").broadcast(flat, 0, label="parameters of rank 0")
    return own_shard(flat, layout, group).clone()
