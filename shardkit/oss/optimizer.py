"""OSS: a torch optimizer whose state is sharded over ranks (ZeRO stage 1, arXiv 1910.02054).

Each parameter is owned whole by one rank. A rank runs the inner optimizer on the parameters that it owns and
publishes them afterwards; state exists on the owner only. Names and behaviour follow fairscale's OSS.

Legend: W world size, P numel of all parameters, S numel of one rank's part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from ..backend import Backend, Group, backend_for
from ..checks.same_everywhere import (
    check_one_device,
    check_same_everywhere,
    option_facts,
    refuse_lazy,
    shape_fact,
)
from ..errors import ConfigurationError, ShardkitError
from ..layout import balanced_owners, greedy_owners
from ..optimizers import elementwise, same_state
from ..optimizers.shards import refuse_shards
from ..progress import note_error, noting_errors
from ..reduction.norms import Portion, clip_by_global_norm, norm_like
from ..torch_seams.distributed_checkpoint import current_request, is_called_by
from ..torch_seams.phases import Phase
from . import state as oss_state
from .parameter_buffers import FlatParameters, by_dtype
from .replicated import has_to_run_whole, step_whole
from .segments import SegmentParameters, step_segments

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
        **defaults: arguments of ``optim``.

    Raises:
        ConfigurationError: ``optim`` is no optimizer class; the parameters are on several devices; there is no
            process group, or this rank is no member of it.
        RankMismatchError: parameters differ between ranks in number, order, shape or dtype.

    Construction, :meth:`step`, :meth:`add_param_group`, :meth:`refresh_trainable`, :meth:`clip_grad_norm`,
    :meth:`load_state_dict` and :meth:`consolidate_state_dict` are collectives: every rank of the group calls them.
    """

    optim: Optimizer

    @noting_errors
    def __init__(
        self,
        params: Any,
        optim: Callable[..., Optimizer] = SGD,
        group: Any = None,
        *,
        backend: str | Backend | None = None,
        partition: Partition = "greedy",
        broadcast_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        _check_optimizer_class(optim)
        if partition not in ("greedy", "balanced"):
            raise ConfigurationError(f"partition is {partition!r}; choose 'greedy' or 'balanced'")
        self._built = False
        super().__init__(params, dict(defaults))
        self._refuse_shards(optim)
        check_one_device(self._parameters())
        self._backend = backend_for(self._parameters(), backend)
        self._group: Group = self._backend.group(group)
        self.group = group
        self._partition: Partition = partition
        self._broadcast_dtype = broadcast_dtype
        self.runs_whole = has_to_run_whole(optim, self._backend.even_shards_only)
        self._loads = [0] * self._group.world_size
        self._owner: dict[nn.Parameter, int] = {}
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._is_on_all_ranks = False
        self._has_stepped = False  # or loaded a state: on this rank or another
        self._before_step: list[Callable[[], None]] = []
        self._flat: list[FlatParameters] = []
        self._segments: list[list[SegmentParameters]] = []  # per param group
        self._assign_owners()
        options = option_facts(optim=optim, partition=partition, broadcast_dtype=broadcast_dtype)
        self._check_ranks_agree([*options, *self._group_facts(0)])
        self._lay_out()
        self.optim = _make_inner(
            optim, [self._inner_group(i) for i in range(len(self.param_groups))], defaults
        )
        if not isinstance(self.optim, Optimizer):
            raise ConfigurationError(
                f"optim={optim!r} returned {type(self.optim).__name__}; it has to return a torch.optim.Optimizer"
            )
        if self.world_size > 1 and not self.runs_whole and elementwise.couples_parameters(self.optim):
            raise _coupled(type(self.optim).__name__)
        self._built = True
        self._adopt_inner()

    # ---------------------------------------------------------------- facts
    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Ranks that share the state."""
        return self._group.world_size

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for g in self.param_groups for p in g["params"])

    def owner_of(self, param: nn.Parameter) -> int:
        """The rank (in the group) that updates ``param``."""
        return self._owner[param]

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """The param groups of each rank, with the parameters that the rank owns; [W][groups]."""
        parts = []
        for rank in range(self.world_size):
            groups = []
            for g in self.param_groups:
                part = {k: v for k, v in g.items() if k not in ("params", "param_names")}
                part["params"] = [p for p in g["params"] if self._owner[p] == rank]
                groups.append(part)
            parts.append(groups)
        return parts

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that this rank's optimizer will read (after their reduction)."""
        for segment in self.segments():
            segment.take_gradient()
        return [p.grad for g in self.optim.param_groups for p in g["params"] if p.grad is not None]

    def segments(self) -> list[SegmentParameters]:
        """The flat segments that stand in for parameters where all ranks run one compiled graph."""
        return [s for group in self._segments for s in group]

    # ---------------------------------------------------------------- structure
    def _refuse_shards(self, optim: Any) -> None:
        name = getattr(optim, "__name__", "the optimizer")
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

    def _group_facts(self, first: int) -> list[tuple[str, Any]]:
        """Options of the param groups from this one on; later they are the user's to change."""
        facts = []
        for index, group in enumerate(self.param_groups[first:], first):
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            facts += option_facts(**{f"{k} of group {index}": options[k] for k in sorted(options)})
        return facts

    def _check_ranks_agree(self, options: Sequence[tuple[str, Any]] = ()) -> None:
        facts: list[tuple[str, Any]] = [("number of param groups", len(self.param_groups))]
        for index, g in enumerate(self.param_groups):
            names = g.get("param_names") or [
                f"parameter {i} of group {index}" for i in range(len(g["params"]))
            ]
            facts += [
                (n, (shape_fact(p), str(p.dtype), "trainable" if p.requires_grad else "frozen"))
                for n, p in zip(names, g["params"], strict=True)
            ]
        check_same_everywhere(self._group, [*facts, *options], "the optimizer's parameters or options")
        refuse_lazy(facts, "OSS")

    def _lay_out(self) -> None:
        """Takes what is trainable now into flat buffers."""
        self._all = list(self._parameters())
        self._trainable = [p.requires_grad for p in self._all]
        if self.runs_whole:
            return
        if self._backend.even_shards_only:
            self._add_segments()
            return
        trainable = by_dtype(p for p in self._all if p.requires_grad)
        channel = self._group.channel("parameters")
        self._flat = [FlatParameters(ps, [self._owner[p] for p in ps], channel) for ps in trainable.values()]

    def _add_segments(self) -> None:
        """Puts parameters that became trainable into segments of their own; those that exist stay as they are."""
        known = {p for s in self.segments() for p in s.params}
        self._segments += [[] for _ in range(len(self.param_groups) - len(self._segments))]
        channel = self._group.channel("parameters")
        for group, segments in zip(self.param_groups, self._segments, strict=True):
            new = by_dtype(p for p in group["params"] if p.requires_grad and p not in known)
            segments += [SegmentParameters(ps, [self._owner[p] for p in ps], channel) for ps in new.values()]

    def _inner_params(self, index: int) -> list[nn.Parameter]:
        params = self.param_groups[index]["params"]
        if self.runs_whole:
            return list(params)
        if self._backend.even_shards_only:
            return [s.own for s in self._segments[index]]
        return [p for p in params if self._owner[p] == self.rank]

    def _inner_group(self, index: int) -> dict[str, Any]:
        options = {k: v for k, v in self.param_groups[index].items() if k not in ("params", "param_names")}
        return {**options, "params": self._inner_params(index)}

    def _adopt_inner(self) -> None:
        """Shows the inner optimizer's defaults, options and state as this optimizer's own."""
        self.defaults = dict(self.optim.defaults)
        self.state = self.optim.state
        self._sync_options(self.optim.param_groups, self.param_groups)

    @staticmethod
    def _sync_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for a, b in zip(source, target, strict=True):
            b.update({k: v for k, v in a.items() if k != "params" and k != "param_names"})

    @noting_errors
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group at any time; parameters that are there already keep their owners (and state)."""
        super().add_param_group(param_group)
        if not self._built:
            return
        self._refuse_shards(type(self.optim))
        check_one_device(self._parameters())
        self._assign_owners()
        self._check_ranks_agree(self._group_facts(len(self.param_groups) - 1))
        self._lay_out()
        self.optim.add_param_group(self._inner_group(len(self.param_groups) - 1))
        self._adopt_inner()

    def refresh_trainable(self) -> None:
        """Takes note of parameters that were frozen or unfrozen. State that exists is kept."""
        if [p.requires_grad for p in self._all] == self._trainable:
            return
        self._check_ranks_agree()
        self._lay_out()
        for group, segments in zip(self.optim.param_groups, self._segments, strict=False):
            group["params"] = [s.own for s in segments]

    # ---------------------------------------------------------------- stepping
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Updates the parameters that this rank owns, then publishes them to all ranks.

        Args:
            closure: reevaluates the model and returns the loss; every rank calls it equally often.
            **kwargs: passed to the inner optimizer's ``step``.
        """
        if self._has_stepped and not self.state and is_called_by("_init_optim_state"):
            return None  # torch steps to make state, on ranks that find none: here, those that own nothing
        try:
            for prepare in self._before_step:
                prepare()
            self._has_stepped = True
            self.refresh_trainable()
            self._sync_options(self.param_groups, self.optim.param_groups)
            if closure is not None and not self.runs_whole:
                closure = self._publishing_between(closure)
            if self.runs_whole:
                loss = step_whole(self.optim, closure, self._group, kwargs)
            elif self._backend.even_shards_only:
                loss = step_segments(self.optim, self.segments(), closure, kwargs)
                self._publish()
            else:
                with Phase("shardkit::oss step"):
                    loss = (
                        self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)
                    )
                self._publish()
            self._sync_options(self.optim.param_groups, self.param_groups)
        except Exception as error:  # of the inner optimizer or the closure: noting_errors would cost calls
            note_error(error)
            raise
        return loss

    def _publishing_between(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, which sees what all ranks have updated since it was last evaluated in the same step."""
        is_first = True

        def evaluated() -> Any:
            nonlocal is_first
            if not is_first:
                self._publish()
            is_first = False
            return closure()

        return evaluated

    def _publish(self) -> None:
        with Phase("shardkit::oss all-gather"):
            stores: list[FlatParameters | SegmentParameters] = [*self._flat, *self.segments()]
            for work in [store.publish(self._broadcast_dtype) for store in stores]:
                if work is not None:
                    work.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients of parameters that other ranks own are cleared too."""
        super().zero_grad(set_to_none)
        for segment in self.segments():
            segment.clear_gradient()

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Any], Any] | None = None,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clips the gradients by the norm over all of them, wherever they live; returns that norm (0-dim).

        Args:
            max_norm, norm_type, error_if_nonfinite, foreach: as ``torch.nn.utils.clip_grad_norm_``.
            filter_params_fn: maps the list of owned parameters to those that count for the norm. As in fairscale it
                is meant for model parallelism, so that the norm is then summed over all ranks of the job.

        Raises:
            RuntimeError: ``error_if_nonfinite`` and the norm is not finite (on every rank).
        """
        for prepare in self._before_step:
            prepare()
        group: Group | None = None if self.runs_whole else self._group
        counted = self.gradients()
        if self._segments and norm_type <= 0:
            raise ConfigurationError(
                f"norm_type={norm_type} is changed by zeros, which pad gradients on {self._backend.name}; take one "
                "above 0"
            )
        if filter_params_fn is not None:
            owned = [p for g in self.optim.param_groups for p in g["params"]]
            counted = [p.grad for p in filter_params_fn(owned) if p.grad is not None]
            group = self._backend.group(None)
        clipped = (
            counted if self._backend.even_shards_only else [p.grad for p in self._all if p.grad is not None]
        )
        return clip_by_global_norm(
            [Portion(counted, group)],
            clipped,
            norm_like(self._all),
            float(max_norm),
            float(norm_type),
            error_if_nonfinite,
            foreach,
        )

    # ---------------------------------------------------------------- state
    @noting_errors
    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collects the state of all ranks (as CPU tensors) on one rank of the group, or on all for -1."""
        if not -1 <= recipient_rank < self.world_size:
            raise ConfigurationError(
                f"recipient_rank is {recipient_rank}; the group has ranks 0 to {self.world_size - 1}, and -1 means all"
            )
        self._sync_options(self.param_groups, self.optim.param_groups)
        self._consolidated = oss_state.collect(self, recipient_rank)
        self._is_on_all_ranks = recipient_rank == -1 or self.world_size == 1

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The whole optimizer's state in torch's format: ``{"state": {index: ...}, "param_groups": [...]}``.

        It loads into a plain optimizer, into fairscale's OSS and into this one at any world size. Tensors
        are on the CPU and belong to the last consolidation. Before the first step there is no state, and nothing to
        consolidate.

        Args:
            all_ranks: consolidate on every rank first (then every rank has to call).

        Raises:
            RuntimeError: this rank holds no consolidated state.
        """
        if all_ranks:
            self.consolidate_state_dict(-1)
        if self._consolidated is None and not self._has_stepped and not any(self.state.values()):
            return super().state_dict()  # nothing to consolidate, on any rank
        request = None if self._is_on_all_ranks else current_request()
        if self._consolidated is None or request is not None:
            remedy = "()" if request is None else "(-1), for all ranks answer torch.distributed.checkpoint,"
            raise NotConsolidatedError(
                f"Optimizer state has not been consolidated on this rank. Call consolidate_state_dict{remedy} "
                f"on all ranks first (this is rank {self.rank}), or state_dict(all_ranks=True) on all ranks."
            )
        params = list(self._parameters())
        shown: Any = self.state
        self.state = cast(Any, {params[i]: s for i, s in self._consolidated.items()})
        try:
            return super().state_dict()
        finally:
            self.state = shown

    def local_state_dict(self) -> dict[str, Any]:
        """The inner optimizer's own dict: this rank's part only."""
        return oss_state.local(self)

    @noting_errors
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Loads a whole optimizer's state (of a plain optimizer, of fairscale's or this OSS at any world size).

        Each rank keeps what it owns. ``state_dict`` is not changed.

        Every rank calls it with the same state.

        Raises:
            ValueError: on all ranks, if on one groups, numbers of parameters, or shapes of their state differ from this
                optimizer's. All ranks look at the state of all parameters, and nothing is loaded on any.
            RankMismatchError: ranks were given different state; nothing is loaded.
        """
        problem = None
        try:
            oss_state.check_loadable(state_dict, self.param_groups)
            oss_state.check_shapes(self, state_dict, type(self.optim) in elementwise.KNOWN)
        except ConfigurationError as error:
            problem = error
        same_state.check_same_state(self._group, state_dict, problem)
        mine = oss_state.select_owned(self, state_dict)
        shown, self._has_stepped = self.state, True
        super().load_state_dict(mine)
        loaded, self.state = self.state, shown
        oss_state.load_inner(self, cast("dict[nn.Parameter, Any]", loaded))
        self._adopt_inner()

    def rank_local_state_dict(self, rank: int, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The part of a whole state dict that belongs to ``rank``, indexed as that rank's inner optimizer does."""
        return oss_state.part_of_rank(self, rank, state_dict)


class NotConsolidatedError(ShardkitError):
    """``state_dict()`` on a rank that holds no consolidated state."""


def _coupled(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} updates parameters together, with these options, and OSS gives each rank some of them: its steps "
        "would be others than without sharding. Turn off what looks at all of them (LAMB's max_grad_norm=None, then "
        "clip with OSS.clip_grad_norm), or use it without OSS"
    )


def _make_inner(
    optim: Callable[..., Optimizer], groups: list[dict[str, Any]], defaults: dict[str, Any]
) -> Optimizer:
    """``optim(groups, **defaults)``, where ``defaults`` may be those of another optimizer of the class.

    Trainers pass ``**optimizer.defaults``, and some classes have entries that their constructors don't take (AdamW's
    ``decoupled_weight_decay``): these are left out where the class sets the same value by itself.
    """
    accepted = inspect.signature(optim).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = {p.name for p in accepted}
    fixed = {} if takes_any else {k: v for k, v in defaults.items() if k not in names}
    made = optim(groups, **{k: v for k, v in defaults.items() if k not in fixed})
    found = getattr(made, "defaults", {})
    unknown = [k for k, v in fixed.items() if k not in found or found[k] != v]
    if unknown:
        raise TypeError(
            f"{getattr(optim, '__name__', optim)} takes no argument {', '.join(map(repr, unknown))}"
        )
    return made


def _check_optimizer_class(optim: Any) -> None:
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
    if isinstance(optim, type) and issubclass(optim, OSS):
        raise ConfigurationError("optim is OSS itself; pass the optimizer class that OSS should shard")
