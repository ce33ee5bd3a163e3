"""SkipOutOfMemory: a batch that is too large for one rank is skipped by all.

[Note: prefix] Ranks issue the same calls in a step, and a rank that has left it owes the others what it has not issued.
Which calls those are, it knows from steps before: as long as what it has issued is how those began, it goes on as they
did. Where other ranks go on otherwise (a model that branches), they are out of step, and all ranks hear of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import nn

from ..backend import Group, ReduceOp
from ..errors import ConfigurationError, LifecycleError, ShardkitError
from ..fsdp.optimizer_check import may_be_skipped
from ..fsdp.state import state_of
from ..oss.sharded_ddp import ShardedDDP
from ..torch_seams.tensors import is_dtensor
from ..torch_seams.wrappers import name_of_torchs
from ..types import Args, Kwargs, Tree
from .adascale import measuring

# What libraries say that have no class of their own for it.
_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "status_alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Says whether a device, or the host, had no memory left for this rank."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, ShardkitError):  # it may quote what another rank has said
        return False
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _SAYINGS)


def forget_frames(error: BaseException) -> None:
    """Frees what the functions held that the error came through; those that still run keep theirs."""
    seen: set[int] = set()
    reason: BaseException | None = error
    while reason is not None and id(reason) not in seen:
        seen.add(id(reason))
        traceback.clear_frames(reason.__traceback__)
        reason = reason.__cause__ or reason.__context__


class Shaped(NamedTuple):
    """Describes a tensor of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


Argument: TypeAlias = "Shaped | tuple[int, ...] | ReduceOp | int | str | None"


class IssuedCall(NamedTuple):
    """A collective, as far as other ranks depend on it.

    Attributes:
        group: in which it was called.
        name: of the group's method.
        arguments: its own, with shapes in place of tensors; None: as if it were not given.
    """

    group: Group
    name: str
    arguments: tuple[Argument, ...]

    def issue_empty(self) -> None:
        """Issues the call once more, with zeros; returns when it is through."""
        given = [a.zeros() if isinstance(a, Shaped) else a for a in self.arguments]
        count = len(_POSITIONAL[self.name])
        named = {k: v for k, v in zip(_NAMED[self.name], given[count:], strict=True) if v is not None}
        with torch.no_grad():
            getattr(self.group, self.name)(*given[:count], **named)


# Of each method: the arguments that come by position, and those that come by name.
_POSITIONAL = {
    "all_gather_into": ("output", "shard", "sizes"),
    "reduce_scatter_into": ("shard", "input", "sizes"),
    "exchange": ("output", "input"),
    "all_to_all": ("output", "input", "output_sizes", "input_sizes"),
    "all_reduce": ("tensor",),
    "reduce": ("tensor", "dst"),
    "broadcast": ("tensor", "src"),
    "barrier": (),
    "agree": ("what",),
}
_NAMED = {
    name: () if name == "agree" else ("op", "label") if "reduce" in name else ("label",)
    for name in _POSITIONAL
}
# What other ranks would get of these is not known.
_OF_OBJECTS = ("all_gather_bytes", "all_gather_object", "gather_object", "broadcast_object", "new_group")


def _described(group: Group, name: str, args: Args, kwargs: Kwargs) -> IssuedCall:
    given = dict(zip(_POSITIONAL[name], args, strict=False)) | kwargs
    return IssuedCall(group, name, tuple(_plain(given.get(k)) for k in (*_POSITIONAL[name], *_NAMED[name])))


def _plain(argument: Tree) -> Argument:
    if isinstance(argument, torch.Tensor):
        return Shaped(tuple(argument.shape), argument.dtype, argument.device)
    if argument is None or isinstance(argument, int | str | ReduceOp):
        return argument
    return tuple(int(n) for n in argument)  # sizes


class IssuedCalls:
    """The collectives of a step in the order of their calls, over all groups.

    Attributes:
        calls: those that can be issued again with nothing in them.
        other: the name of one that can't; "" if there was none.
        failed: a call raised, so that nobody knows whether it was issued.
        given_up: groups whose other ranks would have heard that this rank has left the step, and why.
    """

    def __init__(self) -> None:
        self.calls: list[IssuedCall] = []
        self.other = ""
        self.failed = False
        self.given_up: list[tuple[Group, str]] = []
        self._is_inside = False

    @contextlib.contextmanager
    def listening(self, groups: Iterable[Group]) -> Iterator[None]:
        """Notes, inside, calls in these groups and their channels; nobody hears that this rank gives up."""
        heard = list(dict.fromkeys(g for group in groups for g in (group, *group.channels())))
        try:
            for group in heard:
                own = {n: self._noting(group, n) for n in (*_POSITIONAL, *_OF_OBJECTS) if hasattr(group, n)}
                group.__dict__.update(own, abort=functools.partial(self._keep, group))
            yield
        finally:
            for group in heard:
                for name in (*_POSITIONAL, *_OF_OBJECTS, "abort"):
                    group.__dict__.pop(name, None)

    def _keep(self, group: Group, why: str = "the rank gave up") -> None:
        self.given_up.append((group, why))

    def _noting(self, group: Group, name: str) -> Callable[..., Tree]:
        method = getattr(group, name)

        @functools.wraps(method)
        def noted(*args: Tree, **kwargs: Tree) -> Tree:
            if self._is_inside:  # a part of another call
                return method(*args, **kwargs)
            if name in _POSITIONAL:
                self.calls.append(_described(group, name, args, kwargs))
            else:
                self.other = name
            self._is_inside = True
            try:
                return method(*args, **kwargs)
            except BaseException:
                self.failed = True
                raise
            finally:
                self._is_inside = False

        return noted

    def give_up(self) -> None:
        """Tells other ranks what they have not heard."""
        for group, why in self.given_up:
            group.abort(why)

    def rest_of(self, whole: IssuedCalls) -> list[IssuedCall] | None:
        """Returns what is still to come of a step like another one; None if this is none."""
        count = len(self.calls)
        return whole.calls[count:] if self.calls == whole.calls[:count] else None


logger = logging.getLogger("shardkit")

IN_A_ROW = 10  # batches that may be skipped: then something else is wrong than one of them
_NOBODY = -1
_TALKATIVE = (
    "shardkit.model_parallel.moe.",
    "shardkit.model_parallel.",
    "shardkit.pipeline.",
    "shardkit.experimental.nn.SyncBatchNorm",
)


class SkipOutOfMemory:
    """Makes all ranks skip a batch in whose forwards and backwards, which are inside, one runs out of memory.

    ::

        skip = shardkit.SkipOutOfMemory(model)
        for inputs, targets in loader:
            with skip:
                loss = loss_fn(model(inputs), targets)
                loss.backward()
            if skip.skipped:
                continue                    # no rank has gradients of this batch
            optimizer.step()
            optimizer.zero_grad()

    The rank that ran out frees what its step held (not what names of the loop still hold, as ``loss`` above), and
    issues what other ranks still wait for, with zeros in it; they end their step with numbers of no use. Then all ranks
    tell each other, drop all gradients, and put the buffers of the model back. What was accumulated before the ``with``
    is dropped, too: put all backwards of one optimizer step inside. Random states are not put back.

    It knows what other ranks wait for from earlier steps: two in a row have to have issued the same collectives. Where
    that is not so (the first three batches, a model that branches), the error is raised as without this. Steps that
    take turns (a discriminator's and a generator's) need one of these each, over the same models.

    Collectives of the model are noted; others (``dist.all_reduce`` of a loss) belong behind the ``with``, for a rank
    that runs out of memory never comes to them. A step costs one collective of 16 bytes and a copy of the buffers.

    Args:
        models: that are trained in the step: an FSDP or ShardedDDP module, or a module with some inside. Several have
            to be sharded over the same ranks.

    Attributes:
        skipped: the last step was.
        rank: one of those (global ranks) that had no memory for it; None where nobody ran out.

    Raises:
        ConfigurationError: nothing in there is sharded, or something keeps count of gradients of skipped batches
            (compression with error feedback, AdaScale), talks to other ranks on its own (SyncBatchNorm, mixtures of
            experts, model or pipeline parallelism, torch's DDP), or its device runs out of memory later than the calls
            that need it.
        LifecycleError: on all ranks: ten batches in a row were skipped; or parameters were changed inside, by an
            optimizer's step for example, which could not be taken back.

    Source: the trainers of fairseq and metaseq skip batches so, on one rank alone.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._modules = list(dict.fromkeys(m for model in models for m in model.modules()))
        self._units = [s for s in map(state_of, self._modules) if s is not None]
        self._wrappers = [m for m in self._modules if isinstance(m, ShardedDDP)]
        self._groups = self._find_groups()
        self._refuse()
        self.skipped = False
        self.rank: int | None = None
        self._in_a_row = 0
        self._known: IssuedCalls | None = None  # what two steps in a row have issued
        self._last: IssuedCalls | None = None
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._inside = ExitStack()
        self._is_inside = False

    # ------------------------------------------------------------ what it is for
    def _find_groups(self) -> list[Group]:
        """Finds those over which the models are sharded, and those of replicas behind them."""
        of_each = [[g for g in (u.group, u.replicas) if g is not None] for u in self._units]
        of_each += [[w._connected().group] for w in self._wrappers]
        if not of_each:
            raise ConfigurationError(
                "SkipOutOfMemory: no FSDP or ShardedDDP module in there; pass the wrapped model"
            )
        if any(groups != of_each[0] for groups in of_each):
            raise ConfigurationError(
                "SkipOutOfMemory: parts of the models are sharded over other ranks than others; a step can be left "
                "only where all of it is shared by the same ranks"
            )
        return of_each[0]

    def _refuse(self) -> None:
        if not self._groups[0].backend.has_storage:
            raise ConfigurationError(
                f"SkipOutOfMemory: on backend {self._groups[0].backend.name!r} memory runs out when a program is "
                "compiled or run, not in the line that needs it, and on all ranks alike; take smaller batches"
            )
        reduced = [u.options.reduce for u in self._units] + [w._connected().policy for w in self._wrappers]
        if any(r.compression is not None and r.error_feedback for r in reduced):
            raise ConfigurationError(
                "SkipOutOfMemory: compression keeps what it left out of a skipped batch for the next one; pass "
                "ReducePolicy(error_feedback=False)"
            )
        for m in self._modules:
            if isinstance(m, nn.SyncBatchNorm) or f"{type(m).__module__}.{type(m).__name__}".startswith(
                _TALKATIVE
            ):
                self._refuse_talking(type(m).__name__)
            if state_of(m) is None and (found := name_of_torchs(m)):
                self._refuse_talking(found)
        if any(u.options.reshard.sends_changes for u in self._units):
            raise ConfigurationError(
                "SkipOutOfMemory: how much ReshardPolicy(sends_changes=True) gathers depends on what has changed; "
                "leave it out"
            )
        if any(w._connected().depends_on_data for w in self._wrappers):
            raise ConfigurationError(
                "SkipOutOfMemory: how many rows of sparse gradients ranks send depends on their batches; use "
                "Embedding(sparse=False)"
            )
        listed = {id(listing.param) for u in self._units for listing in u.listings}
        for p in (p for m in self._modules for p in m._parameters.values() if id(p) not in listed):
            if is_dtensor(p):
                self._refuse_talking("a module whose parameters are DTensors")
        self._refuse_statistics()

    def _refuse_talking(self, what: str) -> NoReturn:
        raise ConfigurationError(
            f"SkipOutOfMemory: {what} talks to other ranks on its own, where a rank that runs out of memory would "
            "leave them waiting"
        )

    def _refuse_statistics(self) -> None:
        measured = {p for scale in measuring for params in scale._averaging.measured() for p in params}
        originals = (o.param for u in self._units for f in u.flats for o in f.originals)
        if any(p in measured for p in (*originals, *(p for w in self._wrappers for p in w.parameters()))):
            raise ConfigurationError(
                "SkipOutOfMemory: AdaScale measures the gradients of all batches, of skipped ones too, and ranks would "
                "measure different ones; use one of the two"
            )

    # ------------------------------------------------------------ around a step
    def __enter__(self) -> SkipOutOfMemory:
        if self._is_inside:
            raise LifecycleError("SkipOutOfMemory is entered already: put it around one step at a time")
        self._refuse_statistics()
        self.skipped, self.rank = False, None
        self._calls = IssuedCalls()
        self._absent = [(m, n) for m in self._modules for n, b in m._buffers.items() if b is None]
        places = [(m, n, b) for m in self._modules for n, b in m._buffers.items() if b is not None]
        if len(places) != len(self._buffers) or any(
            b is not old or copy.shape != b.shape or copy.device != b.device or copy.dtype != b.dtype
            for (_, _, b), (_, _, old, copy) in zip(places, self._buffers, strict=True)
        ):
            self._buffers = [(m, n, b, torch.empty_like(b)) for m, n, b in places]
        for _, _, buffer, copy in self._buffers:
            copy.copy_(buffer.detach())
        self._versions = [p._version for p in self._parameters()]
        self._backwards = [u.unit.backwards for u in self._units]
        heard = [*self._groups, *(u.post_forward_mesh for u in self._units)]
        groups = dict.fromkeys(g for g in heard if g is not None)
        self._inside.enter_context(self._calls.listening(groups))
        flats = [flat for unit in self._units for flat in unit.flats]
        may_be_skipped.update(flats)
        self._inside.callback(may_be_skipped.difference_update, flats)
        self._is_inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._inside.close()
        self._is_inside = False
        if error is not None:
            if not is_out_of_memory(error) or not self._can_leave():
                self._calls.give_up()
                return False
            logger.warning("rank %d ran out of memory: %s", self._global_rank(), str(error).split("\n")[0])
            self._leave(error)
        if self._tell(error is not None):
            found = "" if self.rank is None else f" Rank {self.rank} ran out of memory this time."
            raise LifecycleError(
                "SkipOutOfMemory: parameters were changed inside of the with (by optimizer.step(), or by a module as "
                "Embedding(max_norm=)), which can't be taken back where a rank runs out of memory. Put the step behind "
                f"it.{found}"
            )
        if self.rank is None:
            calls, last, self._in_a_row = self._calls, self._last, 0
            is_known = not calls.other and last is not None and last.calls == calls.calls
            self._known, self._last = calls if is_known else None, calls
        else:
            self._skip()
        return True

    def _parameters(self) -> Iterator[nn.Parameter]:
        for unit in self._units:
            for listing in unit.listings:
                yield listing.param
        for wrapper in self._wrappers:
            yield from wrapper.parameters()

    def _has_stepped(self) -> bool:
        return self._versions != [p._version for p in self._parameters()]

    def _global_rank(self) -> int:
        group = self._groups[0]
        return group.ranks[group.rank]

    # ------------------------------------------------------------ a step that can't be ended
    def _can_leave(self) -> bool:
        """Says whether other ranks can be given what they wait for, and nothing of the step is left."""
        calls, whole = self._calls, self._known
        if calls.failed or calls.other or self._has_stepped():
            return False
        if all(g.world_size == 1 for g in self._groups):
            return True
        return whole is not None and calls.rest_of(whole) is not None

    def _leave(self, error: BaseException) -> None:
        forget_frames(error)
        self._drop()
        try:
            for call in (self._known and self._calls.rest_of(self._known)) or ():
                call.issue_empty()
        except BaseException:  # what the program still holds leaves no room even for that
            self._calls.give_up()
            self._groups[0].abort("it ran out of memory twice in one step")
            raise

    def _drop(self) -> None:
        """Leaves nothing of the step on this rank."""
        for engine in dict.fromkeys(u.engine for u in self._units if u.engine is not None):
            engine.leave_step()
        for wrapper in self._wrappers:
            wrapper._connected().leave_step()
        for module in self._modules:
            for p in module._parameters.values():
                if p is not None:
                    p.grad = None
        for wrapper in self._wrappers:
            wrapper.zero_grad()

    # ------------------------------------------------------------ together
    def _tell(self, ran_out: bool) -> bool:
        """Tells each rank of one that ran out, if any did, and whether any has changed parameters (collective)."""
        group = self._groups[0]
        mine = self._global_rank() if ran_out else _NOBODY
        said = torch.tensor([mine, int(self._has_stepped())], device=group.backend.device())
        for g in self._groups:
            g.channel("control").all_reduce(said, op=ReduceOp.MAX, label="who ran out of memory")
        found, has_stepped = said.tolist()
        self.rank = None if found == _NOBODY else found
        return bool(has_stepped)

    @torch.no_grad()
    def _skip(self) -> None:
        self.skipped = True
        self._in_a_row += 1
        self._drop()
        for unit, backwards in zip(self._units, self._backwards, strict=True):
            unit.unit.backwards = backwards  # ranks that left the step have not come to its end
        for module, name, buffer, copy in self._buffers:
            buffer.data.copy_(copy)
            module._buffers[name] = buffer
        for module, name in self._absent:
            module._buffers[name] = None
        if self._in_a_row >= IN_A_ROW:
            raise LifecycleError(
                f"SkipOutOfMemory: {IN_A_ROW} batches in a row were skipped, the last because rank {self.rank} ran out "
                "of memory: it is not single batches that are too large. Take smaller ones, checkpoint activations, "
                "or see shardkit.summary(model) and `shardkit estimate` for what is needed"
            )
        logger.warning("rank %d ran out of memory: all ranks skip this batch", self.rank)
