"""AdaScale: learning rates for large batches from how much gradients differ (Johnson et al., arXiv 2007.05105).

A batch S times as large makes a step's gradient less noisy, up to S times. AdaScale measures how much less and
multiplies the learning rate of the step by that gain, between 1 and S; a schedule made for the small batch then
counts :meth:`AdaScale.gain` steps for each step. Names and behaviour follow fairscale's AdaScale.

Legend: G param groups of an optimizer; c backwards a step; N ranks; P elements of all parameters.

[Note: noise] With g_i the gradient of one backward on one rank and ḡ their mean over all cN, a step measures Σ|g_i|²
and |ḡ|². From these follow the variance of a gradient and the squared norm of the true one (appendix B.3). Moving
averages of both are in the wrapped optimizer's state.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend, Group, backend_for
from ..checks import check_same_everywhere
from ..errors import ConfigurationError, LifecycleError
from ..fsdp.originals import refuse_split
from ..optimizers.shards import listing_of, lists_stand_ins, shard_behind
from ..oss.optimizer import OSS
from ..reduction.ordered import refuse_other
from ..reduction.shard_gradients import dense, norm_like
from ..torch_seams.hooks import (
    NO_BACKWARD,
    GradientHook,
    GradientHooks,
    after_backward,
    current_backward,
    inside_another_backward,
)
from ..types import Args, Kwargs, ParamGroup, ProcessGroup, StateDict, Tree

__all__ = ["AdaScale"]


class AdaScaleArgumentError(ConfigurationError):
    """An argument of AdaScale can't work."""


class GradientOrderError(LifecycleError):
    """A call, or a gradient, came in the middle of something."""


State = dict[str, torch.Tensor]

SQUARE, VARIANCE = "grad_sqr_avg", "grad_var_avg"
KEY = "adascale"  # in the optimizer's state


def initial_state(groups: int) -> State:
    """Averages before the first step: every gain is 1."""
    return {
        SQUARE: torch.ones(groups, dtype=torch.float64, device="cpu"),
        VARIANCE: torch.zeros(groups, dtype=torch.float64, device="cpu"),
    }


def update_average(state: State, name: str, value: torch.Tensor, smoothing: float, debias: bool) -> None:
    """Takes a step's estimate [G] into the moving average ``state[name]``.

    Args:
        smoothing: weight of the past.
        debias: divide by the sum of the weights; else the mean of all steps while these are fewer than
            1 / (1 - smoothing), after that the plain moving average (appendix B.3).
    """
    zeros = torch.zeros_like(value)
    if debias:
        biased = smoothing * state.get(f"{name}_biased", zeros) + (1.0 - smoothing) * value
        weights = smoothing * state.get(f"{name}_unbias", zeros) + (1.0 - smoothing)
        state.update({f"{name}_biased": biased, f"{name}_unbias": weights, name: biased / weights})
        return
    # one count for all groups where none was added later: that is the format fairscale knows
    count = state.get(f"{name}_count", zeros[:1]) + 1
    is_early = count * (1.0 - smoothing) < 1.0
    total = state.get(f"{name}_total", zeros) + torch.where(is_early, value, zeros)
    later = smoothing * state[name] + (1.0 - smoothing) * value
    state.update({f"{name}_count": count, name: torch.where(is_early, total / count, later)})
    if bool(is_early.any()):
        state[f"{name}_total"] = total


def loaded(data: StateDict, groups: int) -> State:
    """Makes own copies of the averages in an optimizer's state dict; new ones where it has none.

    Args:
        data: of this class (tensors), of fairscale's (numpy arrays), or of an optimizer without AdaScale.
    """
    if (saved := data["state"].get(KEY)) is None:
        return initial_state(groups)
    averages: State = {k: torch.DoubleTensor([float(x) for x in v]) for k, v in saved.items()}
    found = averages[SQUARE].numel()
    if found != groups:
        raise ConfigurationError(
            f"the state dict has AdaScale's averages of {found} param groups, this optimizer has {groups}; "
            "build it with the same groups first"
        )
    for name, values in averages.items():
        if values.numel() != groups and not (name.endswith("_count") and values.numel() == 1):
            raise ConfigurationError(
                f"AdaScale's {name!r} has {values.numel()} values, expected one for each of {groups} groups; the "
                " state dict was damaged, or put together by hand"
            )
    return averages


def sum_of_squares(norms: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Returns Σn² as a 0-dim tensor with the dtype and device of ``like``; 0 where there are none."""
    return torch.stack([n.to(like) for n in norms]).square().sum() if norms else torch.zeros_like(like)


class GradientMeter:
    """Sums the squared norms of the gradients that backwards deliver, before anything reduces them.

    Args:
        expected: number of backwards in a step.
        like: 0-dim; device and dtype of the sums.
        on_backward: called when a backward is through, reductions included.

    [Note: nested backwards] Re-entrant checkpoints run backwards inside of a backward. They add to the one around them,
    which is known by the gradients that it delivers itself. Where all parameters are inside of checkpoints there are
    none: then nothing is called, and :attr:`backwards` is the number of gradients of a parameter.

    ``torch.autograd.grad`` runs the hooks of tensors too, but delivers nothing: only what is accumulated is counted.
    """

    def __init__(self, expected: int, like: torch.Tensor, on_backward: Callable[[], None]) -> None:
        self.expected = expected
        self.like = like
        self._on_backward = on_backward
        self.hooks = GradientHooks()
        self._arriving: dict[int, torch.Tensor] = {}  # norms of gradients that are not accumulated yet
        self._task = self._nested_task = NO_BACKWARD
        self.reset()

    def reset(self) -> None:
        self._ended = 0
        self._fired: Counter[int] = Counter()
        self._norms: list[tuple[int, torch.Tensor]] = []  # of the running backward: group, norm
        self._sums: torch.Tensor | None = None
        self._task = NO_BACKWARD

    def attach(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Listens to the parameters of these groups, [G], and to no others."""
        self.hooks.remove()
        self.groups = len(groups)
        params = [(g, p) for g, group in enumerate(groups) for p in group]
        for index, (group, param) in enumerate(params):
            trainable = param.requires_grad
            param.requires_grad_(True)  # hooks on frozen ones are for when they are not
            self.hooks.attach(param, self._before(index), self._after(index, group))
            param.requires_grad_(trainable)

    # ------------------------------------------------------------ facts
    @property
    def backwards(self) -> int:
        """Backwards of this step so far."""
        return max(self._ended, *self._fired.values(), 0)

    @property
    def has_begun(self) -> bool:
        """Says whether there were gradients since the last step."""
        return bool(self._fired)

    @property
    def is_running(self) -> bool:
        """Says whether a backward has begun and its end was not seen."""
        return self._task != NO_BACKWARD or current_backward() != NO_BACKWARD

    @property
    def was_interrupted(self) -> bool:
        return self._task != NO_BACKWARD and current_backward() == NO_BACKWARD

    def sums(self) -> torch.Tensor:
        """Returns Σ|g_i|² of this rank by group, [G]."""
        if self._norms or self._sums is None:
            by_group = [[n for g, n in self._norms if g == group] for group in range(self.groups)]
            summed = torch.stack([sum_of_squares(norms, self.like) for norms in by_group])
            self._sums = summed if self._sums is None else self._sums + summed
            self._norms.clear()
        return self._sums

    # ------------------------------------------------------------ hooks
    def _before(self, index: int) -> GradientHook:
        arriving, dtype = self._arriving, self.like.dtype

        def before(grad: torch.Tensor) -> None:
            values = dense([grad])[0].detach()
            arriving[index] = torch.linalg.vector_norm(values, 2.0, dtype=dtype)

        return before

    def _after(self, index: int, group: int) -> GradientHook:
        def after(_: nn.Parameter) -> None:
            if (norm := self._arriving.pop(index, None)) is None:
                return
            if current_backward() not in (self._task, self._nested_task):
                self._begin()
            self._fired[index] += 1
            if self._fired[index] > (self.expected if self._task == NO_BACKWARD else self._ended + 1):
                raise GradientOrderError(
                    "a parameter received more gradients than there are backwards in a step "
                    f"(num_gradients_to_accumulate={self.expected}): either step() was not called after that many, or "
                    "the parameter is used in several re-entrant checkpoints; in place of these, or of "
                    "checkpoint_wrapper, take torch's checkpoint(..., use_reentrant=False)"
                )
            self._norms.append((group, norm))

        return after  # type: ignore[return-value]

    def _begin(self) -> None:
        if inside_another_backward():
            self._nested_task = current_backward()
            return
        if self._task != NO_BACKWARD:  # the last one raised; whoever goes on has cleared the gradients
            self.reset()
        self._task = current_backward()
        # DDP and ShardedDDP finish in callbacks that they queue in backward, which may be later than this one
        after_backward(lambda: after_backward(self._end))

    def _end(self) -> None:
        self._task = NO_BACKWARD
        self._ended += 1
        with torch.no_grad():
            self.sums()
            self._on_backward()


# ------------------------------------------------------------------------------------------ estimates
def estimate(
    local: torch.Tensor, total: torch.Tensor, count: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimates squared norm of the true gradient and variance of one at scale 1, each [G] (of one step: noisy).

    Args:
        local: Σ|g_i|² over ``count`` = cN gradients.
        total: |ḡ|².
        scale: size of the whole batch relative to that of scale 1.
    """
    variance = (local / count - total) * (scale / (count - 1))
    square = (total - variance / scale).clamp(min=0.0)
    return square, variance.clamp(min=1e-6)


class Averaging:
    """Over which ranks an optimizer's gradients are averaged.

    Args:
        optimizer: whose gradients.
        world_size: number of ranks; None for the group's, 1 without one.
        group: ranks; None for those of an OSS, else all.
        backend: as :class:`~shardkit.AdaScale`.
    """

    def __init__(
        self, optimizer: Optimizer, world_size: int | None, group: ProcessGroup, backend: str | Backend | None
    ) -> None:
        self._optimizer, self._given, self._backend = optimizer, group, backend
        self.note_parameters()
        ranks = self._find_group()
        if world_size is None:
            world_size = 1 if ranks is None else ranks.world_size
        elif world_size > 1 and ranks is not None and ranks.world_size != world_size:
            raise AdaScaleArgumentError(
                f"world_size is {world_size}, but gradients would be compared over a group of {ranks.world_size} "
                "ranks; pass the group that averages them: shardkit.AdaScale(optimizer, group=...)"
            )
        self.world_size = world_size

    def parameters(self) -> list[nn.Parameter]:
        return [p for g in self._optimizer.param_groups for p in g["params"]]

    def note_parameters(self) -> None:
        """Notes a change of the groups; whether they are the same on all ranks is compared before the next sum."""
        self._compared = False
        for listing in filter(None, map(listing_of, self.parameters())):
            refuse_split(listing.originals, "AdaScale", "Choose the learning rate by hand")
            refuse_other(listing.flat.reduce, "AdaScale, which compares ranks' gradients")
        self._flats = {p: flat for p in self.parameters() if (flat := shard_behind(p)) is not None}
        if any(not flat.group.backend.has_storage for flat in self._flats.values()):
            raise ConfigurationError(
                "AdaScale needs the gradients that each rank computes, and FSDP's parameters have none of their own "
                "where a compiler decides on memory. Use OSS with ShardedDDP there"
            )

    def measured(self) -> list[list[nn.Parameter]]:
        """Lists parameters that get this rank's own gradients, by group: for FSDP's shards those that lie in them."""
        return [[m for p in g["params"] for m in self._behind(p)] for g in self._optimizer.param_groups]

    def _behind(self, param: nn.Parameter) -> list[nn.Parameter]:
        flat = self._flats.get(param)
        return [param] if flat is None else [original.param for original in flat.originals]

    def _find_group(self) -> Group | None:
        if isinstance(self._optimizer, OSS) and self._given is None:
            return self._optimizer._group
        try:
            group = backend_for(self.parameters(), self._backend).group(self._given)
            sizes = {flat.group.world_size for flat in self._flats.values()}
            if self._given is None and sizes - {group.world_size}:
                raise AdaScaleArgumentError(
                    f"parameters are sharded over {min(sizes)} of {group.world_size} ranks; say which ranks average "
                    "their gradients, replicas included: shardkit.AdaScale(optimizer, group=...)"
                )
            return group
        except ConfigurationError:
            if self._given is not None or (dist.is_available() and dist.is_initialized()):
                raise
            return None

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up small tensors in place (collective, unless there is one rank)."""
        if self.world_size == 1:
            return values
        if (group := self._find_group()) is None:
            raise ConfigurationError(
                f"world_size is {self.world_size}, but there is no process group; call "
                "torch.distributed.init_process_group(...) before backward"
            )
        if not self._compared:
            facts = [
                (f"parameter {i} of group {g}", ([tuple(m.shape) for m in self._behind(p)], str(p.dtype)))
                for g, options in enumerate(self._optimizer.param_groups)
                for i, p in enumerate(options["params"])
            ]
            check_same_everywhere(group, facts, "AdaScale's parameters (put AdaScale around OSS, not inside)")
            self._compared = True
        group.channel("control").all_reduce(values, label="AdaScale: squared norms")
        return values

    def share_of_total(self, like: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of |ḡ|², by group [G], with the dtype and device of ``like``."""
        inner, copies = self._optimizer, self.world_size
        if isinstance(inner, OSS):
            inner.gradients()  # where these are parts of a flat segment, they are in their place from now on
            copies = copies if inner.placement.runs_whole else 1  # each gradient counts at its owner
            inner = inner.optim
        return torch.stack([self._squares(group["params"], like) for group in inner.param_groups]) / copies

    def _squares(self, params: Sequence[nn.Parameter], like: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of Σ|p.grad|² times the number of ranks, where each has all of it or a shard."""
        cut: dict[int, list[torch.Tensor]] = {}
        for p in params:
            if p.grad is not None:
                cut.setdefault(self._flats[p].group.world_size if p in self._flats else 1, []).append(p.grad)
        total = torch.zeros_like(like)
        for ranks, gradients in cut.items():
            total += ranks * sum_of_squares(torch._foreach_norm(dense(gradients), 2.0, like.dtype), like)
        return total

    def flat_gradient(self, like: torch.Tensor) -> torch.Tensor:
        """Returns all gradients in one tensor [P] with the dtype and device of ``like``; zeros where there is none."""
        flat = [
            (torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad)
            .reshape(-1)
            .to(like)
            for p in self.parameters()
        ]
        return torch.cat(flat)

    def correlation(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the mean correlation of the gradients that pairs of ranks hold now, 0-dim (collective)."""
        group = self._find_group()
        if group is None or self.world_size == 1:
            raise ConfigurationError("a correlation of ranks' gradients needs several ranks")
        own = self.flat_gradient(like)
        everybody = own.new_empty(self.world_size, own.numel())
        group.channel("control").all_gather_into(everybody.view(-1), own, label="AdaScale: correlation")
        correlation = torch.corrcoef(everybody)  # [N, N]
        above = torch.ones_like(correlation, dtype=torch.bool).triu(1)
        return correlation[above].mean()


class AdaScale(Optimizer):
    """Wraps an optimizer so that each step's learning rate is multiplied by the gain of that step's batch.

    ::

        optimizer = AdaScale(SGD(model.parameters(), lr=0.1))
        model = DistributedDataParallel(model)
        while step < steps_at_scale_1:
            loss(model, batch).backward()
            step += optimizer.gain()
            optimizer.step()
            optimizer.zero_grad()

    Gradients may be averaged over ranks by DistributedDataParallel, by :class:`~shardkit.ShardedDDP` with an
    :class:`~shardkit.OSS` inside of AdaScale, by FSDP or fully_shard, or by hand before :meth:`gain` and :meth:`step`
    in a hook of backward. Every ``num_gradients_to_accumulate`` backwards the estimates are updated, at the end of the
    last one: a small all-reduce. Gradients are cleared before the next backward, by whatever way. A step whose
    gradients are not finite leaves the estimates alone.

    Args:
        optimizer: any optimizer, OSS included.
        world_size: ranks whose gradients are averaged; default: of the group, 1 without one. 1 never communicates.
        scale: size of the whole batch relative to the one that the learning rate was made for; default: ``world_size
            * num_gradients_to_accumulate``.
        smoothing: weight of the past in moving averages, at least 0 and below 1; default ``max(1 - world_size *
            num_gradients_to_accumulate / 1000, 0)``.
        num_gradients_to_accumulate: backwards in a step.
        is_scaled_loss: each loss is divided by that number; otherwise call :meth:`scale_grad_by_num_grads_to_accum`.
        debias_ewma: see :func:`~shardkit.training.adascale.update_average`.
        group: ranks whose gradients are averaged, with FSDP's replicas; default: those of an OSS, else all.
        backend: name or instance of the backend; by default that of the parameters' device.

    Raises:
        ConfigurationError: a step would have one gradient only, so that nothing can differ; the group has another
            number of ranks; the parameters are FSDP's on XLA, or sharded over a part of the ranks without ``group``.
        GradientOrderError: by its methods, but :meth:`gain`, where some of a step's backwards are missing.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        *,
        group: ProcessGroup = None,
        backend: str | Backend | None = None,
    ) -> None:
        # Optimizer's own constructor is not called: its parts are the wrapped optimizer's
        if not hasattr(optimizer, "param_groups"):
            raise ConfigurationError(f"AdaScale takes an optimizer, and got a {type(optimizer).__name__}")
        if lists_stand_ins(optimizer):
            raise ConfigurationError(
                f"AdaScale measures the gradients of parameters, and {type(optimizer).__name__} lists what stands for "
                "them. Take an optimizer that updates every element by itself, over FSDP's parameters(); or OSS with "
                "ShardedDDP, which any optimizer can use"
            )
        self._optimizer = optimizer
        self._averaging = Averaging(optimizer, world_size, group, backend)
        self._is_scaled_loss, self._debias_ewma = is_scaled_loss, debias_ewma
        ends = weakref.WeakMethod(self._end_of_backward)  # parameters must not keep this object
        like = norm_like(self._averaging.parameters())
        self._meter = GradientMeter(1, like, lambda: (alive := ends()) and alive())
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            if not 0.0 <= smoothing < 1.0:
                raise AdaScaleArgumentError(f"smoothing is {smoothing}; it has to be at least 0 and below 1")
            self._smoothing = float(smoothing)
        self._scale = 1.0
        self.set_scale(self._count if scale is None else scale, update_estimate=False)
        self._meter.attach(self._averaging.measured())
        weakref.finalize(self, self._meter.hooks.remove).atexit = False
        measuring.add(self)

    # ---------------------------------------------------------------- facts
    @property
    def optimizer(self) -> Optimizer:
        """Returns the wrapped optimizer."""
        return self._optimizer

    @property
    def param_groups(self) -> list[ParamGroup]:  # type: ignore[override]
        """Returns the wrapped optimizer's; schedulers change them here."""
        return self._optimizer.param_groups

    @property
    def scale(self) -> float:
        """Returns the size of the whole batch relative to the one at scale 1. Not the gain."""
        return self._scale

    @property
    def smoothing(self) -> float:
        """Returns the weight of the past in moving averages."""
        return self._smoothing

    @property
    def _count(self) -> int:
        return self._averaging.world_size * self._meter.expected

    @property
    def _averages(self) -> State:
        """Returns the moving averages; they live in the wrapped optimizer's state, and so in its state dict."""
        state: Tree = self._optimizer.state
        if SQUARE not in state.get(KEY, {}):  # new, or loaded from an optimizer without AdaScale
            state[KEY] = initial_state(len(self.param_groups))
        return state[KEY]

    def gain(self, pg_idx: int | None = None) -> float:
        """Tells by how much the learning rate of a step is multiplied, between 1 and :attr:`scale`.

        Args:
            pg_idx: of this param group; None: of all together.
        """
        self._settle()
        chosen = slice(None) if pg_idx is None else pg_idx
        averages = self._averages
        square, variance = (float(averages[name][chosen].sum()) for name in (SQUARE, VARIANCE))
        if square + variance == 0.0:
            return 1.0
        return (variance + square) / (variance / self._scale + square)

    # ---------------------------------------------------------------- measuring
    def _end_of_backward(self) -> None:
        if self._meter.backwards >= self._meter.expected:
            self._measure()

    def _settle(self) -> None:
        """Measures a step whose backwards gave no sign of their end, see [Note: nested backwards]."""
        if self._meter.has_begun and not self._meter.is_running:
            self._end_of_backward()

    @torch.no_grad()
    def _measure(self) -> None:
        local = self._meter.sums()
        self._meter.reset()
        own = torch.cat([local, self._averaging.share_of_total(self._meter.like)])
        summed = self._averaging.sum_over_ranks(own).cpu().double()
        if not bool(torch.isfinite(summed).all()):
            return
        local, total = summed.chunk(2)
        if self._is_scaled_loss:
            local = local * self._meter.expected**2
        else:
            total = total / self._meter.expected**2
        square, variance = estimate(local, total, self._count, self._scale)
        averages = self._averages
        update_average(averages, SQUARE, square, self._smoothing, self._debias_ewma)
        update_average(averages, VARIANCE, variance, self._smoothing, self._debias_ewma)

    @torch.no_grad()
    def gradient_correlation(self) -> torch.Tensor:
        """Returns the mean correlation of gradients that pairs of ranks hold now (0-dim): before they are averaged.

        All ranks call it. Parameters without a gradient count as zeros.

        Raises:
            ConfigurationError: there is one rank only.
        """
        return self._averaging.correlation(self._meter.like)

    # ---------------------------------------------------------------- stepping
    def step(self, *args: Any, **kwargs: Any) -> Tree:
        """Steps the wrapped optimizer with each group's learning rate multiplied by its gain.

        Arguments are those of the wrapped optimizer's ``step``. A closure's first evaluation comes before the gain is
        known, and so before the step begins.
        """
        args, kwargs = _evaluated_closure(args, kwargs)
        self._refuse_amid_step("step()")
        before = [group["lr"] for group in self.param_groups]
        gains = [self.gain(i) for i in range(len(before))]
        try:
            for group, lr, gain in zip(self.param_groups, before, gains, strict=True):
                group["lr"] = lr * gain
            return self._optimizer.step(*args, **kwargs)
        finally:
            for group, lr in zip(self.param_groups, before, strict=True):
                group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients as the wrapped optimizer does; after a backward that raised, the step starts over."""
        self._settle()
        if self._meter.was_interrupted:
            self._meter.reset()
        self._refuse_amid_step("zero_grad()")
        self._optimizer.zero_grad(set_to_none)

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divides gradients of losses that were not divided; call it after the last backward of a step.

        Raises:
            AdaScaleArgumentError: there is nothing to divide by.
        """
        self._refuse_amid_step("scale_grad_by_num_grads_to_accum()")
        if self._is_scaled_loss or self._meter.expected == 1:
            raise AdaScaleArgumentError(
                f"gradients need no division with is_scaled_loss={self._is_scaled_loss} and "
                f"num_gradients_to_accumulate={self._meter.expected}; it is for losses that were not divided"
            )
        gradients = {id(p.grad): p.grad for p in self._averaging.parameters() if p.grad is not None}
        if isinstance(self._optimizer, OSS):
            gradients |= {id(g): g for g in self._optimizer.gradients()}
        for gradient in gradients.values():
            gradient.div_(self._meter.expected)

    def _refuse_amid_step(self, call: str) -> None:
        """Raises GradientOrderError if some of the step's backwards are missing."""
        self._settle()
        if self._meter.has_begun:
            what = "the last backward raised an exception, so gradients are incomplete; call zero_grad()"
            if not self._meter.was_interrupted:
                what = (
                    f"{self._meter.backwards} of num_gradients_to_accumulate={self._meter.expected} backwards of this "
                    "step are done; do the others first"
                )
            raise GradientOrderError(f"{call} came in the middle of a step: {what}")

    # ---------------------------------------------------------------- options
    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Takes note of another batch size.

        Args:
            scale: size of the whole batch relative to the one at scale 1.
            update_estimate: rescale the variance measured so far, whose unit is a batch at scale 1.

        Raises:
            AdaScaleArgumentError: below 1.
        """
        self._refuse_amid_step("set_scale()")
        if not scale >= 1:
            raise AdaScaleArgumentError(f"scale is {scale}; it has to be at least 1")
        if update_estimate:
            averages = self._averages
            for name in (VARIANCE, f"{VARIANCE}_biased", f"{VARIANCE}_total"):  # what the average is made of
                if name in averages:
                    averages[name] = averages[name] * (self._scale / scale)
        self._scale = scale

    def set_num_gradients_to_accumulate(
        self, num_gradients_to_accumulate: int, update_smoothing: bool = True
    ) -> None:
        """Changes the number of backwards in a step; mostly :meth:`set_scale` has to follow.

        Args:
            num_gradients_to_accumulate: at least 1.
            update_smoothing: set the default smoothing for that number.

        Raises:
            AdaScaleArgumentError: a step would have one gradient only.
        """
        self._refuse_amid_step("set_num_gradients_to_accumulate()")
        world_size = self._averaging.world_size
        count = num_gradients_to_accumulate * world_size
        if num_gradients_to_accumulate < 1 or count < 2:
            raise AdaScaleArgumentError(
                f"world_size={world_size} and num_gradients_to_accumulate={num_gradients_to_accumulate}: "
                "AdaScale compares the gradients of a step and needs two at least. AdaScale does not support a "
                "single worker without grad accumulation."
            )
        self._meter.expected = num_gradients_to_accumulate
        if update_smoothing:
            self._smoothing = max(1.0 - count / 1000, 0.0)

    def add_param_group(self, pg: ParamGroup) -> None:
        """Adds a param group; its averages start with its first step."""
        self._refuse_amid_step("add_param_group()")
        averages, before = self._averages, len(self.param_groups)
        self._optimizer.add_param_group(pg)
        measured, count = averages[SQUARE].numel(), len(self.param_groups) - before
        for name, values in list(averages.items()):
            if name.endswith("_count") and values.numel() == 1:
                values = values.expand(measured)  # until now all groups had the same
            averages[name] = torch.cat([values, values.new_full((count,), float(name == SQUARE))])
        self._averaging.note_parameters()
        self._meter.attach(self._averaging.measured())

    def unhook(self) -> None:
        """Stops listening to gradients; from then on the gain stays what it is."""
        self._meter.hooks.remove()
        measuring.discard(self)

    # ---------------------------------------------------------------- state
    def state_dict(self) -> StateDict:  # type: ignore[override]
        """Returns the wrapped optimizer's, with ``state["adascale"]``: name -> fp64 tensor [G]."""
        self._refuse_amid_step("state_dict()")
        averages = {name: values.clone() for name, values in self._averages.items()}
        found = self._optimizer.state_dict()
        return {**found, "state": {**found["state"], KEY: averages}}

    def load_state_dict(self, data: StateDict) -> None:  # type: ignore[override]
        """Loads a state dict of this class, of fairscale's, or of the plain optimizer (then averages start anew).

        Raises:
            ConfigurationError: its averages are of another number of groups.
        """
        self._refuse_amid_step("load_state_dict()")
        averages = loaded(data, len(self.param_groups))
        rest = {k: v for k, v in data["state"].items() if k != KEY}
        self._optimizer.load_state_dict({**data, "state": rest})
        state: Tree = self._optimizer.state
        state[KEY] = averages

    def __getstate__(self) -> StateDict:
        raise ConfigurationError(
            "AdaScale can't be pickled or copied: it listens to the gradients of its parameters. Save state_dict(), "
            "and build another one over the copy's parameters"
        )

    def __getattr__(self, name: str) -> Tree:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"


def _evaluated_closure(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments of ``step``; a closure among them is evaluated, and gives that value at its first call."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        values = [closure()]

    def again() -> Tree:
        return values.pop() if values else closure()

    return (again, *args[1:]) if args else args, kwargs if args else {**kwargs, "closure": again}


measuring: weakref.WeakSet[AdaScale] = weakref.WeakSet()  # what measures gradients in this process
