"""AdaScale: learning rates for large batches from how much gradients differ (Johnson et al., arXiv 2007.05105).

A batch S times as large makes a step's gradient less noisy, up to S times. AdaScale measures how much less and
multiplies the learning rate of the step by that gain, between 1 and S; a schedule made for the small batch then
counts :meth:`AdaScale.gain` steps for each step. Names and behaviour follow fairscale's AdaScale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend
from ..errors import ConfigurationError
from ..optimizers.shards import lists_stand_ins
from ..reduction.norms import norm_like
from ..types import Args, Kwargs, ParamGroup, ProcessGroup, StateDict, Tree
from .averaging import Averaging
from .errors import AdaScaleArgumentError, GradientOrderError
from .gradient_noise import GradientMeter, estimate
from .moving_averages import (
    KEY,
    SQUARE,
    VARIANCE,
    State,
    add_groups,
    initial_state,
    loaded,
    rescale_variance,
    update_average,
)


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
        debias_ewma: see :func:`~shardkit.adascale.moving_averages.update_average`.
        group: ranks whose gradients are averaged, with FSDP's replicas; default: those of an OSS, else all.
        backend: name or instance of the backend; by default that of the parameters' device.

    Raises:
        ConfigurationError: a step would have one gradient only, so that nothing can differ; the group has another
            number of ranks; the parameters are FSDP's on XLA, or sharded over a part of the ranks without ``group``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        group: ProcessGroup = None,
        backend: str | Backend | None = None,
    ) -> None:
        # Optimizer's own constructor is not called: its parts are the wrapped optimizer's
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
        self._meter = GradientMeter(1, like, lambda: _call(ends))
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            if not 0.0 <= smoothing < 1.0:
                raise AdaScaleArgumentError(f"smoothing is {smoothing}; it has to be at least 0 and below 1")
            self._smoothing = float(smoothing)
        self._scale = 1.0
        self.set_scale(self._count if scale is None else scale, update_estimate=False)
        self._meter.attach(self._averaging.measured())
        weakref.finalize(self, self._meter.hooks.remove).atexit = False
        _measuring.add(self)

    # ---------------------------------------------------------------- facts
    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer."""
        return self._optimizer

    @property
    def param_groups(self) -> list[ParamGroup]:  # type: ignore[override]
        """The wrapped optimizer's; schedulers change them here."""
        return self._optimizer.param_groups

    @property
    def scale(self) -> float:
        """Size of the whole batch relative to the one at scale 1. Not the gain."""
        return self._scale

    @property
    def smoothing(self) -> float:
        """Weight of the past in moving averages."""
        return self._smoothing

    @property
    def _count(self) -> int:
        """Gradients in a step."""
        return self._averaging.world_size * self._meter.expected

    @property
    def _averages(self) -> State:
        """The moving averages; they live in the wrapped optimizer's state, and so in its state dict."""
        state: Tree = self._optimizer.state
        if SQUARE not in state.get(KEY, {}):  # new, or loaded from an optimizer without AdaScale
            state[KEY] = initial_state(len(self.param_groups))
        return state[KEY]

    def gain(self, pg_idx: int | None = None) -> float:
        """By how much the learning rate of a step is multiplied, between 1 and :attr:`scale`.

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
        """Mean correlation of the gradients that pairs of ranks hold now (0-dim); call it before they are averaged.

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

        Raises:
            GradientOrderError: some of the step's backwards are missing.
        """
        args, kwargs = _evaluated_closure(args, kwargs)
        self._settle()
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
        """As the wrapped optimizer's; after a backward that raised, the step starts over.

        Raises:
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
        if self._meter.was_interrupted:
            self._meter.reset()
        self._refuse_amid_step("zero_grad()")
        self._optimizer.zero_grad(set_to_none)

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divides gradients of losses that were not divided; call it after the last backward of a step.

        Raises:
            GradientOrderError: some of the step's backwards are missing.
            AdaScaleArgumentError: there is nothing to divide by.
        """
        self._settle()
        self._refuse_amid_step("scale_grad_by_num_grads_to_accum()")
        if self._is_scaled_loss or self._meter.expected == 1:
            raise AdaScaleArgumentError(
                f"gradients need no division with is_scaled_loss={self._is_scaled_loss} and "
                f"num_gradients_to_accumulate={self._meter.expected}; it is for losses that were not divided"
            )
        self._averaging.divide_gradients(self._meter.expected)

    def _refuse_amid_step(self, call: str) -> None:
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
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
        self._refuse_amid_step("set_scale()")
        if not scale >= 1:
            raise AdaScaleArgumentError(f"scale is {scale}; it has to be at least 1")
        if update_estimate:
            rescale_variance(self._averages, self._scale / scale)
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
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
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
        """Adds a param group; its averages start with its first step.

        Raises:
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
        self._refuse_amid_step("add_param_group()")
        averages, before = self._averages, len(self.param_groups)
        self._optimizer.add_param_group(pg)
        add_groups(averages, len(self.param_groups) - before)
        self._averaging.note_parameters()
        self._meter.attach(self._averaging.measured())

    def unhook(self) -> None:
        """Stops listening to gradients; from then on the gain stays what it is."""
        self._meter.hooks.remove()
        _measuring.discard(self)

    # ---------------------------------------------------------------- state
    def state_dict(self) -> StateDict:  # type: ignore[override]
        """The wrapped optimizer's, with ``state["adascale"]``: name -> fp64 tensor [G].

        Raises:
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
        self._refuse_amid_step("state_dict()")
        averages = {name: values.clone() for name, values in self._averages.items()}
        found = self._optimizer.state_dict()
        return {**found, "state": {**found["state"], KEY: averages}}

    def load_state_dict(self, data: StateDict) -> None:  # type: ignore[override]
        """Loads a state dict of this class, of fairscale's, or of the plain optimizer (then averages start anew).

        Raises:
            ConfigurationError: its averages are of another number of groups.
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
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


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()


def _evaluated_closure(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of ``step``; a closure among them is evaluated, and gives that value when it is called first."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        values = [closure()]

    def again() -> Tree:
        return values.pop() if values else closure()

    return (again, *args[1:]) if args else args, kwargs if args else {**kwargs, "closure": again}


_measuring: weakref.WeakSet[AdaScale] = weakref.WeakSet()


def measured_parameters() -> set[nn.Parameter]:
    """Those whose gradients some AdaScale of this process measures."""
    return {p for scale in list(_measuring) for params in scale._averaging.measured() for p in params}
