"""OSS: a torch optimizer whose state is sharded over ranks (ZeRO stage 1, arXiv 1910.02054).

Each parameter is owned whole by one rank. A rank runs the inner optimizer on the parameters that it owns and
publishes them afterwards; state exists on the owner only. Names and behaviour follow fairscale's OSS.

Legend: W world size, P numel of all parameters, S numel of one rank's part.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from ..backend import Backend, Group, backend_for, callees_compiled, not_compiled
from ..checks import (
    check_one_device,
    check_same_everywhere,
    objects_of,
    option_facts,
    parameter_fact,
    refuse_lazy,
)
from ..errors import ConfigurationError, LifecycleError, ShardkitError, check_kinds, noting_errors
from ..layout import balanced_owners, greedy_owners
from ..optimizer_state.forms import current_request, is_called_by
from ..optimizer_state.kinds import check_form, check_same_state, check_state, to_cpu, with_leaves
from ..optimizers.elementwise import KNOWN, couples_parameters
from ..optimizers.shards import (
    AgreedGradients,
    AgreedOptions,
    copy_options,
    group_facts,
    numbered,
    options_of,
    refuse_shards,
)
from ..progress import note_error
from ..reduction.shard_gradients import Portion, clip_by_global_norm, norm_like
from ..torch_seams.hooks import BackwardState
from ..torch_seams.tensors import group_of
from ..types import Facts, Kwargs, ParamGroup, ProcessGroup, StateDict, Tree
from .placement import Placement, placement_for
from .segments import MASTER, FlatSegment, dtype_of_update, logger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Partition = Literal["greedy", "balanced"]


class OSS(Optimizer):
    """Shards the state of any optimizer over the ranks of a group.

    ::

        optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)

    Args:
        params: parameters, param groups or named parameters, in the same order on all ranks.
        optim: optimizer class, or a callable that takes param groups (and ``defaults``) and returns one.
        group: ranks that share the state: a process group, a :class:`~shardkit.backend.Group`, or None for all.
        backend: name or instance of the backend; by default that of the parameters' device.
        partition: "greedy" is fairscale's (each parameter, in order, to the least loaded rank); "balanced" places
            the largest first, which evens out memory.
        broadcast_dtype: dtype in which updated fp32 parameters travel; the owner's copy is rounded too, so
            that all ranks hold the same values.
        masters: the optimizer updates masters in fp32 of parameters of 16 bits, from which these are rounded. They are
            state of what a rank owns, 4 bytes for each element, and are saved with ``optim``'s own, of fp32, too.
        sends_changes: what a step has changed travels, and nothing else: the same bits on all ranks, for a copy of what
            a rank owns, two readings of what others own, and a wait of the host for how much that is. For weights of 16
            bits that have masters, a small part of which changes in a step; where much changes, all is sent.
        mesh: all of its ranks, in place of ``group``.
        **defaults: arguments of ``optim``. Options of its param groups are the same on all ranks, or the update would
            not be; what a class of yours has for each rank is told by ``functools.partial(Class, name=...)``.

    Attributes:
        rank: this rank's place among those that share the state.
        world_size: how many share it.

    Raises:
        ConfigurationError: ``optim`` is no optimizer class; the parameters are on several devices; there is no
            process group, or this rank is no member of it.
        RankMismatchError: parameters differ between ranks in number, order, shape or dtype, or options do.

    Construction, :meth:`step`, :meth:`add_param_group`, :meth:`refresh_trainable`, :meth:`clip_grad_norm`,
    :meth:`load_state_dict` and :meth:`consolidate_state_dict` are collectives: every rank of the group calls them.
    """

    optim: Optimizer
    _is_outdated = False  # what was consolidated: a step, or a state that was loaded, came after it
    _tells_empty_state = True  # by state_dict() before the first step, though nobody has consolidated it
    _update_dtype: torch.dtype | None = None  # what parameters are updated in, if not their own
    _kind_of_segments = FlatSegment

    @noting_errors
    def __init__(
        self,
        params: ParamsT,
        optim: Callable[..., Optimizer] = SGD,
        group: ProcessGroup = None,
        *,
        backend: str | Backend | None = None,
        partition: Partition = "greedy",
        broadcast_dtype: torch.dtype | None = None,
        masters: bool = False,
        sends_changes: bool = False,
        mesh: DeviceMesh | None = None,
        **defaults: object,
    ) -> None:
        check_optimizer_class(optim, refused=OSS)
        sent = {"broadcast_dtype": broadcast_dtype, "backend": backend}
        check_kinds(sent, broadcast_dtype=torch.dtype, backend=str | Backend)
        if not isinstance(params, Iterable) or isinstance(params, str | nn.Module):
            raise ConfigurationError(
                f"OSS takes parameters, and got a {type(params).__name__}: model.parameters()"
            )
        if partition not in ("greedy", "balanced"):
            raise ConfigurationError(f"partition is {partition!r}; choose 'greedy' or 'balanced'")
        self._keeps_masters, self._built = masters, False
        super().__init__(params, dict(defaults))
        self._refuse_shards(optim)
        check_one_device(self._parameters())
        self.group = group = group_of(mesh, group)
        self._backend = backend_for(self._parameters(), backend)
        one_program = self._backend.even_shards_only
        if masters and one_program:
            self._update_dtype = torch.float32
        elif masters:
            optim = with_masters(optim)
        self._group: Group = self._backend.group(group)
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self._partition: Partition = partition
        self._loads = [0] * self._group.world_size
        self._owner: dict[nn.Parameter, int] = {}
        self._consolidated: dict[int, StateDict] | None = None
        self._is_on_all_ranks = False
        self._has_stepped = False  # or loaded a state: on this rank or another
        self._before_step: list[Callable[[], None]] = []
        # what is asked of gradients where backwards have left them unreduced; a closure may reduce them yet
        self._if_unreduced: list[tuple[BackwardState, Callable[[], None]]] = []
        self.adds_in_order = False  # the gradients of a step, as ReducePolicy(order="fixed") says
        # what functools.partial gives a class, and torch's optimizers don't have: each rank's own
        named = set(optim.keywords) if isinstance(optim, functools.partial) else set()
        self._of_rank = named - KNOWN_OPTIONS
        self._agreed, self._agreed_gradients = AgreedOptions(self._of_rank), AgreedGradients()
        if sends_changes and broadcast_dtype is not None:
            raise ConfigurationError(
                "sends_changes=True with broadcast_dtype: what is rounded on the way always differs; name one of them"
            )
        made_with = self._update_dtype, self._kind_of_segments, sends_changes
        chosen = placement_for(optim, one_program, *made_with)
        self.placement = chosen(self._group, self._owner, broadcast_dtype, *made_with)
        self._assign_owners()
        options = option_facts(
            optim=optim,
            partition=partition,
            broadcast_dtype=broadcast_dtype,
            masters=masters,
            sends_changes=sends_changes,
        )
        self._lay_out(options)
        groups = [self._inner_group(i) for i in range(len(self.param_groups))]
        self.optim = make_inner(
            optim, groups, defaults, splits=self.world_size > 1 and not self.placement.runs_whole
        )
        own = {name: value for name, value in defaults.items() if name not in self.optim.defaults}
        for g in [*self.param_groups, *self.optim.param_groups]:  # as the class itself makes them
            for name in [n for n in own if n in g and g[n] is own[n]]:
                del g[name]
        known = [{k: v for k, v in g.items() if k in KNOWN_OPTIONS} for g in self.optim.param_groups]
        made = [{**g, **of_class} for g, of_class in zip(self.param_groups, known, strict=True)]
        check_same_everywhere(self._group, group_facts(made, 0, self._of_rank), _WHAT)
        self._built = True
        self._adopt_inner()

    def __getstate__(self) -> StateDict:
        """Refuses to be copied or pickled: torch would leave out all but options and this rank's state."""
        raise LifecycleError(
            f"rank {self.rank}: an OSS is connected to its group, and can't be copied or pickled. Make another one "
            "over the parameters of the copied model, and load this one's state_dict(all_ranks=True) into it"
        )

    # ---------------------------------------------------------------- facts
    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for g in self.param_groups for p in g["params"])

    def owner_of(self, param: nn.Parameter) -> int:
        """Returns the rank (in the group) that updates ``param``."""
        return self._owner[param]

    def partition_parameters(self) -> list[list[StateDict]]:
        """Returns the param groups of each rank, with the parameters that the rank owns; [W][groups]."""
        return [
            [
                {**options_of(g), "params": [p for p in g["params"] if self._owner[p] == rank]}
                for g in self.param_groups
            ]
            for rank in range(self.world_size)
        ]

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that this rank's optimizer will read (after their reduction)."""
        return self.placement.gradients(self.optim)

    # ---------------------------------------------------------------- structure
    def _refuse_shards(self, optim: object) -> None:
        name = optim.__name__ if isinstance(optim, type) else "the optimizer"
        refuse_shards(
            self._parameters(), "OSS", f"FSDP shards optimizer state too: {name}(model.parameters(), ...)"
        )

    def _assign_owners(self) -> None:
        new = [p for p in self._parameters() if p not in self._owner]
        place = greedy_owners if self._partition == "greedy" else balanced_owners
        # lazy ones are refused once all ranks know
        ranks = place(
            [0 if is_lazy(p) else p.numel() for p in new], [p.requires_grad for p in new], self._loads
        )
        self._owner.update(zip(new, ranks, strict=True))

    def _lay_out(self, options: Facts = ()) -> None:
        """Takes what the next step updates into the placement's buffers, once all ranks agree (collective)."""
        # a gradient, which its owner alone may have, still moves what was frozen after it
        pending = check_ranks_agree(self._group, self.param_groups, options)
        # now that all ranks make it
        self.placement.name = self.placement.name or numbered(self._group, "OSS")
        self._all = list(self._parameters())
        self._are_owned = [self._owner[p] == self.rank for p in self._all]
        self._trainable = [p.requires_grad for p in self._all]
        # these may yet get a gradient, if they are unfrozen for a backward alone
        self._left_out = [p for p in self._all if not p.requires_grad and p not in pending]
        self.placement.lay_out(self.param_groups, pending)

    def _inner_group(self, index: int) -> StateDict:
        group = self.param_groups[index]
        updated = self.placement.updated_here(index, group["params"])
        return {**options_of(group), "params": updated, **names_of(updated, group)}

    def _adopt_inner(self) -> None:
        """Shows the inner optimizer's defaults, options and state as this optimizer's own."""
        self.defaults = dict(self.optim.defaults)
        self.state = self._adopted = self.optim.state
        self._end_step()

    @noting_errors
    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group at any time; parameters that are there already keep their owners (and state)."""
        super().add_param_group(param_group)
        if not self._built:
            return
        self._refuse_shards(type(self.optim))
        check_one_device(self._parameters())
        self._assign_owners()
        # all options, as a scheduler has set them since the last step
        self._lay_out(group_facts(self.param_groups, 0, self._of_rank))
        copy_options(self.param_groups[:-1], self.optim.param_groups)
        self.optim.add_param_group(self._inner_group(len(self.param_groups) - 1))
        self._adopt_inner()

    def refresh_trainable(self) -> None:
        """Takes note of parameters that were frozen or unfrozen. State that exists is kept."""
        if [p.requires_grad for p in self._all] != self._trainable:
            self._lay_out_anew()

    def _lay_out_anew(self) -> None:
        """Lays out what may get a gradient now, and lets the inner optimizer update it (collective)."""
        self._lay_out()
        for index, group in enumerate(self.optim.param_groups):
            group.update(self._inner_group(index))

    # ---------------------------------------------------------------- stepping
    @callees_compiled
    def step(self, closure: Callable[[], Tree] | None = None, **kwargs: object) -> Tree:  # type: ignore[override]
        """Updates the parameters that this rank owns, then publishes them to all ranks.

        Args:
            closure: reevaluates the model and returns the loss; every rank calls it equally often.
            **kwargs: passed to the inner optimizer's ``step``.
        """
        if self._has_stepped and not self.state and is_called_by("_init_optim_state"):
            return None  # torch steps to make state, on ranks that find none: here, those that own nothing
        try:
            self._begin_step()
            if closure is None:
                self._check_gradients()
            else:
                closure = self._with_check(closure)
            loss = self.placement.step(self.optim, closure, kwargs)
            self._end_step()
        except Exception as error:  # of the inner optimizer or the closure: noting_errors would cost calls
            note_error(error)
            raise
        return loss

    @not_compiled
    def _begin_step(self) -> None:
        for prepare in self._before_step:
            prepare()
        self._has_stepped = self._is_outdated = True
        self._agreed.check(self._group, self.param_groups)
        self.refresh_trainable()
        copy_options(self.param_groups, self.optim.param_groups)
        if self.state is not self._adopted:  # a program has put another one there, to begin anew
            self.optim.state = self._adopted = self.state

    @not_compiled
    def _check_gradients(self) -> None:
        for state, check in self._if_unreduced:
            if state.unreduced:
                check()
        if not self._before_step:  # else they were reduced to their owners
            self._agreed_gradients.check(self._group, self._all, self._are_owned)
            if self._left_out and any(p.grad is not None for p in self._left_out):
                self._lay_out_anew()  # as all ranks do, which have the same gradients

    def _with_check(self, closure: Callable[[], Tree]) -> Callable[[], Tree]:
        @functools.wraps(closure)
        def evaluated() -> Tree:
            loss = closure()
            self._check_gradients()
            return loss

        return evaluated

    @not_compiled
    def _end_step(self) -> None:
        copy_options(self.optim.param_groups, self.param_groups)
        self._agreed.note(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch does, of parameters that other ranks own too."""
        super().zero_grad(set_to_none)
        self.placement.clear_gradients()

    @not_compiled
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[nn.Parameter]], list[nn.Parameter]] | None = None,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        also_over: Group | None = None,
    ) -> torch.Tensor:
        """Clips the gradients by the norm over all of them, wherever they live; returns that norm (0-dim).

        Args:
            max_norm, norm_type, error_if_nonfinite, foreach: as ``torch.nn.utils.clip_grad_norm_``.
            filter_params_fn: maps the list of owned parameters to those that count for the norm. As in fairscale it
                is meant for model parallelism, so that the norm is then summed over all ranks of the job.
            also_over: ranks that have other parts of the model, each the whole group's together; their norms count too.

        Raises:
            RuntimeError: ``error_if_nonfinite`` and the norm is not finite (on every rank).
        """
        for prepare in self._before_step:
            prepare()
        for state, check in self._if_unreduced:
            if state.unreduced:
                check()
        counted, clipped = self.placement.to_clip(self.optim, self._all, float(norm_type))
        if filter_params_fn is not None:
            chosen = filter_params_fn([p for g in self.optim.param_groups for p in g["params"]])
            everybody = self._backend.group(None)
            counted = Portion([p.grad for p in chosen if p.grad is not None], (everybody,))
        if also_over is not None:
            counted = counted._replace(groups=(*counted.groups, also_over))
        return clip_by_global_norm(
            [counted],
            clipped,
            norm_like(self._all),
            float(max_norm),
            float(norm_type),
            error_if_nonfinite,
            foreach,
            self.adds_in_order,
        )

    # ---------------------------------------------------------------- schedule-free optimizers
    def train(self) -> None:
        """Makes parameters what the next step needs, of optimizers that have this switch (collective)."""
        self._switch("train")

    def eval(self) -> None:
        """Makes parameters what is evaluated and saved, of optimizers that have this switch (collective)."""
        self._switch("eval")

    @noting_errors
    def _switch(self, mode: str) -> None:
        switch = getattr(self.optim, mode, None)
        if callable(switch):
            copy_options(self.param_groups, self.optim.param_groups)
            switch()
            copy_options(self.optim.param_groups, self.param_groups)
            self.placement.publish()

    # ---------------------------------------------------------------- state
    @noting_errors
    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collects the state of all ranks (as CPU tensors) on one rank of the group, or on all for -1.

        Raises:
            ConfigurationError: the group has no such rank.
        """
        if not -1 <= recipient_rank < self.world_size:
            raise ConfigurationError(
                f"recipient_rank is {recipient_rank}; the group has ranks 0 to {self.world_size - 1}, and -1 means all"
            )
        copy_options(self.param_groups, self.optim.param_groups)
        self._consolidated = collect(self.placement, self.optim, self._parameters(), recipient_rank)
        self._is_on_all_ranks, self._is_outdated = recipient_rank == -1 or self.world_size == 1, False

    def state_dict(self, all_ranks: bool = False) -> StateDict:  # type: ignore[override]
        """Returns the whole optimizer's state in torch's format: ``{"state": {index: ...}, "param_groups": [...]}``.

        It loads into a plain optimizer, into fairscale's OSS and into this one at any world size. Tensors
        are on the CPU and belong to the last consolidation: after a later step there is a warning, as fairscale
        answers, too, and torch.distributed.checkpoint is refused. Before the first step there is none to consolidate.

        Args:
            all_ranks: consolidate on every rank first (then every rank has to call).

        Raises:
            NotConsolidatedError: this rank holds no consolidated state.
        """
        if all_ranks:
            self.consolidate_state_dict(-1)
        is_empty = self._consolidated is None and not self._has_stepped and not any(self.state.values())
        if is_empty and self._tells_empty_state:
            return super().state_dict()  # nothing to consolidate, on any rank
        is_current = self._is_on_all_ranks and not self._is_outdated
        request = None if is_current else current_request()
        if self._consolidated is None or request is not None:
            remedy = "()" if request is None else "(-1), for all ranks answer torch.distributed.checkpoint,"
            raise NotConsolidatedError(
                f"Optimizer state has not been consolidated on this rank. Call consolidate_state_dict{remedy} "
                f"on all ranks first (this is rank {self.rank}), or state_dict(all_ranks=True) on all ranks."
            )
        if self._is_outdated:
            logger.warning(
                "OSS.state_dict() is of the last consolidation, and a step or load_state_dict() came after it: call "
                "consolidate_state_dict() on all ranks before"
            )
        params = list(self._parameters())
        shown: Tree = self.state
        self.state = cast(Tree, {params[i]: s for i, s in self._consolidated.items()})
        try:
            return super().state_dict()
        finally:
            self.state = shown

    def local_state_dict(self) -> StateDict:
        """Returns the inner optimizer's own dict: this rank's part only."""
        return local(self.optim)

    @noting_errors
    def load_state_dict(self, state_dict: StateDict) -> None:  # type: ignore[override]
        """Loads a whole optimizer's state (of a plain optimizer, of fairscale's or this OSS at any world size).

        Each rank keeps what it owns. ``state_dict`` is not changed.

        Every rank calls it with the same state.

        Raises:
            ConfigurationError: on all ranks, if on one groups, numbers of parameters, or shapes of their state differ
                from this optimizer's. All ranks look at the state of all parameters; nothing is loaded on any.
            RankMismatchError: ranks were given different state; nothing is loaded.
        """
        problem, params = None, list(self._parameters())
        try:
            self._check_loadable(state_dict)
        except ConfigurationError as error:
            problem = error
        compared = state_dict
        if self._of_rank and problem is None:
            groups = [
                {k: v for k, v in g.items() if k not in self._of_rank} for g in state_dict["param_groups"]
            ]
            compared = {**state_dict, "param_groups": groups}
        check_same_state(self._group, compared, problem)
        kept = [p if self.placement.keeps_state_of(p) else None for p in params]
        self.take_state(selected(state_dict, kept))

    def _check_loadable(self, state_dict: StateDict) -> None:
        """Raises ConfigurationError unless it has this optimizer's groups and, of whatever owner, shapes."""
        check_form(state_dict)
        saved = [len(g["params"]) for g in state_dict["param_groups"]]
        mine = [len(g["params"]) for g in self.param_groups]
        if saved != mine:
            raise ConfigurationError(
                f"loaded state dict has parameters per group {saved}, this optimizer has {mine}; build it over the "
                "same param groups first"
            )
        states, own = [], []
        for position, (i, p) in enumerate(zip(_indices(state_dict), self._parameters(), strict=True)):
            found = state_dict["state"].get(i)
            if isinstance(found, dict):
                states.append((f"{position} (shape {tuple(p.shape)})", p.shape, found))
                own.append(self.optim.state.get(p, {}))
        check_state(states, own, getattr(self.optim, "updates", type(self.optim)) in KNOWN)

    def take_state(self, state_dict: StateDict) -> None:
        """Loads the state of those parameters alone that :attr:`placement` keeps here; nothing is sent."""
        shown, self._has_stepped, self._is_outdated = self.state, True, True
        groups_before = self.param_groups
        of_rank = [{k: g[k] for k in self._of_rank if k in g} for g in groups_before]
        super().load_state_dict(state_dict)
        for kept, loaded_group, own in zip(groups_before, self.param_groups, of_rank, strict=True):
            kept.clear()  # torch has made other dicts; schedulers and trainers that hold these see what was loaded
            kept.update(loaded_group, **own)
        self.param_groups = groups_before
        dtype = self._update_dtype
        dtype_of = None if dtype is None else lambda _: dtype
        loaded = as_loaded(self, state_dict, dtype_of_update if self._keeps_masters else dtype_of)
        self.state = shown
        copy_options(self.param_groups, self.optim.param_groups)
        groups = local(self.optim)["param_groups"]
        state = self.placement.inner_state(self.optim, loaded)
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self._adopt_inner()


class NotConsolidatedError(ShardkitError):
    """``state_dict()`` on a rank that holds no consolidated state."""


def names_of(params: Sequence[nn.Parameter], group: ParamGroup) -> StateDict:
    """Makes the entry for names of some parameters, if the group that they are from has names; stand-ins have none."""
    names = dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
    if not names or any(id(p) not in names for p in params):
        return {}
    return {"param_names": [names[id(p)] for p in params]}


_WHAT = "the optimizer's parameters or options"


def check_ranks_agree(group: Group, groups: list[ParamGroup], options: Facts) -> set[nn.Parameter]:
    """Returns parameters that have a gradient on any rank, or raises RankMismatchError if ranks differ (collective)."""
    facts: list[tuple[str, object]] = [("number of param groups", len(groups))]
    params = [p for g in groups for p in g["params"]]
    for index, g in enumerate(groups):
        names = g.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(g["params"]))]
        facts += [(n, parameter_fact(p)) for n, p in zip(names, g["params"], strict=True)]
    gradients = [p.grad is not None for p in params]
    on_ranks = check_same_everywhere(group, [*facts, *options], _WHAT, gradients)
    refuse_lazy(facts, "OSS")
    return {p for p, *has in zip(params, *on_ranks, strict=True) if any(has)}


# That torch's optimizers have: they change the update, whatever the class.
KNOWN_OPTIONS = {
    name
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer)
    for name in inspect.signature(kind).parameters
}


def check_optimizer_class(optim: object, refused: type[Optimizer]) -> None:
    """Raises ConfigurationError unless it makes optimizers, and others than the ``refused``."""
    if isinstance(optim, Optimizer):
        raise ConfigurationError(
            f"optim is an optimizer object ({type(optim).__name__}); pass its class and its arguments: "
            f"OSS(params, optim={type(optim).__name__}, lr=...)"
        )
    if isinstance(optim, type) and not issubclass(optim, Optimizer):
        raise ConfigurationError(
            f"optim={optim.__name__} is no torch.optim.Optimizer; pass an optimizer class such as torch.optim.AdamW"
        )
    if not callable(optim):
        raise ConfigurationError(f"optim={optim!r} is no optimizer class; pass one such as torch.optim.AdamW")
    if isinstance(optim, type) and issubclass(optim, refused):
        raise ConfigurationError("optim is OSS itself; pass the optimizer class that OSS should shard")


def make_inner(
    optim: Callable[..., Optimizer], groups: list[ParamGroup], defaults: Kwargs, *, splits: bool
) -> Optimizer:
    """``optim(groups, **defaults)``, where ``defaults`` may be those of another optimizer of the class.

    Trainers pass ``**optimizer.defaults``, and some classes have entries that their constructors don't take (AdamW's
    ``decoupled_weight_decay``): these are left out where the class sets the same value by itself.

    Args:
        optim: the class, or a callable that makes one.
        groups: this rank's part.
        defaults: the other arguments.
        splits: other ranks have other parameters.
    """
    accepted = inspect.signature(optim).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = {p.name for p in accepted}
    fixed = {} if takes_any else {k: v for k, v in defaults.items() if k not in names}
    made = optim(groups, **{k: v for k, v in defaults.items() if k not in fixed})
    found = made.defaults if isinstance(made, Optimizer) else {}
    unknown = [k for k, v in fixed.items() if k not in found or found[k] != v]
    if unknown:
        raise TypeError(
            f"{getattr(optim, '__name__', optim)} takes no argument {', '.join(map(repr, unknown))}"
        )
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"optim={optim!r} returned {type(made).__name__}; it has to return a torch.optim.Optimizer"
        )
    if splits and couples_parameters(
        made, lambda params: optim(params, **{k: v for k, v in defaults.items() if k not in fixed})
    ):
        raise ConfigurationError(
            f"{type(made).__name__} updates parameters together, with these options, and OSS gives each rank some of "
            "them: its steps would be others than without sharding. Turn off what looks at all of them (LAMB's "
            "max_grad_norm=None, then clip with OSS.clip_grad_norm), or use it without OSS"
        )
    return made


# ------------------------------------------------------------ masters of narrow weights
# Masters in fp32 of weights of 16 bits, which an optimizer of any class keeps as state.
#
# While it steps, a parameter's data is its master, [*] in fp32, and its gradient is cast: the class meets parameters of
# fp32 and makes its other state as for these. In between, the master is an entry of the parameter's state, so that it
# is saved, cut and loaded as all state is.


def with_masters(optim: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Returns what makes optimizers that update masters and round the parameters from them.

    Args:
        optim: a class of optimizers, or ``functools.partial`` of one.

    Raises:
        ConfigurationError: no class can be derived of it.
    """
    if isinstance(optim, functools.partial):
        return functools.partial(with_masters(optim.func), *optim.args, **optim.keywords)
    if not isinstance(optim, type):
        raise ConfigurationError(
            f"masters=True takes a class of optimizers, or functools.partial of one; optim is {optim!r}"
        )
    return cast("type[Optimizer]", type(optim.__name__, (_WithMasters, optim), {"updates": optim}))


class _WithMasters(Optimizer):
    """Lets parameters be their masters while the class that it ``updates`` with takes a step."""

    updates: type[Optimizer]

    def step(self, closure: Callable[[], Tree] | None = None, **kwargs: object) -> Tree:  # type: ignore[override]
        """Takes a step; the closure sees the parameters as they are in between."""
        update: Tree = self.updates.step
        if getattr(update, "hooked", False):  # by torch: hooks have run around this one
            update = update.__wrapped__
        with contextlib.ExitStack() as hidden:

            def evaluated() -> Tree:
                hidden.close()  # a program knows the weights as they are rounded
                try:
                    return program()
                finally:
                    hidden.enter_context(_hiding_weights(self))

            if closure is not None:
                program, kwargs["closure"] = closure, evaluated
            hidden.enter_context(_hiding_weights(self))
            return update(self, **kwargs)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads as torch does, and in the dtype of the masters what torch rounds to that of the parameters."""
        super().load_state_dict(state_dict)
        cast("Tree", self.state).update(as_loaded(self, state_dict, dtype_of_update))


@contextlib.contextmanager
def _hiding_weights(optimizer: Optimizer) -> Iterator[None]:
    """Gives parameters that have a gradient their masters' values, and gradients their dtype; rounds at the end."""
    state: Tree = optimizer.state
    hidden: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    try:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            dtype, data, gradient = dtype_of_update(p), p.data, p.grad
            if gradient is None or dtype == p.dtype:
                continue
            own, written, wide = state.get(p, {}), data.to(dtype), gradient.to(dtype)
            before = own.get(MASTER, written)
            # what a program has written to the weights since they were rounded counts
            master = torch.where(before.to(data.dtype) == data, before, written)
            hidden.append((p, data, gradient))
            own.pop(MASTER, None)  # classes make their state where there is none
            p.grad, p.data = None, master
            p.grad = wide
        yield
    finally:
        for p, data, gradient in hidden:
            state[p][MASTER] = p.data
            p.grad, p.data = None, data.copy_(p.data)
            p.grad = gradient


# ------------------------------------------------------------ state
# Optimizer state between its sharded form (each owner its own) and torch's whole form.
#
# The whole form is torch's: ``{"state": {global index: {...}}, "param_groups": [...]}`` where the index counts
# parameters over all groups. Per-parameter tensors have the parameter's shape; ``step`` is a 0-dim tensor.
State = StateDict


def collect(
    placement: Placement, optimizer: Optimizer, params: Iterable[nn.Parameter], recipient_rank: int
) -> dict[int, State] | None:
    """Returns all parameters' state by global index, CPU tensors, on the recipient (-1: everywhere); None elsewhere
    (collective).

    Args:
        placement: has the ranks; their channel for small things is used unless it knows a better way.
        params: all, in the order of their indices.
    """
    index, group = {p: i for i, p in enumerate(params)}, placement.group
    is_kept = recipient_rank in (-1, group.rank)
    everybody: list[dict[int, State]] | None
    if (found := placement.state_of_all(optimizer, is_kept)) is not None:
        everybody = [{index[p]: to_cpu(s) for p, s in found.items()}] if is_kept else None
    else:
        mine = {index[p]: to_cpu(s) for p, s in placement.state_of_owned(optimizer).items()}
        everybody = objects_of(group, mine, recipient_rank, f"consolidate_state_dict of {placement.name}")
    if everybody is None:
        return None
    return dict(sorted({i: s for part in everybody for i, s in part.items()}.items()))


def selected(state_dict: State, kept: Sequence[nn.Parameter | None]) -> State:
    """Returns the same dict with copies of the state of some parameters only; the caller's is not touched.

    Args:
        kept: all parameters in order, None in the place of those whose state is not wanted.
    """
    device = {i: p.device for i, p in zip(_indices(state_dict), kept, strict=True) if p is not None}
    state = {i: _own_copies(s, device[i]) for i, s in state_dict["state"].items() if i in device}
    return {**state_dict, "state": state}


def as_loaded(
    optimizer: Optimizer, state_dict: State, dtype_of: Callable[[nn.Parameter], torch.dtype] | None
) -> dict[nn.Parameter, State]:
    """Returns the state that an optimizer has just loaded, by parameter.

    Args:
        optimizer: which has cast it to the parameters' dtypes.
        state_dict: what it was.
        dtype_of: what it is wanted in instead, if they are updated in another dtype.
    """
    taken: Tree = optimizer.state
    if dtype_of is None:
        return cast("dict[nn.Parameter, State]", taken)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    saved = {p: state_dict["state"].get(i) for i, p in zip(_indices(state_dict), params, strict=True)}

    def is_cast(key: str, value: object) -> bool:  # by torch, to the dtype of the parameter
        return isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step"

    return {
        p: {k: v.to(p.device, dtype_of(p)) if is_cast(k, v) else taken[p][k] for k, v in state.items()}
        for p, state in saved.items()
        if state
    }


def _indices(state_dict: State) -> list[int]:
    return [i for g in state_dict["param_groups"] for i in g["params"]]


def _own_copies(value: object, device: torch.device) -> Tree:
    """Copies tensors that would go on being shared with the caller: those that need no move to the device."""

    def own(leaf: Tree) -> Tree:
        if not isinstance(leaf, torch.Tensor):
            return copy.copy(leaf)
        return leaf.clone() if leaf.device == device or leaf.dim() == 0 else leaf

    return with_leaves(own, value)


def local(optimizer: Optimizer) -> State:
    """Returns the inner optimizer's dict. Looking up ``state[param]`` leaves an entry, of others' parameters too."""
    state: Tree = optimizer.state
    for p in [p for p, s in state.items() if isinstance(s, dict) and not s]:
        del state[p]
    return optimizer.state_dict()


def part_of_rank(state_dict: State, owners: Sequence[int], rank: int) -> State:
    """Returns the part of a whole state dict that belongs to one rank, with that rank's own indices.

    Args:
        owners: the rank of each parameter, in order.
    """
    state: dict[int, State] = {}
    groups: list[ParamGroup] = []
    owner, count = iter(owners), 0
    for group in state_dict["param_groups"]:
        indices = []
        for saved in group["params"]:
            if next(owner) == rank:
                indices.append(count)
                if saved in state_dict["state"]:
                    state[count] = state_dict["state"][saved]
                count += 1
        groups.append({**options_of(group), "params": indices})
    return {"state": state, "param_groups": groups}
