"""Lets ranks have different numbers of micro-batches in a step, none too.

[Note: following] A rank that is through with its micro-batches takes part in those of the others: it gathers and
reduces what they do, in the same order, and contributes nothing. It knows the order from its own last forward. One that
has run none yet runs the first one with another rank's inputs. So that it knows whether others go on, each rank says
before a forward that it does, and after its last one that it does not: one exchange a micro-batch on the control
channel, for which a rank that computes does not wait.

[Note: once] With ``once`` everything is gathered as the block begins, and reduced as it ends. In between ranks do not
meet, so that each may do what it likes, and the slowest one is waited for once a step, not at each layer of each round.

[Note: weights] Reductions divide by the number of ranks. What is wanted is the mean over all micro-batches, so that at
the end gradients are multiplied by that number, and divided by the sum of all weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import TracebackType

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..backend import Work
from ..checks import all_gather_facts
from ..errors import ConfigurationError, LifecycleError, RankMismatchError
from ..fsdp.construct import wake
from ..fsdp.engine import Engine
from ..fsdp.flat_param import FlatParam
from ..fsdp.forward import become_root
from ..fsdp.state import ShardingState, state_of
from ..oss.sharded_ddp import ShardedDDP
from ..reduction.ordered import refuse_local
from ..torch_seams.compiling import not_compiled
from ..torch_seams.hooks import NO_BACKWARD, current_backward
from ..types import Args, Kwargs, Tree


class _FSDPFollower:
    """Answers what has to be asked of FSDP.

    Attributes:
        state: of backwards.
        rounds: counts backwards of a step, where the order of sums is fixed.
        flats: what is sharded.
        groups: all ranks that have a part of the batch, as one group or as two (of shards and of replicas).
    """

    def __init__(self, state: ShardingState) -> None:
        wake(state)
        self._options, self._door = state.options, state.door
        self._engine: Engine = state.engine or become_root(state)
        if not state.is_root:
            raise LifecycleError("uneven() is for the outermost FSDP module; pass that one")
        self.state, self.rounds = self._engine.state, self._engine.rounds
        self.flats = [flat for unit in self._engine.units for flat in unit.flats]
        self.groups = [state.group] if state.replicas is None else [state.group, state.replicas]

    @property
    def has_order(self) -> bool:
        """Whether this rank knows in which order the others gather and reduce."""
        return self._engine.has_order

    @property
    def all_have_order(self) -> bool:
        """Whether all do."""
        return self._engine.all_have_order

    def note_order(self) -> None:
        """Notes that all do from the end of this micro-batch on."""
        self._engine.all_have_order = True

    def begin_alone(self) -> None:
        """Until :meth:`end_alone` no micro-batch meets other ranks (collective)."""
        refuse_local(self._options.reduce, "uneven(once=True)")
        self._engine.gather_all()

    def end_alone(self) -> None:
        """Ends that."""
        self._engine.give_back_all()

    def has_local_gradients(self) -> bool:
        """Whether gradients of this rank wait for a reduction."""
        return any(unit.keeps_local and unit.has_local_gradients() for unit in self._engine.units)

    def follow(self, accumulating: bool, forward: Callable[[], object] | None) -> None:
        """Takes part in a micro-batch of the others (collective); in their forward by ``forward``, if it is given."""
        before = self._engine.set_accumulating([accumulating] * len(self._engine.units))
        self._engine.follow(forward)
        self._engine.set_accumulating(before)

    def reduce(self) -> None:
        """Reduces what ``no_sync`` kept, on all ranks (collective)."""
        self._engine.reduce_now(everything=True)

    def scaled(self, total: float) -> list[tuple[nn.Parameter, float]]:
        """Lists parameters, each with the factor from its reduced gradient to a sum over ranks over ``total``.

        Gradients of ``ignored_params`` stay a rank's own, whose mean over ranks would be that sum.
        """
        ranks = math.prod(group.world_size for group in self.groups)
        listed = {listing.param for flat in self.flats for listing in flat.listings}
        found = [(p, ranks / total) for p in self._door.parameters() if p not in listed]
        for unit in self._engine.units:
            copies = 1 if unit.replicas is None else unit.replicas.world_size
            factor = unit.divisors[0] * unit.divisors[1] * copies / total
            found += [(listing.param, factor) for flat in unit.flats for listing in flat.listings]
        return found


class _ShardedDDPFollower:
    """Answers the same of ShardedDDP."""

    has_order = all_have_order = True  # the buckets'
    flats: Sequence[FlatParam] = ()

    def note_order(self) -> None:
        """There was nothing to learn."""

    def __init__(self, model: ShardedDDP) -> None:
        self._model = model
        self._exchange = model._connected()
        self.state, self.rounds = self._exchange.state, self._exchange.rounds
        self.groups = [model._group]

    def begin_alone(self) -> None:
        refuse_local(self._exchange.policy, "uneven(once=True)")
        self._accumulated, self.state.accumulating = self.state.accumulating, True

    def end_alone(self) -> None:
        self.state.accumulating = self._accumulated

    def has_local_gradients(self) -> bool:
        return self.state.unreduced

    def follow(self, accumulating: bool, forward: Callable[[], object] | None) -> None:
        before, self.state.accumulating = self.state.accumulating, accumulating
        trains, self._model.training = self._model.training, True  # as those who compute
        with torch.enable_grad():
            self._model._entered()
            nothing = torch.zeros((), requires_grad=True).clone()
            self._exchange.end_forward(nothing)
        self._model.training = trains
        nothing.backward()
        self.state.accumulating = before

    def reduce(self) -> None:
        self.state.unreduced = True
        self._exchange.reduce_now()

    def scaled(self, total: float) -> list[tuple[nn.Parameter, float]]:
        return [(p, self.groups[0].world_size / total) for p in self._model.parameters()]


_open: ContextVar[tuple[uneven, ...]] = ContextVar("uneven", default=())  # blocks that this rank is inside of


class uneven:
    """Inside, this rank may run any number of micro-batches, whatever other ranks run; no rank has to run one.

    ::

        with shardkit.uneven(model) as work:
            for batch in my_batches:                       # of any number
                loss = work.weighted(loss_of(model, batch), weight=batch.tokens)    # or the loss as it is
                loss.backward()
        optimizer.step()

    At the end (collective) gradients are those of one process over all micro-batches of all ranks: the sum of weight
    times gradient, over the sum of weights. Without :meth:`weighted` a micro-batch weighs 1. Losses are not divided by
    a number of micro-batches. Where no rank has run any, there are no gradients. Those that were there before are
    added to.

    With ``ReducePolicy(order="fixed", microbatches=K)`` each step has K, which are added up as they come: round by
    round, in each by rank. Bits are those of one process that runs them in this order.

    The model is the root of FSDP or ``fully_shard``, or a ShardedDDP. Each forward is followed by its backward. With
    ``no_sync`` around all backwards of all ranks, gradients are reduced once, at the end. A rank that is through waits
    for gathers and reductions of the others, and computes nothing. Before its first forward of all, though, it may run
    one with another rank's inputs. Where ranks run layers that others don't, one that is through can't follow.

    With ``once=True`` ranks meet as the block begins, and as it ends: parameters are gathered once, and stay, and
    gradients are reduced once. That costs memory for all parameters and all gradients. In between each rank runs what
    it likes: other layers than others, evaluations, several models inside of several blocks.

    Args:
        model: see above.
        once: see above.

    Raises:
        ConfigurationError: the model is no root that is sharded, or on XLA, where ranks run one program.
        LifecycleError: gradients that ``no_sync`` has kept wait for a reduction; a second forward inside, before a
            backward; without ``once`` an evaluation of FSDP, or a block inside of another one; with it a fixed order.
        LifecycleError: the order is fixed, and other than K micro-batches were run.
        RankMismatchError: some ranks are inside of ``no_sync`` and some are not.
    """

    _weight = 1.0  # of the micro-batch that runs

    def __init__(self, model: nn.Module, once: bool = False) -> None:
        self._once = once
        self._model = model = getattr(model, "_orig_mod", model)  # of torch.compile's
        self._by = _follower_for(model)

    def weighted(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Returns weight * loss; the micro-batch counts so much: of samples or tokens, say, that it is a mean of.

        Raises:
            ConfigurationError: the order is fixed, in which each has an equal share.
        """
        if self._by.rounds is not None:
            raise ConfigurationError(
                'weighted() with order="fixed": each of the micro-batches has an equal share of the mean. Leave one of '
                "them out"
            )
        self._total += float(weight) - self._weight
        self._weight = float(weight)
        return loss * weight

    def __enter__(self) -> uneven:
        self._total, self._weight = 0.0, 1.0
        self._kept_local = self._is_following = False
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._unused = [flat.unused.originals.copy() for flat in self._by.flats]  # of these
        self._told: tuple[list[Work], torch.Tensor] | None = None  # on its way
        self._forwards, self._backwards = 0, self._by.state.count
        if self._by.has_local_gradients():
            raise LifecycleError(
                "gradients of a backward inside of no_sync() wait for a reduction. Run the next backward outside of "
                "it, or call zero_grad(), before uneven()"
            )
        blocks = *_open.get(), self
        if len(blocks) > 1 and not all(block._once for block in blocks):
            raise LifecycleError(
                "uneven() inside of another one: a rank that is through with one model could not follow others in "
                "both. Let one block follow the other, or pass once=True to both"
            )
        if self._once:
            self._by.begin_alone()
        elif self._by.rounds is not None:
            self._by.rounds.are_uneven = True
        _open.set(blocks)
        for p, _ in self._by.scaled(1.0):
            if p.grad is not None:
                self._before[p], p.grad = p.grad, None
        self._hook = self._model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._hook.remove()
        _open.set(tuple(block for block in _open.get() if block is not self))
        if self._once:
            self._by.end_alone()
        try:
            self._leave(error)
        finally:
            if self._by.rounds is not None:
                self._by.rounds.are_uneven = False

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            for group in self._by.groups:
                group.abort(f"it left uneven() by {type(error).__name__}: {error}")
            return
        self._check_backward()
        self._is_following = True
        while True:
            forward = None if self._by.all_have_order or self._once else self._learn(None)
            busy, local, total, kept = self._tell([0, 0, self._total, self._kept_local]).tolist()
            if not busy:
                break
            if 0 < local < busy:
                raise RankMismatchError(
                    f"uneven(): {local:g} of {busy:g} ranks run a micro-batch inside of no_sync(); run all of them "
                    "there, or none"
                )
            self._by.follow(bool(local), forward)
            self._by.note_order()
        if kept:
            self._by.reduce()
        self._finish(total)

    @not_compiled
    def _begin(self, model: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """A forward begins: other ranks are told."""
        if self._is_following or current_backward() != NO_BACKWARD:  # computed anew
            return
        if not torch.is_grad_enabled() or (isinstance(model, ShardedDDP) and not model.training):
            if self._once or isinstance(model, ShardedDDP):  # which meets nobody
                return
            raise LifecycleError(
                "an evaluation inside of uneven(): ranks that are through could not follow. Evaluate outside of it, "
                "on all ranks, or on gathered weights (summon_full_params), or pass once=True"
            )
        self._check_backward()
        if not self._by.all_have_order and not self._once:
            self._learn((args, kwargs))
            self._by.note_order()
        self._weight = 1.0
        self._total += 1.0
        local = self._by.state.accumulating
        self._forwards += not (local and isinstance(model, ShardedDDP))  # which does not count such backwards
        self._kept_local = self._kept_local or local
        if not self._once:
            self._tell([1, local, 0, 0])

    def _check_backward(self) -> None:
        backwards = self._by.state.count - self._backwards
        if backwards != self._forwards:
            raise LifecycleError(
                f"there were {self._forwards} calls of the model and {backwards} backwards inside of uneven(): ranks "
                "that are through take part in one backward for each. Call the model itself, none of its methods and "
                "parts, and run one backward after each call (of a loss times 0, to leave a micro-batch out)"
            )

    def _learn(self, inputs: tuple[Args, Kwargs] | None) -> Callable[[], object] | None:
        """Where a rank that is through has never run a forward, it gets another one's inputs (collective)."""
        shards, *replicas = [group.channel("control") for group in self._by.groups]
        said = (inputs is not None, self._by.has_order)
        rows: list[Tree] = [all_gather_facts(shards, said, label="uneven(): who goes on")]
        for group in replicas:
            rows = all_gather_facts(group, rows[0], label="uneven(): who goes on")
        busy = [
            (row, rank)
            for row, facts in enumerate(rows)
            for rank, (goes_on, _) in enumerate(facts)
            if goes_on
        ]
        if not busy or all(goes_on or knows for facts in rows for goes_on, knows in facts):
            return None
        sent: Tree = (
            None if inputs is None else tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), inputs)
        )
        device = self._by.groups[0].backend.device()
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        (row, rank), label = busy[0], "uneven(): inputs for a first forward"
        for group in replicas if shards.rank == rank else ():
            sent, autocast = group.broadcast_object((sent, autocast), row, label=label)
        (args, kwargs), autocast = shards.broadcast_object((sent, autocast), rank, label=label)
        if inputs is not None or self._by.has_order:
            return None
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))

        def forward() -> None:
            buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            enabled, dtype = autocast
            with (
                torch.random.fork_rng(devices=[] if device.type == "cpu" else [device.index or 0]),
                torch.autocast(device.type, dtype, enabled),
            ):
                self._model(*args, **kwargs)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

        return forward

    def _tell(self, values: Sequence[float]) -> torch.Tensor:
        """Adds up what ranks say (collective); waits for the sum where this rank is through."""
        if self._told is not None:
            for work in self._told[0]:
                work.wait()
        groups = self._by.groups
        said = torch.tensor(values, dtype=torch.float64).to(groups[0].backend.device())
        works = []
        for number, group in enumerate(groups):
            work = group.channel("control").all_reduce(said, async_op=True, label="uneven(): who goes on")
            if self._is_following or number < len(groups) - 1:
                work.wait()
            works.append(work)
        self._told = works, said
        return said

    @torch.no_grad()
    def _finish(self, total: float) -> None:
        rounds = self._by.rounds
        if rounds is None:
            for p, factor in self._by.scaled(total) if total else ():
                if p.grad is not None:
                    p.grad.mul_(factor)
        elif total != rounds.microbatches:
            raise LifecycleError(
                f'with order="fixed" a step has {rounds.microbatches} micro-batches, and all ranks have run {total:g} '
                "inside of uneven(). Run as many, or change ReducePolicy(microbatches=...)"
            )
        # what only the gradients from before have is no parameter that sat out
        for flat, were_unused in zip(self._by.flats, self._unused, strict=True):
            unused = flat.unused.originals
            for listing in flat.listings:
                for k in range(listing.first, listing.first + len(listing.originals)):
                    unused[k] = unused[k] and (were_unused[k] or listing.param not in self._before)
        for p, before in self._before.items():
            p.grad = before if p.grad is None else p.grad.add_(before)


def _follower_for(model: nn.Module) -> _FSDPFollower | _ShardedDDPFollower:
    state = state_of(model)
    by: _FSDPFollower | _ShardedDDPFollower
    if state is not None:
        by = _FSDPFollower(state)
    elif isinstance(model, ShardedDDP):
        by = _ShardedDDPFollower(model)
    else:
        raise ConfigurationError(
            f"uneven() takes a model that is sharded as a whole (FSDP, fully_shard, ShardedDDP), and this "
            f"{type(model).__name__} is not"
        )
    backend = by.groups[0].backend
    if not backend.has_storage:
        raise ConfigurationError(
            f"uneven() on {backend.name}: ranks run one compiled program, so that all have the same number of "
            "micro-batches; pad those that have fewer by empty ones (a loss times 0)"
        )
    return by
