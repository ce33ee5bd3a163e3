"""torch_xla.distributed.zero_redundancy_optimizer on shardkit's OSS (ZeRO stage 1)."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.backend import Group
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.internal.params import average_gradients
from shardkit.layout import Piece, SegmentLayout
from shardkit.optimizer_state.kinds import is_elementwise, to_cpu
from shardkit.oss.optimizer import OSS
from shardkit.oss.placement import split_state
from shardkit.oss.segments import FlatSegment
from shardkit.types import StateDict, T, Tree
from shardkit.xla.ranks import current_backend, group_among, rank_and_world_size

__all__ = ["ZeroRedundancyOptimizer"]

Groups = Sequence[Sequence[int]]


# ------------------------------------------------------------ rows
# Of every parameter on each rank, padded alike, as in torch_xla: their segments and state dicts.
# Legend: W world size, N rows of a parameter, R rows of one rank: N / W rounded up, S numel of one rank's segment.
States = Mapping[int, StateDict]
_NOTE = "sharding"  # torch_xla, which doesn't write it, doesn't look at it


class RowSegment(FlatSegment):
    """A flat segment [S] of some rows of every parameter, [R, ...] one after the other."""

    has_parts = True

    def _laid_out(self) -> SegmentLayout:
        world_size, offset = self.group.world_size, 0
        pieces: list[Piece] = []
        self._places: list[tuple[int, torch.Size]] = []  # within each rank's segment
        for item, p in enumerate(self.params):
            rows = row_shape(p.shape, world_size)
            self._places.append((offset, rows))
            for rank in range(world_size):
                start = rank * rows.numel()
                if (numel := min(rows.numel(), p.numel() - start)) > 0:
                    pieces.append(Piece(item, start, rank, offset, numel))
            offset += rows.numel()
        return SegmentLayout(tuple(pieces), (offset,) * world_size)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.view(self.group.world_size, -1)
        return [
            parts[:, at : at + rows.numel()].reshape(-1)[: p.numel()].view(p.shape)
            for p, (at, rows) in zip(self.params, self._places, strict=True)
        ]

    def split_own(self, segment: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Returns this rank's segment [S] as rows [R, ...] of each parameter, which are views of it."""
        return {
            p: segment[at : at + rows.numel()].view(rows)
            for p, (at, rows) in zip(self.params, self._places, strict=True)
        }

    def join_own(self, pieces: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """Returns this rank's segment [S] of whole tensors."""
        wholes = [pieces[p] for p in self.params]
        return self.take_own(wholes, max(wholes, key=lambda whole: whole.dtype.itemsize))


def row_shape(shape: torch.Size, world_size: int) -> torch.Size:
    """Returns [R, ...] for a parameter [N, ...]; a number is a row."""
    first, *others = shape or (1,)
    return torch.Size([-(-first // world_size), *others])


def rows_of(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Returns a rank's rows [R, ...] of a parameter [N, ...], with zeros behind the last."""
    size = row_shape(whole.shape, world_size)[0]
    rows = whole.reshape(whole.shape or (1,))[rank * size : (rank + 1) * size]
    missing = size - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.clone()


def as_rows(base: States, groups: Tree, shapes: Sequence[torch.Size], group: Group) -> StateDict:
    """Returns this rank's state dict of its rows of all state."""
    note = {"rank": group.rank, "world_size": group.world_size}
    found = {"state": {}, "param_groups": groups, "base_state": base, _NOTE: note}
    return {**found, "shape_info": dict(enumerate(shapes))}


def whole_of(
    mine: StateDict, shapes: Sequence[torch.Size], group: Group
) -> tuple[StateDict, dict[int, torch.Tensor]]:
    """Does the reverse (collective): the state dict of the whole optimizer, and the parameters that were saved with it.

    Raises:
        ConfigurationError: on all ranks: a rank's state is another rank's, or of other ranks or parameters.
    """
    parts = {key: mine.get(key, {}) for key in ("base_state", "sharded_master_weights")}
    told = (_problem(mine, shapes, group), parts)
    everybody = group.channel("control").all_gather_object(told, label="optimizer state in rows")
    wrong = [f"rank {rank}: {what}" for rank, (what, _) in enumerate(everybody) if what is not None]
    if wrong:
        raise ConfigurationError(
            f"load_state_dict: {'; '.join(wrong)}. Nothing was loaded; each rank loads what it has saved, with as many "
            "ranks and the same parameters (whole_state_dict() is for others)"
        )
    states = [p["base_state"] for _, p in everybody]
    whole = {
        i: {k: _joined([s[i][k] for s in states], shapes[i], group.world_size) for k in state}
        for i, state in states[0].items()
    }
    weights = [p["sharded_master_weights"] for _, p in everybody]
    masters: dict[int, torch.Tensor] = {
        i: _joined([w[i] for w in weights], shapes[i], group.world_size) for i in weights[0]
    }
    return {"state": whole, "param_groups": mine["param_groups"]}, masters


def _problem(mine: StateDict, shapes: Sequence[torch.Size], group: Group) -> str | None:
    note, place = mine.get(_NOTE), {"rank": group.rank, "world_size": group.world_size}
    if note is not None and note != place:
        here = f"rank {group.rank} of {group.world_size}"
        return f"the state is rank {note['rank']}'s of {note['world_size']}, this is {here}"
    saved = mine.get("shape_info", {})
    for i, shape in enumerate(shapes):
        if tuple(saved.get(i, shape)) != tuple(shape):
            return f"parameter {i} has shape {tuple(shape)}, the saved one {tuple(saved[i])}"
        size = row_shape(shape, group.world_size)
        tensors = [
            v for v in mine["base_state"].get(i, {}).values() if isinstance(v, torch.Tensor) and v.dim()
        ]
        if any(v.shape != size and v.dim() == len(size) for v in tensors):
            return f"the state of parameter {i} has other rows than the {size[0]} of each of {group.world_size} ranks"
    return None


def _joined(parts: Sequence[Tree], shape: torch.Size, world_size: int) -> Tree:
    """Joins rows of all ranks [R, ...] to the whole [N, ...]; anything else is the same on all ranks."""
    first = parts[0]
    if not isinstance(first, torch.Tensor) or first.shape != row_shape(shape, world_size):
        return first
    return torch.cat([p.cpu() for p in parts])[: shape[0] if shape else 1].view(shape)


# ------------------------------------------------------------ the optimizer
class ZeroRedundancyOptimizer(OSS):
    """Reduces gradients, clips them and steps, with its state sharded over ranks: see :class:`shardkit.OSS`.

    After a step, parameters show the gradients of this rank that they had before.

    Each rank updates some rows of every parameter, as in torch_xla, all of them in one flat tensor. Optimizers that are
    not known to be element-wise, such as LAMB, get whole parameters and give the results of one process. State dicts
    have torch_xla's format: each rank's has its rows of all parameters' state; either library loads the other's.

    Args:
        params: as for any optimizer.
        optimizer_class: the inner optimizer.
        optimizer_dtype: parameters are updated in it; if they have another one, in copies which are sharded too, and
            whose rounded values they get. Default: fp32 for half precision, else the parameters' own.
        grad_clipping: clip by the norm of all gradients.
        max_norm: its limit, 1.0 by default.
        sharding_groups: partition of all ranks; state is sharded, and gradients averaged, within this rank's part.
        grad_norm_groups: partition over which squared norms are added up too (parts of the model on other ranks).
        lazy_init: nothing is sharded before :meth:`init_zero`.
        use_grad_acc_hook: gradients are added up in ``optimizer_dtype`` as backward makes them; parameters show none.
        save_master_weights: state dicts have this rank's rows of the parameters in ``optimizer_dtype``, too.
        higher_cc_precision: gradients travel in ``optimizer_dtype``.
        pin_layout, bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: accepted; all of a dtype travels together.
        **defaults: arguments of ``optimizer_class``.

    Attributes:
        inited: whether it is sharded.
        grad_norm: of the last step, before clipping; 0-dim.

    Raises:
        ConfigurationError: ``optimizer_dtype`` is not that of the parameters, and the optimizer isn't known to be
            element-wise.
    """

    grad_norm: torch.Tensor | None = None
    _kind_of_segments = RowSegment

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Groups | None = None,
        grad_norm_groups: Groups | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: int = 0,
        bucket_cap_mb_reduce_scatter: int = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Tree,
    ) -> None:
        self.inited = self._built = False
        self.optimizer_class, self.optimizer_dtype = optimizer_class, optimizer_dtype or torch.float32
        self._chosen_dtype = optimizer_dtype
        self.grad_clipping, self.max_norm = grad_clipping, 1.0 if max_norm is None else max_norm
        self.pin_layout, self.use_grad_acc_hook = pin_layout, use_grad_acc_hook
        self.save_master_weights, self.higher_cc_precision = save_master_weights, higher_cc_precision
        self.bucket_cap_mb_all_gather = bucket_cap_mb_all_gather
        self.bucket_cap_mb_reduce_scatter = bucket_cap_mb_reduce_scatter
        self._sharding_groups, self._norm_groups = sharding_groups, grad_norm_groups
        self._arguments = defaults
        Optimizer.__init__(self, params, dict(defaults))
        if not lazy_init:
            self.init_zero()

    def init_zero(self) -> None:
        """Shards what was not yet (collective); later it takes note of parameters that were frozen or unfrozen."""
        if self.inited:
            self.refresh_trainable()
            return
        groups, norms = self._sharding_groups, self._norm_groups
        params = [p for g in self.param_groups for p in g["params"]]
        wide = any(p.dtype.itemsize > 4 for p in params)
        self._sum_dtype = self._chosen_dtype or (None if wide else torch.float32)
        self._wire = self._sum_dtype if self.higher_cc_precision else None
        is_own = self._sum_dtype is None or all(p.dtype == self._sum_dtype for p in params)
        self._update_dtype = None if is_own else self._sum_dtype
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        own = None if groups is None else group_among(groups)
        self._also_over = None if norms is None else group_among(norms)
        super().__init__([*self.param_groups], self.optimizer_class, own, **self._arguments)
        if self.use_grad_acc_hook:
            trainable = [p for p in self._parameters() if p.requires_grad]
            _adding.update(dict.fromkeys(trainable, weakref.ref(self)))
            # a loop that makes a new optimizer forgets the old one
            hook = functools.partial(_add, weakref.ref(self))
            self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in trainable]
        self.inited = True

    # ------------------------------------------------------------ facts
    @property
    def base_optimizer(self) -> Optimizer:
        """Returns the inner optimizer, with this rank's rows of every parameter, which are views of what it updates.

        Of an optimizer that gets whole parameters, that one.
        """
        if not self.placement.segments:
            return self.optim
        rows: dict[nn.Parameter, nn.Parameter] = {}
        state: defaultdict[torch.Tensor, StateDict] = defaultdict(dict)
        for segment in self.placement.segments:
            for p, values in segment.split_own(segment.own.detach()).items():
                rows[p] = nn.Parameter(values)
            for p, of_rows in split_state(segment, self.optim.state.get(segment.own, {})).items():
                state[rows[p]] = of_rows
        shown = copy.copy(self.optim)
        shown.state = state
        shown.param_groups = [
            {**g, "params": [rows[p] if p in rows else self._frozen_rows(p) for p in g["params"]]}
            for g in self.param_groups
        ]
        return shown

    def _frozen_rows(self, param: nn.Parameter) -> nn.Parameter:
        rows = rows_of(param.detach().to(self._update_dtype or param.dtype), self.rank, self.world_size)
        return nn.Parameter(rows, requires_grad=False)

    @property
    def sharding_groups(self) -> Groups:
        """Returns them as they were passed; by default one of all ranks."""
        return self._sharding_groups or [list(range(self.global_world_size))]

    @sharding_groups.setter
    def sharding_groups(self, groups: Groups) -> None:
        if self.inited:
            raise LifecycleError("the optimizer is sharded already; set sharding_groups before init_zero()")
        self._sharding_groups = groups

    global_rank = property(lambda _: rank_and_world_size()[0])
    global_world_size = property(lambda _: rank_and_world_size()[1])
    local_rank = property(attrgetter("rank"))
    local_world_size = property(attrgetter("world_size"))

    # ------------------------------------------------------------ steps
    @torch.no_grad()
    def add_gradient(self, param: nn.Parameter) -> None:
        """Takes the gradient that a parameter shows into its sum."""
        if param.grad is None:
            return
        gradient = param.grad.to(self._sum_dtype or param.dtype, copy=True)
        self._sums[param] = self._sums[param] + gradient if param in self._sums else gradient
        param.grad = None

    def remove_hooks(self) -> None:
        """Lets gradients stay where autograd puts them, from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as torch does, and sums of gradients too."""
        if self.inited:
            super().zero_grad(set_to_none)
            self._sums = {}
        else:
            Optimizer.zero_grad(self, set_to_none)

    def step(self, closure: Callable[[], T] | None = None, **kwargs: Tree) -> T | None:  # type: ignore[override]
        """Averages the gradients over ranks, clips them, updates this rank's part and publishes it.

        Args:
            closure: computes the loss and the gradients first.
            **kwargs: passed to the inner optimizer's ``step``.

        Raises:
            LifecycleError: before :meth:`init_zero`.
            ConfigurationError: a ``sharding_scheme``, which would reduce in several steps.
        """
        self._check_inited()
        if "sharding_scheme" in kwargs:
            raise ConfigurationError(
                "sharding_scheme is not supported: gradients are averaged within sharding_groups, in one step"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.refresh_trainable()
        local = {p: p.grad for p in self._parameters()}
        try:
            self._reduce()
            if self.grad_clipping:
                self.grad_norm = self.clip_grad_norm(self.max_norm, also_over=self._also_over)
            super().step(**kwargs)
        finally:
            for segment in self.placement.segments:
                segment.notice_clearing()  # no parameter shows a gradient on behalf of the others
                segment.clear_gradient()
            for p, gradient in local.items():
                p.grad = gradient
        return loss

    def _reduce(self) -> None:
        if segments := self.placement.segments:
            channel = self._group.channel("gradients")
            for segment in segments:
                segment.reduce_gradients(channel, self._wire, self._sums if self._hooks else None)
            return
        params = [p for p in self._parameters() if p.requires_grad]
        for p in params:
            if p in self._sums:
                p.grad = self._sums[p].to(p.dtype)
            # else the mean is a new tensor; it may be clipped
            if self.world_size == 1 and p.grad is not None:
                p.grad = p.grad.clone()
        average_gradients(params, self._group.channel("gradients"))

    def _check_inited(self) -> None:
        if not self.inited:
            raise LifecycleError("lazy_init=True leaves sharding to init_zero(); call it first, on all ranks")

    # ------------------------------------------------------------ state
    def get_shape_info(self) -> dict[int, torch.Size]:
        """Returns shapes of all parameters, by their index in state dicts."""
        return {i: p.shape for i, p in enumerate(p for g in self.param_groups for p in g["params"])}

    def state_dict(self) -> StateDict:  # type: ignore[override]
        """Returns this rank's rows of all state, in torch_xla's format, on the CPU.

        Collective if the optimizer gets whole parameters.
        """
        self._check_inited()
        shown, shapes = self.base_optimizer, list(self.get_shape_info().values())
        if shown is self.optim:
            whole = self.whole_state_dict()
            base = {
                i: {
                    k: rows_of(v, self.rank, self.world_size) if is_elementwise(k, v, shapes[i]) else v
                    for k, v in state.items()
                }
                for i, state in whole["state"].items()
            }
            found = as_rows(base, whole["param_groups"], shapes, self._group)
            masters = [self._frozen_rows(p) for p in self._parameters()]
        else:
            mine = shown.state_dict()
            found = as_rows(to_cpu(mine["state"]), mine["param_groups"], shapes, self._group)
            masters = [p for g in shown.param_groups for p in g["params"]]
        if self.save_master_weights:
            found["sharded_master_weights"] = dict(enumerate(to_cpu(masters)))
        return found

    def whole_state_dict(self) -> StateDict:
        """Returns the whole optimizer's state (collective); it loads at any world size, and into a plain one."""
        self._check_inited()
        return super().state_dict(all_ranks=True)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads what either method gives, or torch_xla's optimizer of this rank has given (collective).

        Goes on from the parameters' values, or from the saved ones in ``optimizer_dtype`` if there are any.

        Raises:
            ConfigurationError: on all ranks; another rank's, of another number of ranks, or of other parameters.
        """
        self.init_zero()
        shapes = list(self.get_shape_info().values())
        masters: dict[int, torch.Tensor] = {}
        if "base_state" in state_dict:
            state_dict, masters = whole_of(state_dict, shapes, self._group)
        super().load_state_dict(state_dict)
        wide = {p: masters[i].to(p.device) for i, p in enumerate(self._parameters()) if i in masters}
        with torch.no_grad():
            for p, value in wide.items():
                p.copy_(value)
            for segment in self.placement.segments:
                values = [wide.get(p, p.detach()) for p in segment.params]
                segment.own.copy_(segment.take_own(values, segment.own))
        if self.placement.segments:
            current_backend().mark_step()


# The optimizer that adds up gradients of a parameter: the last one that was made for it.
_adding: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _add(optimizer: weakref.ref[ZeroRedundancyOptimizer], param: torch.Tensor) -> None:
    found = optimizer()
    if found is not None and isinstance(param, nn.Parameter) and _adding.get(param) == optimizer:
        found.add_gradient(param)
