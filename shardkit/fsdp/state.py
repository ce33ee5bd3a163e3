"""Holds what FSDP knows of one module whose parameters it has sharded, whichever door it came in by.

[Note: doors] A module becomes a unit by being wrapped (``FSDP``, and the classes of the compat layer), or in place
(``fully_shard``). Both make one :class:`ShardingState`. The module at which forward enters and leaves the unit, and at
which a walk over modules stops, is the state's ``door``: the wrapper, or the module itself. Everything else in this
package works on states and asks :func:`state_of`, never a class.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..backend import Backend, Group
from ..errors import ConfigurationError, ShardkitError, check_kinds
from ..layout import AlignedLayout, ShardLayout, in_runs
from ..optimizers.shards import given_way
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..types import Memo, ProcessGroup, StateDict
from .engine import Engine
from .flat_param import SUMMONED, FlatParam, Registered, exposed
from .originals import OriginalParameter, Place
from .unit import Unit, predivide_factor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..flattening.wrapper import FlattenParamsWrapper
    from ..torch_seams.tensors import WholeMesh


WRAPPED = "_fsdp_wrapped_module"
INNER = "_fsdp_wrapped_module._fpw_module."
OUTER = "_fsdp_wrapped_module."
_OTHERS = ("_checkpoint_wrapped_module", "_orig_mod")  # of torch's wrappers, which state dicts leave out


def dotted(path: str, name: str) -> str:
    """Returns the name of what a module at this path has under a name of its own."""
    return f"{path}.{name}" if path else name


def clean(name: str) -> str:
    """Returns a name without what wrapping added to it."""
    return ".".join(part for part in name.split(".") if part not in ("_fsdp_wrapped_module", "_fpw_module"))


def plain_name(name: str) -> str:
    """Returns a name without what wrapping, here and in torch, added to it."""
    return ".".join(part for part in clean(name).split(".") if part not in _OTHERS)


Purpose = Literal["block", "state dict", "unshard"]
_position_of, _shape_of = attrgetter("position"), attrgetter("shape")
# By id of the door. The state is held by its door alone, so this map keeps neither alive.
_states: dict[int, weakref.ref[ShardingState]] = {}


@dataclass(frozen=True)
class Options:
    """Says how a module is sharded; see :class:`~shardkit.FSDP` for the first ones.

    Attributes:
        dtensors: modules list DTensors, over this mesh if there is one.
        layout: cuts parameters of given shapes among so many ranks.
        whole_mesh: of which that mesh is the part for data.
        placement: says along which dimension a parameter is cut, as torch's ``shard_placement_fn``.
        keeps_dtype: says whether a parameter is computed with in its own dtype.
        state_dict_device: where full state dicts are made; None: where the parameters are.
        state_dict_on_rank_0_only: they are empty on other ranks.
        clears_autocast_cache: after each forward.
        keeps_optimizer_state: a part of the model that is this rank's alone, such as an expert: its optimizer state is
            not gathered.
        mark_step: recorded operations run at the end of each backward of the root.
        casts_inputs: floating-point inputs are cast as ``precision`` says.
        casts_root_inputs: those of the root are, also without ``casts_inputs``.
    """

    group: ProcessGroup = None
    replicas: ProcessGroup = None
    precision: PrecisionPolicy = PrecisionPolicy()
    reshard: ReshardPolicy = ReshardPolicy()
    offload: OffloadPolicy = OffloadPolicy()
    reduce: ReducePolicy = ReducePolicy()
    flatten: bool = True
    sync_module_states: bool = True
    device: torch.device | None = None
    backend: str | Backend | None = None
    dtensors: bool = False
    mesh: DeviceMesh | None = None
    whole_mesh: WholeMesh | None = None
    layout: Callable[[Sequence[torch.Size], int], ShardLayout] = AlignedLayout(None)
    placement: Callable[[nn.Parameter], object] | None = None
    keeps_dtype: Callable[[nn.Parameter], bool] | None = None
    state_dict_device: torch.device | None = None
    state_dict_on_rank_0_only: bool = False
    clears_autocast_cache: bool = False
    keeps_optimizer_state: bool = False
    mark_step: bool = False
    casts_inputs: bool = True
    casts_root_inputs: bool = True

    def __post_init__(self) -> None:
        kinds = {"precision": PrecisionPolicy, "reshard": ReshardPolicy, "offload": OffloadPolicy}
        check_kinds(vars(self), reduce=ReducePolicy, backend=str | Backend, **kinds)

    @classmethod
    def given(cls, device: torch.device | str | None, **options: Any) -> Options:
        """Makes options of those that a caller has named; None leaves the default."""
        named = {name: value for name, value in options.items() if value is not None}
        return cls(device=None if device is None else torch.device(device), **named)


@dataclass
class Ignored:
    """Names what stays as it is inside of a unit: on every rank, listed in its module, and not averaged.

    Attributes:
        modules: with all below them.
        parameters: those of the modules, and further ones.
    """

    modules: set[nn.Module] = field(default_factory=set)
    parameters: set[nn.Parameter] = field(default_factory=set)


class ShardingState:
    """One module's share in FSDP.

    Attributes:
        door: the module that is called; see [Note: doors].
        module: whose parameters are sharded.
        unit_module: of a wrapper, what lists flat parameters.
        input_dtype: what floating point inputs are cast to, where they are; None leaves them.
        ignored: what of it is not.
        flats: its flat parameters; of several modules that are one unit, the unit's.
        mates: the states of all of these, in order; none where it is alone.
        home: its place among these; see :class:`~.originals.OriginalParameter`.
        companions: those of modules inside whose parameters have a mesh of their own, and are the module's to torch.
        shared_paths: where weights of the module are used a second time, as (first path, other path).
        nesting: how many units lie one inside another here.
        group: ranks among which it is sharded.
        replicas: ranks that hold the same shard.
        post_forward_mesh: ranks that keep gathered parameters between them after forward.
        unit: what the engine runs.
        engine: the root's; None before the first forward.
        is_root: no other unit is around it; None before the first forward.
        summoned: open while parameters are summoned.
        summoned_for: a block of ``summon_full_params``, a state dict that is loaded or made, or ``unshard()``, which
            the next forward ends.
        state_is_local: state dicts hold shards.
        is_asleep: it was copied, and has no groups yet.
        is_computing: inside of a forward of a module sharded in place, or of another method of it.
        buffer_dtypes: own dtypes of buffers that were cast, by module and name.
        uncollected: optimizer state that is this rank's alone.
        exported_in: dtypes that all weights were seen to have values of; None: their own.
        run_id: the same on all ranks, and of no other unit.
        copies: made since the last backward; for each, how many backwards had gone through it.
    """

    def __init__(
        self, door: nn.Module, module: nn.Module, options: Options, ignored: Ignored | None = None
    ) -> None:
        self.door, self.module, self.options = door, module, options
        self.unit_module: FlattenParamsWrapper | None = None
        self.input_dtype = options.precision.inputs or options.precision.compute
        self.ignored = ignored or Ignored()
        self.flats: list[FlatParam] = []
        self.mates: list[ShardingState] = []
        self.companions: list[ShardingState] = []
        self.home = 0
        self.shared_paths: list[tuple[str, str]] = []
        self.nesting = 1
        self.group: Group
        self.replicas: Group | None = None
        self.post_forward_mesh: Group | None = None
        self.unit: Unit
        self.engine: Engine | None = None
        self.is_root: bool | None = None
        self.summoned: contextlib.ExitStack | None = None
        self.summoned_for: Purpose = "block"
        self.state_is_local = self.buffers_cast = False
        self.is_computing = self.is_asleep = False
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self.uncollected: dict[int, StateDict] = {}
        self.exported_in: set[torch.dtype | None] = {None}
        self.run_id = ""
        self.copies: tuple[int, ...] = ()
        note_state(self)

    def __getstate__(self) -> StateDict:
        """Returns what a copy or a file takes; ``construct.wake`` makes it work again."""
        copied = self.__dict__.copy()
        for name in ("group", "post_forward_mesh", "replicas", "unit", "engine", "is_root", "summoned"):
            copied[name] = None
        copied["is_computing"] = False
        gone: Any = dict.fromkeys(("group", "replicas", "mesh", "whole_mesh", "placement", "keeps_dtype"))
        copied["options"] = replace(self.options, **gone)
        copied["borrowed"], copied["divided"] = self.unit.borrowed, self.unit.divisors
        return copied

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self.is_asleep = True
        note_state(self)

    def __deepcopy__(self, memo: Memo) -> ShardingState:
        """Copies with its groups, and a run id that says when it was made: one rank may copy alone before."""
        made = memo[id(self)] = ShardingState.__new__(ShardingState)
        copied = copy.deepcopy(self.__getstate__(), memo)
        backwards = (self.unit if self.engine is None else self.engine.units[0]).backwards
        self.copies = *(n for n in self.copies if n == backwards), backwards
        run_id = f"{self.run_id}-copy{backwards}.{len(self.copies)}"
        made.__setstate__(
            {**copied, "options": self.options, "run_id": run_id, "copies": (), "comms": self.unit.comms}
        )
        return made

    @property
    def divisors(self) -> tuple[float, float]:
        """Gradients are divided by the one before and by the other after their sum over ranks."""
        world = self.group.world_size
        if (before := self.options.reduce.predivide) is None:
            before = float(predivide_factor(world))
        return before, world / before

    @property
    def compute_device(self) -> torch.device:
        """Tells where parameters are gathered."""
        if self.options.device is not None:
            return self.options.device
        return self.flats[0].param.device if self.flats else self.group.backend.device()

    def own_modules(self, prefix: str = "") -> list[tuple[str, nn.Module]]:
        """Lists ``named_modules`` of the module, without those below other units, and those that it ignores."""
        return modules_outside_units(self.module, prefix, self.door, self.ignored.modules)

    def states(self) -> list[ShardingState]:
        """Returns this one and those of units below, the outermost first."""
        return [self, *units_in(self.door, self)]

    def all_flats(self) -> list[FlatParam]:
        return [*dict.fromkeys(flat for state in self.states() for flat in state.flats)]

    def all_listings(self) -> list[Registered]:
        """Returns listings of all registered parameters, unit by unit in the order of parameters."""
        return [listing for state in self.states() for listing in state.listings]

    @property
    def listings(self) -> list[Registered]:
        """Returns listings of the registered parameters of its module."""
        found = [listing for flat in self.flats for listing in flat.listings]
        if self.mates:
            found = [listing for listing in found if listing.originals[0].home == self.home]
        return found if len(self.flats) == 1 else sorted(found, key=_position_of)

    def layout_of(self, originals: Sequence[OriginalParameter]) -> ShardLayout:
        """Lays these out as one flat parameter."""
        options, ranks = self.options, self.group.world_size
        if options.placement is None or ranks == 1:
            return options.layout(list(map(_shape_of, originals)), ranks)
        if not options.dtensors:
            raise ConfigurationError(
                "shard_placement_fn says how DTensors are cut, and with dtensors=False, or where anything is said in "
                "shardkit's words (precision=, align=, ...), others are listed: pass dtensors=True, or leave it out"
            )
        layout = options.layout([original.rows for original in originals], ranks)
        return in_runs(layout, [original.shape[: original.dim].numel() for original in originals])

    def tie(self, place: Place, listing: Registered, kept: Registered) -> None:
        """Lets another parameter, of this unit or another, take a place in the unit; before the first forward.

        Where what was there has no other, it is as if both had been tied before sharding.
        """
        (own,), (other,) = listing.originals, kept.originals
        mates = self.mates or [self]
        paths = {m: (mate, path) for mate in reversed(mates) for path, m in mate.own_modules()}
        own.places.remove(place)
        other.places.append(place)
        if not own.places:
            gone, owner = listing.flat, owners_of([listing.flat])[0]
            if len(gone.originals) > 1:
                gone.leave_out(listing.first, owner.layout_of([o for o in gone.originals if o.places]))
            else:
                owner.flats.remove(gone)
            owner.unit.take(owner.flats, owner.unit.borrowed)
            given_way[listing.param] = None
            listing.param = kept.param
        used = dict.fromkeys([*self.unit.borrowed, *(() if kept.flat in self.flats else (kept.flat,))])
        borrowed = [f for f in used if any(p.module in paths for o in f.originals for p in o.places)]
        kept.flat.is_borrowed |= kept.flat in borrowed
        self.unit.take(self.flats, borrowed)
        for mate in mates:
            mate.shared_paths = []
        for flat in self.flats:
            for k, each in enumerate(flat.originals):
                here = [(paths[p.module], p.name) for p in each.places if p.module in paths]
                each.is_away = not here
                for (mate, path), name in here[:1]:
                    each.home, each.name = mate.home, dotted(path, name)
                    flat.names[k] = each.name
                    mate.shared_paths += [(each.name, dotted(p, n)) for (m, p), n in here[1:] if m is mate]

    def forget_root(self) -> None:
        """Lets the next forward find the units anew; a root alone can, since units below are run by its engine."""
        if self.is_root:
            for state in self.states():
                state.engine = state.is_root = None

    def cast_buffers(self) -> None:
        """Buffers outside of other units take the dtype that was asked for, once."""
        dtype = self.options.precision.buffers
        if dtype is None or self.buffers_cast:
            return
        self.buffers_cast = True
        for _, m in self.own_modules():
            for name, buffer in m._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    self.buffer_dtypes[m, name] = buffer.dtype
                    m._buffers[name] = buffer.to(dtype)


def note_state(state: ShardingState) -> None:
    """Lets :func:`state_of` find this state by its door."""
    key = id(state.door)

    def forget(gone: weakref.ref[ShardingState]) -> None:
        if _states.get(key) is gone:
            del _states[key]

    _states[key] = weakref.ref(state, forget)


def forget_state(state: ShardingState) -> None:
    """Makes its door a module like any other."""
    if state_of(state.door) is state:
        del _states[id(state.door)]


def state_of(module: nn.Module) -> ShardingState | None:
    """Returns the state whose door a module is; None for all other modules."""
    found = _states.get(id(module))
    state = None if found is None else found()
    return state if state is not None and state.door is module else None


def named_units(module: nn.Module) -> list[tuple[str, ShardingState]]:
    """Lists the units at and below a module with the paths of their doors, the outermost first."""
    found: list[tuple[str, ShardingState]] = []
    modules_outside_units(module, below=found, is_further=True)
    return found


def _known_states() -> list[ShardingState]:
    return [state for state in (held() for held in list(_states.values())) if state is not None]


def owners_of(flats: Sequence[FlatParam]) -> list[ShardingState]:
    """Returns the states whose flat parameters these are."""
    return [state for state in _known_states() if any(flat in state.flats for flat in flats)]


def modules_outside_units(
    module: nn.Module,
    prefix: str = "",
    door: nn.Module | None = None,
    without: Collection[nn.Module] = (),
    below: list[tuple[str, ShardingState]] | None = None,
    is_further: bool = False,
) -> list[tuple[str, nn.Module]]:
    """Lists ``named_modules`` of a module, without those at and below doors other than this one, and some others.

    Args:
        below: gets the paths and states of these doors.
        is_further: it goes on below these.
    """
    found: list[tuple[str, nn.Module]] = []
    seen, waiting = {*without}, [(prefix, module)]
    while waiting:
        path, m = waiting.pop()
        if m in seen:
            continue
        seen.add(m)
        if m is not door and id(m) in _states and (other := state_of(m)) is not None:
            if below is not None:
                below.append((path, other))
            if not is_further:
                continue
        found.append((path, m))
        for name, child in reversed(m._modules.items()):
            if child is not None:
                waiting.append((f"{path}.{name}" if path else name, child))
    return found


def units_in(module: nn.Module, own: ShardingState | None = None) -> list[ShardingState]:
    """Lists the units of a module, and of what is inside of it, the outermost first; without its ``own``."""
    return [state for _, state in named_units(module) if state is not own]


@contextlib.contextmanager
def summoned(state: ShardingState, recurse: bool, writeback: bool) -> Iterator[None]:
    """Makes the parameters of a unit, and of those below it, full inside (collective).

    Raises:
        LifecycleError: inside of forward or backward, of this or another thread.
    """
    with contextlib.ExitStack() as stack:
        for s in state.states() if recurse else [state]:
            exit_summon(s, "unshard")
            if s.summoned is None:
                enter_summon(s, writeback)
                stack.callback(exit_summon, s)
        yield


def enter_summon(state: ShardingState, writeback: bool | None, purpose: Purpose = "block") -> None:
    """Begins it for one unit, all modules of it; :func:`exit_summon` ends it."""
    if state.engine is not None:
        state.engine.check_idle("summon_full_params")
    state.unit.release()
    stack = contextlib.ExitStack()
    for flat in state.unit.needs:
        if flat.store.state is not SUMMONED:  # by another unit that uses it
            stack.enter_context(flat.summoned(writeback))
            stack.enter_context(exposed(flat, writeback))
            if purpose == "unshard":
                stack.enter_context(flat.summoned_for_compute())
    for each in state.mates or [state]:
        each.summoned, each.summoned_for = stack, purpose


def exit_summon(state: ShardingState, purpose: Purpose = "block") -> None:
    """Ends what was begun for this, if it was; changes go to the shards where they are to be kept."""
    if state.summoned is not None and state.summoned_for == purpose:
        stack = state.summoned
        for each in state.mates or [state]:
            each.summoned = None
        state.unit.release()  # asked for meanwhile
        stack.close()


@atexit.register
def _end_summons() -> None:
    """Ends what a program leaves begun: later, at the interpreter's end, this would abort the process."""
    for state in _known_states():
        with contextlib.suppress(ShardkitError):  # what was written can't be kept, and nobody asks for it
            exit_summon(state, state.summoned_for)


def end_unshard(flat: FlatParam) -> None:
    """Ends ``unshard()`` of whatever unit has made this flat parameter full."""
    for state in _known_states():
        if state.summoned is not None and flat in state.unit.needs:
            exit_summon(state, "unshard")
