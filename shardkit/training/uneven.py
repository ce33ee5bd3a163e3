"""Lets ranks have different numbers of micro-batches in a step, none too.

[Note: following] A rank that is through with its micro-batches takes part in those of the others: it gathers and
reduces what they do, in the same order ([Note: common order] in ``fsdp/engine.py``), and contributes nothing. So
that it knows whether others go on, each rank says before a forward that it does, and after its last one that it does
not: one exchange a micro-batch on the control channel, for which a rank that computes does not wait.

[Note: turns] Ranks may be about to do different things: to train, to evaluate, to call another model. What comes first
is done first: training before evaluating, and the model of an outer block before that of an inner one. Who says
something else waits for the sum of what ranks say, follows what comes before, and says it again. So the first model's
training waits for nobody.

[Note: errors inside] A rank whose program raises between its calls of the model and its backwards says so when it would
have been through, and all ranks leave the block together, each with an error. In the middle of a micro-batch or of an
evaluation it first takes part in the rest of it, for which others wait, without computing.

[Note: once] With ``once`` everything is gathered as the block begins, and reduced as it ends. In between ranks do not
meet, so that each may do what it likes, and the slowest one is waited for once a step, not at each layer of each round.

[Note: weights] Reductions divide by the number of ranks. What is wanted is the mean over all micro-batches, so that at
the end gradients are multiplied by that number, and divided by the sum of all weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType

import torch
from torch import nn

from ..backend import Work, not_compiled
from ..checks import facts_of_all
from ..errors import ConfigurationError, LifecycleError, OutOfStepError, RankLostError, RankMismatchError
from ..fsdp.construct import wake
from ..fsdp.engine import Engine
from ..fsdp.flat_param import FlatParam
from ..fsdp.forward import become_root
from ..fsdp.state import ShardingState, state_of
from ..fsdp.unit import refuse_steps
from ..oss.sharded_ddp import ShardedDDP
from ..reduction.ordered import refuse_local
from ..reduction.shard_gradients import StandingGradient, in_parts, mark_in_parts
from ..torch_seams.hooks import NO_BACKWARD, check_asked_gradients, current_backward
from ..types import Args, Tree


class _FSDPFollower:
    """Answers what has to be asked of FSDP.

    Attributes:
        state: of backwards.
        rounds: counts backwards of a step, where the order of sums is fixed.
        flats: what is sharded.
        groups: all ranks that have a part of the batch, as one group or as two (of shards and of replicas).
        expect: notes that ranks are about to run a forward.
        follow_backward: takes part in a backward, or in the rest of one (collective), inside of ``no_sync`` or not.
    """

    def __init__(self, state: ShardingState) -> None:
        wake(state)
        self._state = state
        self._options, self._door = state.options, state.door
        self._engine: Engine = state.engine or become_root(state)
        if not state.is_root:
            raise LifecycleError("uneven() is for the outermost FSDP module; pass that one")
        self.state, self.rounds = self._engine.state, self._engine.rounds
        self.flats = [flat for unit in self._engine.units for flat in unit.flats]
        self.groups = [state.group] if state.replicas is None else [state.group, state.replicas]
        self.expect, self.follow_backward = self._engine.common.expect, self._engine.follow_backward

    def begin(self, once: bool) -> None:
        """Lets this rank keep to the order of all ranks until :meth:`end`; with ``once`` it meets none (collective)."""
        if once:
            refuse_local(self._options.reduce, "uneven(once=True)")
            self._engine.gather_all()
        self._engine.common.groups, self._engine.in_common = self.groups, not once

    def end(self, once: bool) -> None:
        self._engine.in_common = False
        if once:
            self._engine.give_back_all()

    def has_local_gradients(self) -> bool:
        return any(unit.keeps_local and unit.has_local_gradients() for unit in self._engine.units)

    def follow(self, evaluates: bool) -> None:
        """Takes part in what is left of that forward, or in all of it, without computing (collective)."""
        self._engine.common.follow(trains=not evaluates)

    def meets_to_evaluate(self) -> bool:
        return self._state.summoned is None

    def adopt_means(self, params: set[nn.Parameter]) -> None:
        """Notes whose gradients, that came from elsewhere, are means over ranks already."""

    def leave_step(self, has_failed: bool = False) -> None:
        """Forgets what this rank has of a step; nothing of it is in flight. Ranks that have failed all do."""
        self._engine.leave_step()
        if has_failed:
            self._engine.common.forget()

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

    flats: Sequence[FlatParam] = ()

    def __init__(self, model: ShardedDDP) -> None:
        self._model = model
        self._exchange = model._connected()
        self.state, self.rounds = self._exchange.state, self._exchange.rounds
        self.groups = [model._group]
        self.adopt_means = self._exchange.adopt_means

    def begin(self, once: bool) -> None:
        if once:
            refuse_local(self._exchange.policy, "uneven(once=True)")
            if self._model._watch_trainable:  # ranks compare, and some may have no forward in which to do so
                self._exchange.refresh_if_changed(self._model._warn_on_change)
            self._accumulated, self.state.accumulating = self.state.accumulating, True

    def end(self, once: bool) -> None:
        if once:
            self.state.accumulating = self._accumulated

    def has_local_gradients(self) -> bool:
        return self.state.unreduced

    def expect(self) -> None:
        self._began = self.state.began

    def follow(self, evaluates: bool) -> None:
        if self.state.began != self._began:  # there is nothing left in it that ranks wait for
            return
        trains, self._model.training = self._model.training, True  # as those who compute
        with torch.enable_grad():
            self._model._entered()
            self._exchange.end_forward(())
        self._model.training = trains

    def follow_backward(self, local: bool) -> None:
        before, self.state.accumulating = self.state.accumulating, local
        self.state.left_out.clear()  # of an error here, which the block will tell
        self.state.follow(self.state.begin)
        self.state.accumulating = before

    def meets_to_evaluate(self) -> bool:
        return False

    def leave_step(self, has_failed: bool = False) -> None:
        self._exchange.leave_step()

    def reduce(self) -> None:
        # also on a rank that has run nothing
        self.state.unreduced = self._model._buffers_sync.changed = True
        self._exchange.reduce_now()

    def scaled(self, total: float) -> list[tuple[nn.Parameter, float]]:
        return [(p, self.groups[0].world_size / total) for p in self._model.parameters()]


class _Gradients:
    """Keeps a step's gradients apart from those from before, and sees that nobody else touches them or takes norms.

    Attributes:
        before: gradients from before; what removed them by then has cleared them.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.before: dict[nn.Parameter, torch.Tensor] = {}
        self._params = params
        self._standing: list[StandingGradient] = []
        self._marked: list[tuple[torch.Tensor, type]] = []  # and the classes that they had
        self._are_changed = False
        self._mark()

    def _mark(self) -> None:
        self._marked = [(p.grad, type(p.grad)) for p in self._params if p.grad is not None]
        for gradient, _ in self._marked:
            mark_in_parts(gradient)

    def begin(self) -> None:
        """Takes the marks off, as a backward begins or what was kept is about to be reduced."""
        self._note_changes()
        for gradient, kind in self._marked:
            gradient.__class__ = kind  # type: ignore[assignment]
        self._marked = []
        if not self._standing:
            self._standing = [StandingGradient() for _ in self._params]
            for p in self._params:
                if p.grad is not None:
                    self.before[p], p.grad = p.grad, None

    def _note_changes(self) -> None:
        if any(each.was_touched(p) for each, p in zip(self._standing, self._params, strict=False)):
            self._are_changed = True

    def check(self) -> None:
        """Raises LifecycleError if gradients were changed since a backward."""
        self._note_changes()
        if self._are_changed:
            raise LifecycleError(
                "gradients were cleared or changed inside of uneven(), between its micro-batches. Call zero_grad() "
                "before the block or after the step; unscale, clip and step after the block, where gradients are those "
                "of all micro-batches"
            )

    def end(self) -> None:
        for each, p in zip(self._standing, self._params, strict=True):
            if p.grad is not None:
                each.stand(p, p.grad)
        self._mark()

    def restore(self) -> None:
        self.begin()
        for p in self._params:
            p.grad = self.before.get(p)


_open: ContextVar[tuple[uneven, ...]] = ContextVar("uneven", default=())  # blocks that this rank is inside of


@contextlib.contextmanager
def _without_share(inputs: Sequence[torch.Tensor], accumulate: bool) -> Iterator[None]:
    """Leaves a call out of the mean whose backward gives gradients of its inputs alone (of an attack, say)."""
    is_of_params = any(isinstance(asked, nn.Parameter) for asked in inputs)
    calls = [(b, b._by.state.count) for b in _open.get() if b._lacks and not is_of_params]
    yield
    for block, count in calls:
        if block._by.state.count != count:  # it went through the call
            block._total -= block._weight


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
    a number of micro-batches. Where no rank has run any, there are no gradients. Those that were there before the first
    backward are added to.

    With ``ReducePolicy(order="fixed", microbatches=K)`` each step has K, which are added up as they come: round by
    round, in each by rank. Bits are those of one process that runs them in this order.

    The model is the root of FSDP or ``fully_shard``, or a ShardedDDP. Each forward is followed by its backward, or is
    an evaluation under ``torch.no_grad()``, of which ranks may run any numbers, too. With ``no_sync`` around all
    backwards of all ranks, gradients are reduced once, at the end. A rank that is through waits for gathers and
    reductions of the others, and computes nothing. So does one that leaves out layers that others run: all keep to the
    order of the first forward, any part of which may be left out. Several models are called inside of several blocks,
    one in the other, which all ranks open in one order.

    With ``once=True`` ranks meet as the block begins, and as it ends: parameters are gathered once, and stay, and
    gradients are reduced once. That costs memory for all parameters and all gradients. In between each rank runs what
    it likes: layers in another order than others, evaluations, several models inside of several blocks.

    An error that leaves the block is told to all ranks, which raise. Gradients then are those from before, and the next
    block may begin.

    Raises:
        ConfigurationError: the model is no root that is sharded, or on XLA, where ranks run one program; a block inside
            of another one whose ranks are others.
        LifecycleError: gradients that ``no_sync`` has kept wait for a reduction; a second forward inside, before a
            backward; layers are called again, or earlier than in the first forward, without ``once``; gradients are
            changed inside, or stepped on; a block with ``once`` in one without it, or around it; a fixed order with
            ``once``, or with other than K micro-batches.
        OutOfStepError: another rank has left the block by an error; ranks call what has no block, without ``once``.
        RankMismatchError: some ranks are inside of ``no_sync`` and some are not.
    """

    def __init__(self, model: nn.Module, once: bool = False) -> None:
        self._once, self._weight = once, 1.0  # of the micro-batch that runs
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
        self._kept_local = self._is_calling = False
        self._is_told = False  # all ranks know of an error
        self._unused = [flat.unused.originals.copy() for flat in self._by.flats]  # of those from before
        self._told: tuple[list[Work], torch.Tensor] = [], torch.zeros(0)  # on its way
        self._forwards, self._backwards = 0, self._by.state.count
        if self._by.has_local_gradients():
            raise LifecycleError(
                "gradients of a backward inside of no_sync() wait for a reduction. Run the next backward outside of "
                "it, or call zero_grad(), before uneven()"
            )
        outer = _open.get()
        self._check_nesting(outer)
        if outer and not self._once:  # all ranks are to come here before anything is said of two
            self._follow_others()
        self._by.begin(self._once)
        if self._by.rounds is not None:
            self._by.rounds.are_uneven = True
        params = [p for p, _ in self._by.scaled(1.0)]
        self._by.state.watcher = self._gradients = _Gradients(params)
        self._stepped = {id(p) for p in params}
        refuse_steps.note(self)
        in_parts.extend(self._by.groups)
        _open.set((*outer, self))
        check_asked_gradients(_without_share)
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._model.register_forward_hook(self._end),
        ]
        return self

    def _check_nesting(self, outer: Sequence[uneven]) -> None:
        if any(block._once != self._once for block in outer):
            raise LifecycleError(
                "uneven() inside of another one, and once=True for one of them alone: ranks of the other block meet at "
                "each layer. Let one block follow the other, or pass once=True to both or to none"
            )
        if any(block._model is self._model for block in outer):
            raise LifecycleError("uneven() inside of another one of the same model: leave one of them out")
        sizes = {math.prod(group.world_size for group in block._by.groups) for block in (*outer, self)}
        if len(sizes) > 1 and not self._once:
            raise ConfigurationError(
                "uneven() inside of another one: the models are sharded over different ranks, which could not follow "
                "each other in both. Let one block follow the other, or pass once=True to both"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if self._once:
                self._by.end(once=True)
            if error is None:
                self._finish()
            elif not self._is_told and self._can_tell(error):
                self._follow_others(error)
        except BaseException as found:
            self._fail(error or found)
            if error is None or not isinstance(found, Exception):
                raise
        else:
            if error is not None:
                self._fail(error)
        finally:  # the model is as outside of a block
            _open.set(tuple(block for block in _open.get() if block is not self))
            for group in self._by.groups:
                in_parts.remove(group)
            self._by.end(once=False)
            self._by.state.watcher = None
            if self._by.rounds is not None:
                self._by.rounds.are_uneven = False

    def _can_tell(self, error: BaseException) -> bool:
        """Says whether this rank can take part in what others wait for, until they hear of it."""
        if not isinstance(error, Exception) or isinstance(error, OutOfStepError | RankLostError):
            return False
        return self._once or all(block._lacks in (0, 1) for block in _open.get())

    @property
    def _lacks(self) -> int:
        """Returns how many backwards are to come for what was called."""
        return self._forwards - (self._by.state.count - self._backwards)

    def _follow_rest(self) -> None:
        """Takes part in what is left of a micro-batch that raised (collective); nothing of the step is left then."""
        if self._is_calling:
            self._by.follow(self._evaluates)
        if self._lacks or self._by.state.task != NO_BACKWARD:
            self._by.follow_backward(self._is_local)
        self._is_calling = False

    def _fail(self, error: BaseException) -> None:
        """Leaves nothing of the step on this rank, and tells others that have not heard of it."""
        self._by.leave_step(has_failed=True)
        self._gradients.restore()
        for flat, were_unused in zip(self._by.flats, self._unused, strict=True):
            flat.unused.originals[:] = were_unused
        self._by.adopt_means(set(self._gradients.before))
        if self._is_told:
            return
        for group in self._by.groups:
            group.abort(f"it left uneven() by {type(error).__name__}: {error}")
        if isinstance(error, OutOfStepError) and self is _open.get()[0] and not self._once:
            raise OutOfStepError(
                f"{error} Inside of uneven() ranks meet at each layer of each call: call the models themselves, none "
                "of their methods and parts, and open a block for each model. "
                "Ranks may do what they like inside of uneven(model, once=True)"
            ) from error

    # ------------------------------------------------------------ steps, which come after the block
    def are_waiting(self) -> bool:
        """Says whether this rank is inside."""
        return self in _open.get()

    def check_step(self, stepped: set[int]) -> None:
        """Raises LifecycleError if a parameter's id is among these."""
        if self.are_waiting() and not self._stepped.isdisjoint(stepped):
            raise LifecycleError(
                "step() inside of uneven(): gradients are those of all ranks' micro-batches when the block ends, and a "
                "rank that is through would not step. Call step() after the block; for several steps open a block for "
                "each"
            )

    # ------------------------------------------------------------ what this rank calls
    @not_compiled
    def _begin(self, model: nn.Module, args: Args) -> None:
        """Tells other ranks that a forward begins."""
        if current_backward() != NO_BACKWARD:  # computed anew
            return
        evaluates = not torch.is_grad_enabled() or (isinstance(model, ShardedDDP) and not model.training)
        if evaluates and (self._once or not self._by.meets_to_evaluate()):
            return
        nest = self._nest()
        for block in nest:
            block._check_backward()
        if not self._once:
            mine = nest.index(self) + 2 * len(nest) * evaluates
            with torch.inference_mode(False):  # for what is received, and followed
                while self._meet(mine) != mine:
                    pass
            self._by.expect()
            self._is_calling, self._evaluates = True, evaluates
        if evaluates:
            return
        self._weight = 1.0
        self._total += 1.0
        self._forwards += 1
        self._is_local = self._by.state.accumulating
        self._kept_local = self._kept_local or self._is_local

    @not_compiled
    def _end(self, model: nn.Module, args: Args, outputs: Tree) -> None:
        self._is_calling = False

    def _check_backward(self) -> None:
        self._gradients.check()
        if self._lacks:
            backwards = self._forwards - self._lacks
            raise LifecycleError(
                f"there were {self._forwards} calls of the model and {backwards} backwards inside of uneven(): ranks "
                "that are through take part in one backward for each. Call the model itself, none of its methods and "
                "parts, and run one backward after each call (of a loss times 0, to leave a micro-batch out) before "
                "anything else is called; evaluate under torch.no_grad()"
            )

    # ------------------------------------------------------------ what other ranks call
    def _nest(self) -> Sequence[uneven]:
        """Lists the blocks whose models ranks tell each other of."""
        return (self,) if self._once else _open.get()

    def _follow_others(self, error: BaseException | None = None) -> tuple[float, bool]:
        """Follows until all ranks are here (collective); returns the sum of weights, and whether any kept gradients.

        Args:
            error: by which this rank has come here.

        Raises:
            OutOfStepError: another rank has come by an error.
        """
        nest = self._nest()
        try:
            for block in nest if error is None else ():
                block._check_backward()
        except LifecycleError as found:
            if self._can_tell(found):
                self._follow_others(found)
            raise
        for block in nest if error is not None else ():
            if not self._once:
                block._follow_rest()
            block._by.leave_step()
        while self._meet(None, has_failed=error is not None) is not None:
            pass
        *_, total, kept, failed = nest[0]._told[1].tolist()
        if failed:
            for block in _open.get():
                block._is_told = True
            groups = nest[0]._by.groups
            own = groups[0].ranks[groups[0].rank], error and f"{type(error).__name__}: {error}"
            for rank, why in facts_of_all(groups, own, label="uneven(): who has failed"):
                if why is not None and error is None:
                    raise OutOfStepError(
                        f"rank {rank} gave up: it left uneven() by {why}. Nothing of the block is left on any rank"
                    )
        return total, bool(kept)

    def _meet(self, mine: int | None, has_failed: bool = False) -> int | None:
        """Tells what this rank is about to do, and follows what others do before that (collective).

        Returns what comes first: the number of a block whose model is trained; of one that evaluates, two for each
        block more; None if all are through.
        """
        nest = self._nest()
        n = len(nest)
        said = [0.0] * (3 * n + 3)
        if mine is None:
            said[3 * n :] = [self._total, self._kept_local, has_failed]
        else:
            said[mine] = 1.0
            if mine < n:
                said[mine + n] = self._by.state.accumulating
        told = nest[0]._tell(said, waits=mine != 0)
        if mine == 0:
            return mine
        sums = told.tolist()
        first = next((k for k in (*range(n), *range(2 * n, 3 * n)) if sums[k]), None)
        if first is not None and first != mine:
            nest[first % n]._follow(sums[first], sums[first + n] if first < n else None)
        return first

    def _follow(self, busy: float, local: float | None) -> None:
        """Follows those who train this model, so many of them inside of ``no_sync``; None: who evaluate it."""
        if local and local < busy:
            raise RankMismatchError(
                f"uneven(): {local:g} of {busy:g} ranks run a micro-batch inside of no_sync(); run all of them "
                "there, or none"
            )
        self._by.expect()
        self._by.follow(evaluates=local is None)
        if local is not None:
            self._by.follow_backward(bool(local))
            self._backwards = self._by.state.count - self._forwards

    def _tell(self, values: Sequence[float], waits: bool) -> torch.Tensor:
        """Adds up what ranks say (collective)."""
        for work in self._told[0]:
            work.wait()
        groups = self._by.groups
        said = torch.tensor(values, dtype=torch.float64, device="cpu").to(groups[0].backend.device())
        works = []
        for number, group in enumerate(groups):
            work = group.channel("control").all_reduce(said, async_op=True, label="uneven(): who goes on")
            if waits or number < len(groups) - 1:
                work.wait()
            works.append(work)
        self._told = works, said
        return said

    @torch.no_grad()
    def _finish(self) -> None:
        total, kept = self._follow_others()
        self._gradients.begin()
        if kept:
            self._by.reduce()
        rounds, before = self._by.rounds, self._gradients.before
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
                    unused[k] = unused[k] and (were_unused[k] or listing.param not in before)
        for p, earlier in before.items():
            p.grad = earlier if p.grad is None else p.grad.add_(earlier)
        self._by.adopt_means(set(before))


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
