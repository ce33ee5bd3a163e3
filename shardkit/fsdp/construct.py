"""Takes the parameters of modules apart into flat parameters: a line of steps, each with what the one before found.

1. find: which parameters a module holds outside of other units; nothing is changed.
2. agree: ranks compare that and the options; one exchange for all units that are made together.
3. cut: this rank's shard of the parameters of one dtype and kind.
4. list: modules list the shard, or parts of it, in place of the parameters.
5. unit: what the engine runs.

Legend: W world size, S shard numel.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..backend import Backend, Group, backend_for, backend_of_job
from ..checks import (
    all_gather_facts,
    check_one_device,
    check_same_everywhere,
    new_run_ids,
    numbers_of,
    option_facts,
    proposed_run_id,
    refuse_lazy,
    refuse_writers,
)
from ..errors import ConfigurationError, LifecycleError, RankMismatchError, RedirectedError
from ..flattening.wrapper import FLAT_PREFIX, FlatParameter
from ..layout import ShardLayout
from ..optimizers.shards import IN_BACKWARD, are_registered, listing_of, refuse_steps_in_backward, take_part
from ..policy import Compression
from ..reduction.compression import check_compressible
from ..reduction.ordered import announced, check_order, refuse_other, refuse_replicas
from ..torch_seams.tensors import check_within, dimension_of, is_dtensor, memory_of, mesh_over, move_buffers
from ..types import Facts, Memo, ProcessGroup, Tree
from .flat_param import FlatParam, RegisteredShard, Stored, no_values, own_shard, put_together
from .optimizer_check import first_steps, local_steps, notice_scaling, watch_steps
from .originals import (
    COPIED,
    ORDER,
    AnnotatedParameter,
    OriginalParameter,
    Place,
    SplitParameter,
    copy_when_summoned,
    hidden,
    hide,
    known_originals,
    managing,
    owner_of,
    refuse_split,
    register,
)
from .own_forms import ExtendedParameter, PackedWeight, extension_of, is_packable
from .state import Options, ShardingState, dotted, forget_state, modules_outside_units, owners_of, units_in
from .submodule_api import answer_for, take
from .unit import OWN, Unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


logger = logging.getLogger("shardkit")

_MUCH = 0.1  # of what is stored
_WORTH = 2**16  # elements; less is nothing to warn of


def shard(states: Sequence[ShardingState]) -> None:
    """Takes the parameters of these states' modules out of them, and lists this rank's shards (collective).

    Args:
        states: of modules that become units, those inside of others first.

    Raises:
        ConfigurationError, RankMismatchError: see :class:`~shardkit.FSDP`; nothing was changed.
    """
    waiting: list[Found] = []
    claimed: set[int] = set()
    try:
        for state in states:
            if state.mates and state is not state.mates[0]:
                continue  # it is in what the first one finds
            found = find(state, claimed)
            if len(found.devices) > 1:
                check_one_device([original.param for original in found.originals])
            before = waiting[-1].state if waiting and waiting[-1].devices == found.devices else state
            if before is not state and before.options is state.options:
                state.group, state.replicas = before.group, before.replicas
            else:
                example = found.originals[0].param if found.originals else None
                connect(state, example, found.lenders())
            waiting.append(found)
            # its exchange gives back memory of the one before (docs/XLA.md)
            if not state.group.backend.has_storage:
                _shard(waiting, claimed)
                waiting = []
        if waiting:
            _shard(waiting, claimed)
    except BaseException:
        for state in states:
            if "unit" not in state.__dict__:
                forget_state(state)  # whoever handles the error may try again
        raise


def _shard(units: Sequence[Found], claimed: set[int]) -> None:
    _refuse_shards(units, are_registered(claimed))
    agree(units)
    _check(units)
    watch_steps()
    first_steps.wrapped += 1  # optimizers are looked at before their next step
    with torch.no_grad():
        for found in units:
            state = found.state
            for originals in alike(found):
                state.flats.append(_listed(found, originals, *_cut(found, originals)))
            borrowed = _borrow(found) if found.borrowed else []
            if state.options.mesh is not None and state.options.mesh.device_type != "cpu":
                for _, m in found.modules:
                    move_buffers(m, state.group.backend.device(), "cpu")
            state.shared_paths = found.shared
            _run(state, list(map(itemgetter(1), found.modules)), borrowed)
            for mate in state.mates[1:]:
                mate.flats, mate.group, mate.replicas = state.flats, state.group, state.replicas
                mate.run_id, mate.unit = state.run_id, state.unit
                mate.post_forward_mesh = state.post_forward_mesh
    name_flats({found.state: "" for found in units})
    if units[0].state.group.rank == 0:
        report_padding([(flat.names, flat.layout) for found in units for flat in found.state.flats])


def _run(state: ShardingState, modules: list[nn.Module], borrowed: list[FlatParam]) -> None:
    """Makes the unit that the engine runs; modules of one unit share it."""
    reshard, reduce, unit = state.options.reshard, state.options.reduce, None
    for mate in state.mates:
        unit = unit or mate.__dict__.get("unit")
    if unit is None:
        keeps = reshard.after_forward is False
        unit = Unit(state.flats, borrowed, keeps, reduce, state.divisors, state.replicas)
        unit.doors = max(1, len(state.mates))
        unit.keeps_frozen = reshard.frozen in ("keep", "host")
    state.unit = unit
    for flat in state.flats:
        flat.modules, flat.keeps_on_host = modules, reshard.frozen == "host"
    answer_for(modules, state.door is state.module, state.options.dtensors)
    take(state, modules)
    if state.options.dtensors:
        take_part(local_steps, last=True)


# ------------------------------------------------------------ find
_shape_of, _values_of, _is_meta = attrgetter("shape"), attrgetter("values"), attrgetter("is_meta")


class Found:
    """Lists what a module holds outside of other units, and others that are one unit with it.

    Attributes:
        state: the module's.
        modules: those that hold it, with their paths.
        below: the outermost units below, with their paths.
        originals: parameters of its own, once each, with all places.
        devices: of these.
        borrowed: places of parameters that other units manage, or are about to.
        shared: first and further paths of parameters with several.
        mesh: over which tensor parallelism has cut some of them, if it has.
        cut_over: that of DTensors, where these are to be listed.
        is_awaited: its parameters are on the meta device here, and get rank 0's values.
    """

    def __init__(self, state: ShardingState) -> None:
        self.state = state
        self.modules: list[tuple[str, nn.Module]] = []
        self.below: list[tuple[str, ShardingState]] = []
        self.originals: list[OriginalParameter] = []
        self.devices = set[torch.device]()
        self.borrowed: list[tuple[nn.Parameter, Place]] = []
        self.shared: list[tuple[str, str]] = []
        self.mesh: DeviceMesh | None = None
        self.cut_over: DeviceMesh | None = None
        self.is_awaited = False

    def lenders(self) -> list[FlatParam]:
        """Returns flat parameters of other units whose parameters this module uses too, as far as they exist."""
        return [*dict.fromkeys(f for p, _ in self.borrowed if isinstance(f := managing(p), FlatParam))]


def find(state: ShardingState, claimed: set[int]) -> Found:
    """Looks through a module, or those that are one unit with it; changes nothing.

    Args:
        claimed: ids of parameters that units made together with this one have found before; those of this one are
            added.
    """
    found, options = Found(state), state.options
    homes: dict[nn.Module, int] = {}
    for mate in state.mates or [state]:
        for path, m in modules_outside_units(mate.module, "", mate.door, mate.ignored.modules, found.below):
            if homes.setdefault(m, mate.home) == mate.home:
                found.modules.append((path, m))
    for _, below in found.below:
        _make_room(state, below)
    ignored = set(map(id, state.ignored.parameters))
    by_param: dict[int, OriginalParameter] = {}
    are_plain = options.reshard.frozen != "packed" and options.whole_mesh is None
    for path, m in found.modules:
        for name, p in m._parameters.items():
            if p is None or id(p) in ignored:
                continue
            place, full = Place(m, name), f"{path}.{name}" if path else name
            if (known := by_param.get(id(p))) is not None:
                known.places.append(place)
                if known.home == homes[m]:
                    found.shared.append((known.name, full))
            elif id(p) in claimed or (id(p) in known_originals and managing(p) is not None):
                found.borrowed.append((p, place))
            else:
                is_plain = are_plain and type(p) is nn.Parameter
                kind = OriginalParameter if is_plain else _kind_of(p, full, options)
                by_param[id(p)] = original = kind(p, place, homes[m])
                original.name, original.position = full, len(found.originals)
                found.originals.append(original)
                found.devices.add(p.device)
                found.mesh = found.mesh or original.mesh
                if options.placement is not None:
                    original.dim = dimension_of(options.placement(p), full, p)
                original.keeps_dtype = options.keeps_dtype is not None and options.keeps_dtype(p)
    claimed.update(by_param)
    return found


_CALLS_OF_A_UNIT = 20  # Python frames, at most, that a unit adds to a walk over modules or a forward


def _make_room(state: ShardingState, below: ShardingState) -> None:
    """Wakes a unit inside, and makes room for calls through units that lie one inside another.

    Python ends recursion at a depth that a plain module of some hundred levels stays below. Wrappers add levels of
    their own, which are not to end what works without them.
    """
    if below.is_asleep:
        wake(below)
    state.nesting = max(state.nesting, 1 + below.nesting)
    if state.nesting > 10:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + _CALLS_OF_A_UNIT * state.nesting))


def _kind_of(
    param: nn.Parameter, name: str, options: Options
) -> Callable[[Tree, Place, int], OriginalParameter]:
    reshard, whole = options.reshard, options.whole_mesh
    if reshard.frozen == "packed" and is_packable(param):
        return functools.partial(PackedWeight, packing=reshard.packing)
    if is_dtensor(param):
        return functools.partial(SplitParameter, whole=whole)
    if whole is not None and (noted := whole.annotation(name, param)) is not None:
        return functools.partial(AnnotatedParameter, noted=noted)
    return extension_of(param) or OriginalParameter


def alike(found: Found) -> list[list[OriginalParameter]]:
    """Groups parameters that make one flat parameter: of one dtype, kind and mesh, in order of first appearance."""
    state = found.state
    if not state.options.flatten and not state.group.backend.has_storage:
        # where a compiler decides on memory, views of one shard would be copied anew in each step
        return [[original] for original in found.originals]
    groups: dict[tuple[object, ...], list[OriginalParameter]] = {}
    for original in found.originals:
        param, mesh = original.param, original.mesh or found.mesh
        kind = param.dtype, param.requires_grad, original.store, mesh, original.keeps_dtype
        groups.setdefault(kind, []).append(original)
    return list(groups.values())


def connect(state: ShardingState, example: torch.Tensor | None, lenders: Sequence[FlatParam]) -> None:
    """Finds the backend and the groups: the chosen backend, or that of a tensor of its own, or that of other units."""
    options = state.options
    tensors = [torch.empty(0, device=options.device)] if options.device is not None else []
    if example is not None and not tensors:
        mesh = options.mesh  # torch moves what is elsewhere to its device
        is_elsewhere = mesh is not None and mesh.device_type != example.device.type
        tensors = [torch.empty(0, device=mesh.device_type) if mesh and is_elsewhere else example]
    choice = options.backend
    if choice is None and not tensors:
        below = units_in(state.door, state)
        choice = below[0].group.backend if below else lenders[0].group.backend if lenders else None
    backend = backend_for(tensors, choice)
    state.group = backend.group(options.group)
    state.replicas = None if options.replicas is None else backend.group(options.replicas)
    if state.replicas is not None:
        state.replicas.channel("parameters")  # connected here; averages keep an order in it


# ------------------------------------------------------------ agree
def agree(units: Sequence[Found]) -> None:
    """Compares these units between ranks (collective): one exchange for each group, which costs a sync on some devices.

    Raises:
        ConfigurationError: parameters have no shape yet.
        RankMismatchError: on all ranks; options differ, or parameters in names, shapes, dtypes or (where those of one
            rank don't count) values.
    """
    by_group: dict[Group, list[Found]] = {}
    by_replicas: dict[Group, list[Found]] = {}
    for found in units:
        by_group.setdefault(found.state.group, []).append(found)
        if found.state.replicas is not None:
            by_replicas.setdefault(found.state.replicas, []).append(found)
    refused = ""
    for group, ours in by_group.items():
        digests = _digests(ours)
        aside = proposed_run_id(), digests, _lacking(ours)
        facts = _facts(ours)
        told = check_same_everywhere(group, facts, _WHAT, aside)
        refuse_lazy(facts, "FSDP")
        refused = _await_values(ours, [theirs for _, _, theirs in told])
        if refused and not by_replicas:
            raise ConfigurationError(refused)
        if digests:
            _compare_values([found for found in ours if not found.state.options.sync_module_states], told)
        for found, run_id in zip(ours, new_run_ids(group, told[0][0], len(ours)), strict=True):
            found.state.run_id = run_id
    for group, ours in by_replicas.items():
        told = check_same_everywhere(group, _facts(ours), _WHAT, (_lacking(ours), refused))
        texts = [text for _, text in told] + [_await_values(ours, [lacking for lacking, _ in told])]
        for text in filter(None, texts):  # of any copy of the model
            raise ConfigurationError(text)


_WHAT = "parameters of the wrapped module or options"
_COMPARED = "flatten", "precision", "reshard", "offload", "reduce", "sync_module_states", "layout", "dtensors"
_compared = attrgetter(*_COMPARED)


@functools.lru_cache(maxsize=64)  # units of a model mostly have the same
def _option_facts(*values: object) -> Facts:
    return option_facts(**dict(zip((*_COMPARED, "replicas"), values, strict=True)))


def _facts(units: Sequence[Found]) -> Facts:
    facts: list[tuple[str, object]] = []
    told: Options | None = None
    for k, found in enumerate(units):
        unit = f" of unit {k}" if len(units) > 1 else ""
        for original in found.originals:
            p: Tree = original.param
            shape = "no shape yet" if original.is_lazy else tuple(original.shape)
            kind = "trainable" if p.requires_grad else "frozen"
            cut = () if original.within is None else (str(original.within.placements),)
            along = (f"cut along dimension {original.dim}",) if original.dim else ()
            computed = ("computed with as it is",) if original.keeps_dtype else ()
            own = (original.facts,) if isinstance(original, ExtendedParameter) else ()  # nobody sends these
            facts.append((original.name + unit, (shape, str(p.dtype), kind, *cut, *along, *computed, *own)))
        o = found.state.options
        if o is not told:  # units that one call makes have the same
            told = o
            facts += _option_facts(*_compared(o), o.replicas is not None)
    return facts


def _digests(units: Sequence[Found]) -> list[list[str]]:
    """Makes digests of values that have to be the same on all ranks; nothing where there are none yet."""
    made: list[list[str]] = []
    for found in units:
        if found.state.options.sync_module_states or found.state.group.world_size == 1:
            continue
        made.append([])
        for o in found.originals:
            there = not (o.param.is_meta or o.is_lazy)
            made[-1].append(hashlib.sha1(memory_of(o.values.cpu().contiguous())).hexdigest() if there else "")
    return made


_META = torch.device("meta")


def _lacking(units: Sequence[Found]) -> list[int]:
    """Numbers the units whose parameters have no values here, and get none."""
    return [k for k, found in enumerate(units) if _META in found.devices and not found.is_awaited]


def _await_values(units: Sequence[Found], told: Sequence[list[int]]) -> str:
    """Notes which units get their values from the first of these ranks, where they are on the meta device on others.

    Returns:
        What to refuse, on all ranks: it is the first one that lacks them, or none are sent.
    """
    if told.count(told[0]) == len(told):
        return ""
    for k, found in enumerate(units):
        lack = [rank for rank, theirs in enumerate(told) if k in theirs]
        if 0 < len(lack) < len(told):
            state, are_apart = found.state, any(original.is_apart for original in found.originals)
            if 0 in lack or are_apart or not state.options.sync_module_states:
                return (
                    f"parameters of {type(state.module).__name__}, such as {found.originals[0].name!r}, are on the "
                    f"meta device on the ranks {lack} of {len(told)}, and have values on others. Those of the first "
                    "are sent to all: they have to be there, sync_module_states=True, and no parameter of a class "
                    "with an all-gather of its own. Or build the module on the meta device on all ranks"
                )
            found.is_awaited = _META in found.devices
    return ""


def _compare_values(units: Sequence[Found], told: Sequence[tuple[str, list[list[str]], list[int]]]) -> None:
    group, (_, first, _) = units[0].state.group, told[0]
    for rank, (_, theirs, _) in enumerate(told):
        if theirs != first:
            n = next(i for i, (a, b) in enumerate(zip(theirs, first, strict=True)) if a != b)
            differing = (k for k, (a, b) in enumerate(zip(theirs[n], first[n], strict=True)) if a != b)
            differs = units[n].originals[next(differing)]
            raise RankMismatchError(
                f"parameter {differs.position} of the wrapped module, {differs.name!r} of shape {tuple(differs.shape)},"
                f" has other values on rank {group.ranks[rank]} than on rank {group.ranks[0]}; the shards would mix "
                "both. Seed all ranks alike, or pass sync_module_states=True to start from rank 0's"
            )


# ------------------------------------------------------------ what can't be sharded
def _check(units: Sequence[Found]) -> None:
    """Raises ConfigurationError for what is the same on all ranks."""
    _refuse_gradients_of_other_dtypes(units)
    checked: tuple[Options, Group] | None = None
    for found in units:
        options, group = found.state.options, found.state.group
        refuse_writers(found.modules, group)
        if IN_BACKWARD in sys.modules and sys.modules[IN_BACKWARD].param_to_acc_grad_map.data:
            refuse_steps_in_backward(map(attrgetter("param"), found.originals))
        if checked != (options, group):  # units that one call makes have the same
            checked = options, group
            check_options(options, group)
        if options.precision.compression or options.reduce.compression or options.reduce.order:
            _check_reduction(found)
        if options.precision.compute is not None:
            _check_codes(found, options.precision.compute)
        if options.reshard.sends_changes:
            _check_changes(found, options.precision.compression)
        if options.flatten:
            _check_names(found)
        if options.dtensors and found.originals:
            found.cut_over = _mesh_of_dtensors(found)
        elif any(map(attrgetter("is_apart"), found.originals)):
            apart = [o for o in found.originals if o.is_apart]
            refuse_split(apart, "A module that lists no DTensors", "Use fully_shard(dtensors=True)")
        count = options.reshard.after_forward
        if not isinstance(count, bool) and count != group.world_size:
            found.state.post_forward_mesh = post_forward_mesh(group, count)


def _check_reduction(found: Found) -> None:
    state = found.state
    options, group, reduce = state.options, state.group, state.options.reduce
    for compression, wire in ((options.precision.compression, None), (reduce.compression, reduce.dtype)):
        if compression is not None:
            floats = [o.param.dtype for o in found.originals if o.param.dtype.is_floating_point]
            computed = [wire or options.precision.compute or dtype for dtype in floats]
            check_compressible(compression, computed, group.backend)
    if reduce.order is not None:
        check_order(reduce, found.modules)
        if state.replicas is not None and state.replicas.world_size > 1:
            refuse_replicas(reduce, group, state.replicas)
        if found.mesh is not None:
            refuse_other(reduce, "parameters that tensor parallelism has cut, whose norms other ranks add up")


def check_options(options: Options, group: Group) -> None:
    """Raises ConfigurationError for options that would have no effect, or can't have the one they ask for."""
    backend, reduce, offload = group.backend, options.reduce, options.offload
    if reduce.bucket_numel is not None:
        raise ConfigurationError(
            f"bucket_numel={reduce.bucket_numel} is for ShardedDDP; FSDP reduces the gradients of a unit together: "
            "wrap smaller units to send less at a time"
        )
    for name in ("gradients", "states"):
        if getattr(offload, name) and not offload.on_host and backend.device_type != "cpu":
            raise ConfigurationError(
                f"{name}=True without masters=True or parameters=True: the shards are on {backend.device_type}, and "
                f"{name} are where their parameters are; offload both"
            )
    if not backend.has_storage:
        _check_lazy(options, group)
    if offload.masters:
        notice_scaling()
        if options.precision.compression is not None or reduce.compression is not None:
            raise ConfigurationError(
                "masters=True with compression: what is compressed would be rounded twice; leave one of them out"
            )


def _check_lazy(options: Options, group: Group) -> None:
    """Raises ConfigurationError for what is not where a compiler decides on memory."""
    where, reshard, said = f"on {group.backend.name}", options.reshard, None
    if options.offload.masters or options.offload.activations:
        said = f"masters=True and activations=True: {where} a step is one program, which nothing can be copied beside"
    elif reshard.frozen != "reshard":
        said = f"frozen={reshard.frozen!r}: {where} the compiler decides how long gathered values are kept"
    elif options.dtensors:
        said = f"dtensors=True: {where} parts are even and 1-D, no DTensors; state_dict() is full without"
    elif not isinstance(reshard.after_forward, bool) and reshard.after_forward < group.world_size:
        said = f"after_forward={reshard.after_forward}: {where} only True and False are known to the compiler"
    if said is not None:
        raise ConfigurationError(f"{said}; leave it out")


def _check_codes(found: Found, compute: torch.dtype | None) -> None:
    """Raises ConfigurationError where codes that are stored as floating-point numbers would be cast."""
    for name, param in [(o.name, o.param) for o in found.originals]:
        dtype = param.dtype
        if compute not in (None, dtype) and dtype.is_floating_point and hasattr(param, "quant_state"):
            raise ConfigurationError(
                f"{name!r} is a {type(param).__name__}, whose codes are stored as {dtype} (bitsandbytes' "
                f"quant_storage), and would be cast to {compute} as if they were numbers. Store them in the dtype of "
                f"computation (bnb_4bit_quant_storage={compute}), or as torch.uint8, which nobody casts"
            )


def _check_changes(found: Found, compression: Compression | None) -> None:
    """Raises ConfigurationError where what has changed since the last gathering can't be told."""
    of_their_own = [o for o in found.originals if o.store is not None and not issubclass(o.store, Stored)]
    if compression is not None or of_their_own or not found.state.group.backend.has_storage:
        raise ConfigurationError(
            "sends_changes=True with compression of parameters, with classes that have an all-gather of their own, or "
            "on a backend where a compiler decides what is kept (XLA): leave one of them out"
        )


def _check_names(found: Found) -> None:
    """Raises ConfigurationError if the module has attributes by the names that its flat parameters are to have."""
    module, rank = found.state.module, found.state.group.rank
    for k in range(len(alike(found))):
        name = f"{FLAT_PREFIX}{k}"
        if hasattr(module, name):
            raise ConfigurationError(
                f"rank {rank}: {type(module).__name__} has an attribute {name!r}, the name that FSDP lists its shard "
                "under; rename it, or pass flatten=False (in the compat API: flatten_parameters=False)"
            )


def _refuse_shards(units: Sequence[Found], may_list: bool) -> None:
    """Raises ConfigurationError for a module that another unit has sharded, and that these reach by themselves."""
    modules = [found for unit in units for found in unit.modules if ORDER in found[1].__dict__]
    names = [dotted(path, name) for path, m in modules for name, _ in hidden(m)]
    if may_list:
        names += [o.name for unit in units for o in unit.originals if listing_of(o.param) is not None]
    if names:
        raise ConfigurationError(
            f"{names[0]!r} is a shard already: its module lies in a unit, and outside of that unit too. Make that "
            "module a unit of its own before the units that contain it"
        )


def _refuse_gradients_of_other_dtypes(units: Sequence[Found]) -> None:
    """Raises ConfigurationError for parameters that torch is told to give gradients of another dtype (from 2.10 on)."""
    for found in units:
        for original in found.originals if found.state.group.world_size > 1 else ():
            param = original.param
            wanted = getattr(param, "grad_dtype", None) if type(param) is nn.Parameter else None
            if wanted not in (None, param.dtype):
                raise ConfigurationError(
                    f"rank {found.state.group.rank}: {original.name!r} of {param.dtype} has grad_dtype={wanted}, and "
                    "gradients of shards have their dtype here. Keep the parameter in the wider dtype, with "
                    "PrecisionPolicy(compute=...) (mp_policy's param_dtype) for what it is computed in"
                )


def _mesh_of_dtensors(found: Found) -> DeviceMesh:
    options = found.state.options
    if options.mesh is None and options.replicas is not None:
        raise ConfigurationError(
            "dtensors=True with replicas needs mesh=, with two dimensions: init_device_mesh(device, (replicas, shards))"
        )
    ranks = options.group if options.mesh is None else options.mesh
    backend = found.state.group.backend
    mesh = mesh_over(ranks, backend.device_type)
    if not backend.has_storage:
        refuse_split(found.originals, backend.name, "Its compiler has ways of its own to cut parameters")
    if options.offload.on_host or options.offload.activations:
        refuse_split([o for o in found.originals if o.is_apart], "offloading", "Leave offload out")
    for original in found.originals:
        if original.within is not None:
            check_within(original.name, original.within, mesh, original.dim)
        if original.dim:
            _check_dimension(found, original)
        if original.is_apart and mesh.ndim > 1 and mesh.mesh_dim_names is None:
            raise ConfigurationError(
                f"fsdp_pre_all_gather of {original.name!r}, a {type(original.param).__name__}, is told which mesh cuts "
                f"it, and the dimensions of {mesh} have no names: pass mesh_dim_names= to init_device_mesh"
            )
    return mesh


def _check_dimension(found: Found, original: OriginalParameter) -> None:
    group, dim = found.state.group, original.dim
    is_plain = group.backend.has_storage and original.store is None
    if not is_plain or original.shape[dim] % group.world_size:
        raise RedirectedError(
            f"shard_placement_fn says Shard({dim}) for {original.name!r}: "
            + (
                f"FSDP does not support uneven sharding on dim {dim}: {original.shape} (world size: {group.world_size})"
                if is_plain
                else f"on {group.backend.name} a {type(original.param).__name__} is cut by its rows"
            )
            + ". Return None or Shard(0) for it; values are the same, but which rank has what differs"
        )


# ------------------------------------------------------------ cut
def _cut(found: Found, originals: list[OriginalParameter]) -> tuple[ShardLayout, torch.Tensor]:
    """Cuts some parameters, and takes this rank's shard of them to where it is to be (collective)."""
    options, group, replicas = found.state.options, found.state.group, found.state.replicas
    layout = found.state.layout_of(originals)
    if layout.grains is not None and not group.backend.has_storage:
        # all ranks run one program: parts are of one size
        layout = ShardLayout(layout.numels, group.world_size)
    param, own = originals[0].param, group.backend.device_type
    is_elsewhere = param.device.type != own and (found.is_awaited or options.mesh is not None)
    # where the parameters are or, as in torch, on the mesh's device
    device = options.device or (group.backend.device() if is_elsewhere else param.device)
    if originals[0].is_apart and found.cut_over is not None:
        _cut_extended(found, originals, device, found.cut_over)
        return layout, no_values(layout.shard_numel, originals[0].param)
    values = [
        _values_of(o) if not found.is_awaited else torch.empty_like(o.values, device=device)
        for o in originals
    ]
    are_masters = options.precision.masters and _has_masters(originals[0])
    dtype = torch.float32 if are_masters else values[0].dtype
    if True in map(_is_meta, values):
        return layout, torch.empty(layout.shard_numel, dtype=dtype, device="meta")
    shard = put_together(values, layout).to(device)
    if group.world_size > 1:
        if options.sync_module_states:
            group.channel("gradients").broadcast(shard, 0, label="parameters of rank 0")
        shard = own_shard(shard, layout, group).clone()
    if replicas is not None and options.sync_module_states:
        replicas.channel("parameters").broadcast(shard, 0, label="parameters of the first replica")
    shard = shard.to(dtype)
    offload = options.offload
    if not (offload.parameters or offload.masters):
        return layout, shard
    if options.device is None:
        found.state.options = replace(options, device=device)  # it computes where it is now
    return layout, group.backend.pin(shard) if offload.parameters else shard.cpu()


def _has_masters(original: OriginalParameter) -> bool:
    param = original.param
    return param.requires_grad and param.dtype in (torch.bfloat16, torch.float16)


def _cut_extended(
    found: Found, originals: list[OriginalParameter], device: torch.device, mesh: DeviceMesh
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    state, options = found.state, found.state.options
    policy = MixedPrecisionPolicy(options.precision.compute, options.reduce.dtype)
    senders = [g for g in (state.group, state.replicas) if g is not None and options.sync_module_states]
    over = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
    for original in originals:
        if isinstance(original, ExtendedParameter):
            original.cut(state.group, senders, device, over, policy)


# ------------------------------------------------------------ list
def _listed(
    found: Found, originals: list[OriginalParameter], layout: ShardLayout, shard: torch.Tensor
) -> FlatParam:
    """Returns the flat parameter of some parameters, whose shard modules list from now on, or parts of it."""
    state, lister = found.state, found.state.unit_module
    if lister is not None:
        lister.num_params_managed += len(originals)
    places: list[Place] = []
    if state.options.flatten and lister is not None:
        param: Tree = FlatParameter([shard], originals[0].param.requires_grad)
        param.data = shard  # that memory, which is pinned where it is offloaded
        path_of = {m: path for path, m in found.modules}
        infos = [(path_of[original.places[0].module], *original.places[0]) for original in originals]
        shared = [
            (path_of[further.module], path, *further, first, name)
            for (path, first, name), original in zip(infos, originals, strict=True)
            for further in original.places[1:]
        ]
        shapes = list(map(_shape_of, originals))
        param.__setstate__(([shape.numel() for shape in shapes], shapes, infos, shared))
        places = [Place(lister, f"{FLAT_PREFIX}{len(lister.flat_param_names)}")]
        lister.flat_param_names.append(places[0].name)
        lister.register_parameter(places[0].name, param)
        shard = param
        for original in originals:  # attributes of their modules from now on, and in no registry
            for place in original.places:
                module, name = place
                if name not in module.__dict__.get(ORDER, ()):
                    hide(place, original.param)
                else:
                    module._parameters.pop(name, None)
                    module.__dict__[name] = original.param
    elif not state.group.backend.has_storage:  # one parameter, [S] or of one rank whole, where it was
        (original,) = originals
        values = shard.view(original.shape) if state.group.world_size == 1 else shard
        shard, places = nn.Parameter(values, original.param.requires_grad), original.places
        for place in places:
            hide(place, original.param)
            register(place, shard)
    are_masters = state.options.precision.masters and _has_masters(originals[0])
    computed = originals[0].param.dtype if are_masters else None
    return FlatParam(originals, shard, places, found.cut_over, layout, state, computed)


def _borrow(found: Found) -> list[FlatParam]:
    """Lists parameters that other units manage in this one, too; returns the flat parameters that have them."""
    for param, place in found.borrowed:
        if (owner := owner_of(param)) is None:
            raise LifecycleError(f"the unit whose parameter {place.name!r} this one uses too is gone")
        flat, original = owner.flat, owner.flat.originals[owner.number]
        original.places.append(place)
        hide(place, original.param)
        for listing in flat.listings:
            if isinstance(listing, RegisteredShard) and listing.original is original:
                register(place, listing.param)  # state dicts have it under each name
                place.module.__dict__.pop(place.name if listing.spec else "", None)  # of a DTensor
        flat.is_borrowed = True
    return found.lenders()


def name_flats(states: Mapping[ShardingState, str]) -> None:
    """Gives flat parameters labels that no others have in this job: ranks compare them when they gather or reduce.

    Args:
        states: with the path of each in its root, as soon as that is known; two roots have the same.
    """
    numbers = numbers_of([(state.group, state.run_id) for state in states])
    for (state, path), number in zip(states.items(), numbers, strict=True):
        for k, flat in enumerate(state.flats):
            without = f", without {flat.left_out}" if flat.left_out else ""
            flat.label = f"parameters {k} of {path or type(state.module).__name__}, unit {number}{without}"


def report_padding(layouts: Sequence[tuple[Sequence[str], ShardLayout]]) -> None:
    """Logs what alignment of these parameters costs in memory and on the wire; warns if that is much."""
    shown = logger.getEffectiveLevel()
    for names, layout in layouts:
        padding = 0 if layout.starts is None else layout.padded_numel - sum(layout.numels)
        share = padding / max(1, layout.padded_numel)
        level = logging.WARNING if share > _MUCH and padding > _WORTH else logging.INFO
        if padding and level >= shown:
            what = f"{names[0]!r} and {len(names) - 1} more parameters"
            text = "the alignment of %s costs %d elements of padding, %.1f %% of the flat parameter"
            logger.log(level, text, what, padding, 100 * share)


def announce(root: nn.Module, units: int, parameters: int, group: Group, order: str) -> None:
    """Writes one line about what was wrapped, for the log."""
    held = sum(p.numel() * p.element_size() for p in root.parameters())
    what = f"{type(root).__name__} of {units} units, {parameters} parameters in shards of {held} bytes a rank"
    logger.info(announced(what, group, order))


# ------------------------------------------------------------ states that were copied, and other groups


def wake(state: ShardingState) -> None:
    """Makes states that were copied, of a unit and of those below it, work: groups, units, memory to gather into.

    Of other states it takes the memory that was put in place of that of what is listed.

    Raises:
        ConfigurationError: it is a shard of another number of ranks.
    """
    states = state.states()
    for s in reversed(states):
        if s.is_asleep:
            _wake(s)
    for s in states:
        if any(flat.is_behind for flat in s.flats):
            end_move(s)


def _wake(state: ShardingState) -> None:
    for owner in owners_of(state.__dict__["borrowed"]):
        if owner.is_asleep:
            _wake(owner)
    if any(flat.is_asleep for flat in state.__dict__["borrowed"]):
        return  # the unit that has them is not copied yet; what is around both wakes this one
    borrowed, divisors = state.__dict__.pop("borrowed"), state.__dict__.pop("divided")
    state.is_asleep = False
    connect(state, state.flats[0].listings[0].param if state.flats else None, borrowed)
    # else of a unit of several modules, whose first is awake
    for flat in [f for f in state.flats if f.is_asleep]:
        if flat.layout.world_size != state.group.world_size:
            raise ConfigurationError(
                f"this FSDP module was pickled as a shard of {flat.layout.world_size} and is loaded by "
                f"{state.group.world_size} ranks: groups of ranks are not pickled. Save state_dict() instead"
            )
        flat.connect(state.group, state.post_forward_mesh)
    name_flats({state: ""})
    _run(state, [m for s in state.mates or [state] for _, m in s.own_modules()], borrowed)
    state.unit.divisors = divisors
    state.unit.send_through(state.__dict__.pop("comms", OWN))


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
    (state.run_id,) = new_run_ids(now, told[0])
    state.options, state.group = replace(state.options, group=process_group), now
    state.unit.release()
    for flat in state.flats:
        flat.group = now
        flat.adopt()
    name_flats({state: ""})
    state.unit.attach()


def post_forward_mesh(group: Group, count: int) -> Group:
    """Returns the group of ``count`` consecutive ranks that this rank belongs to (collective; made once for a group).

    Raises:
        ConfigurationError: the ranks can't be divided so.
    """
    if group.world_size % count:
        raise ConfigurationError(
            f"{group.world_size} ranks can't be divided into groups of {count}. If passing reshard_after_forward as an "
            f"int, it should be a factor of {group.world_size}, not {count}"
        )
    return group.part_of(range(first, first + count) for first in range(0, group.world_size, count))


def hybrid_groups(
    shard_size: int, group: ProcessGroup = None, backend: str | Backend | None = None
) -> tuple[Group, Group]:
    """Returns two groups for hybrid sharding: ranks that share a copy of the model, ranks with the same shard.

    ::

        group, replicas = hybrid_groups(8)          # 8 GPUs of a machine share a copy
        model = FSDP(model, group=group, replicas=replicas)

    Parameters are gathered within ``group`` only; gradients are averaged over both. Every rank calls. Called again, it
    returns the same groups.

    Args:
        shard_size: how many consecutive ranks share one copy.
        group: all ranks that take part; None for all of the job.
        backend: name or instance of the backend; by default that of the device which the job's process group serves.

    Returns:
        The group to shard over and the group of replicas.

    Raises:
        ConfigurationError: the ranks can't be divided so.

    Source: hybrid sharding of PyTorch FSDP (arXiv 2304.11277, section 3.2).
    """
    everyone = backend_of_job(backend).group(group)
    shards = post_forward_mesh(everyone, shard_size)
    across = [range(offset, everyone.world_size, shard_size) for offset in range(shard_size)]
    return shards, everyone.part_of(across)


def begin_move(state: ShardingState) -> None:
    """Gives back what is gathered before tensors are moved or cast, or values are loaded into listed shards.

    Raises:
        ConfigurationError: torch would swap tensors for others.
    """
    if torch.__future__.get_swap_module_params_on_conversion() and not state.options.dtensors:
        raise ConfigurationError(
            "an FSDP module that does not list DTensors can't be moved, cast or loaded by swapping its parameters: "
            "they are views of one flat parameter. Pass dtensors=True to fully_shard, or call "
            "torch.__future__.set_swap_module_params_on_conversion(False) first"
        )
    if state.summoned is None:  # full values move alone, and come back with the shards
        state.unit.release()
        for flat in state.flats:
            flat.drop()


def end_move(state: ShardingState) -> None:
    """Takes over shards that were moved, cast, or replaced by other objects."""
    alike = all(flat.shards.are_alike() for flat in state.flats if flat.shards is not None)
    if state.summoned is not None or not alike:
        return  # others of its modules follow
    for flat in state.flats:
        flat.take_over()
    # where its shards are now, or else those of units inside, which have moved before
    below = [] if state.flats else [unit.group.backend.device_type for unit in units_in(state.door, state)]
    device, moved_to = state.options.device, [*(f.param.device.type for f in state.flats), *below, "meta"][0]
    if device is not None and state.options.offload.on_host and moved_to not in ("cpu", "meta", device.type):
        raise ConfigurationError(
            f"an offloaded module that computes on {device} was moved to {moved_to!r}. Move it before it is sharded or "
            f"pass device={moved_to!r} there; to({device.type!r}) takes it back"
        )
    if device is None and moved_to not in (state.group.backend.device_type, "meta"):
        connect(state, state.flats[0].param if state.flats else None, [])
        state.unit.replicas = state.replicas
        for flat in state.flats:
            flat.group = state.group
    for flat in state.flats:
        flat.adopt()
    state.unit.attach()


# ------------------------------------------------------------ copies
def check_copied(state: ShardingState, memo: Memo) -> None:
    """Notes that a unit and those below it are about to be copied.

    Raises:
        LifecycleError: inside of ``summon_full_params``.
    """
    wake(state)
    if state.unit.needs and memo.get(COPIED, set()).issuperset(map(id, state.unit.needs)):
        return  # something around it is being copied
    states = state.states()
    if any(s.summoned is not None for s in states):
        raise copy_when_summoned(state.group.rank)
    # parameters may be copied without values: these are copied too, and fill the copies
    memo.setdefault(COPIED, set()).update(id(f) for s in states for f in s.unit.needs)


def check_pickled(state: ShardingState) -> None:
    """Raises for what a file can't hold: LifecycleError when summoned, ConfigurationError for groups of ranks."""
    if state.summoned is not None:
        raise copy_when_summoned(state.group.rank)
    if state.replicas is not None or state.unit.comms.are_custom:
        comms = "messages that others send (set_custom_all_gather, set_all_reduce_hook, ...)"
        raise ConfigurationError(
            f"an FSDP module with {comms if state.replicas is None else 'replicas'} can't be pickled: groups of "
            "ranks can't, and without them gradients would not be averaged. Save state_dict(), or use "
            "copy.deepcopy(), which keeps the groups"
        )
