"""AdaScale: learning rates for large batches from how much gradients differ (Johnson et al., arXiv 2007.05105).

A batch S times as large makes a step's gradient less noisy, up to S times. AdaScale measures how much less and
multiplies the learning rate of the step by that gain, between 1 and S; a schedule made for the small batch then
counts :meth:`AdaScale.gain` steps for each step. Names and behaviour follow fairscale's AdaScale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend, Group, backend_for
from ..checks.same_everywhere import check_same_everywhere
from ..errors import ConfigurationError
from ..fsdp.registered_shard import flat_of_registered
from ..oss.optimizer import OSS
from ..reduction.norms import norm_like
from .gradient_noise import (
    SQUARE,
    VARIANCE,
    GradientMeter,
    GradientOrderError,
    State,
    add_groups,
    estimate,
    initial_state,
    rescale_variance,
    squared_norm,
    update_average,
)

_KEY = "adascale"


class AdaScaleArgumentError(ConfigurationError, AssertionError):
    """An argument of AdaScale can't work. (An AssertionError too, as in fairscale.)"""


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
    :class:`~shardkit.OSS` inside of AdaScale, or by hand before :meth:`gain` and :meth:`step` in a hook of backward.
    Every ``num_gradients_to_accumulate`` backwards the estimates are updated, at the end of the last one: a small
    all-reduce. Gradients are cleared before the next backward, by whatever way. A step whose gradients are not finite
    leaves the estimates alone.

    Args:
        optimizer: any optimizer, OSS included.
        world_size: ranks whose gradients are averaged; default: of the group, 1 without one. 1 never communicates.
        scale: size of the whole batch relative to the one that the learning rate was made for; default: ``world_size
            * num_gradients_to_accumulate``.
        smoothing: weight of the past in moving averages, at least 0 and below 1; default ``max(1 - world_size *
            num_gradients_to_accumulate / 1000, 0)``.
        num_gradients_to_accumulate: backwards in a step.
        is_scaled_loss: each loss is divided by that number; otherwise call :meth:`scale_grad_by_num_grads_to_accum`.
        debias_ewma: see :func:`~shardkit.adascale.gradient_noise.update_average`.
        group: ranks whose gradients are averaged; default: those of an OSS, else all.
        backend: name or instance of the backend; by default that of the parameters' device.

    Raises:
        ConfigurationError: a step would have one gradient only, so that nothing can differ; the group has another
            number of ranks; the parameters are FSDP's, which never see a rank's own gradients.
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
        group: Any = None,
        backend: str | Backend | None = None,
    ) -> None:
        # Optimizer's own constructor is not called: its parts are the wrapped optimizer's
        self._optimizer = optimizer
        self._process_group, self._backend = group, backend
        _refuse_fsdp(self._parameters())
        self._world_size = self._find_world_size(world_size)
        self._is_scaled_loss, self._debias_ewma = is_scaled_loss, debias_ewma
        self._checked = False
        ends = weakref.WeakMethod(self._end_of_backward)  # parameters must not keep this object
        like = norm_like(self._parameters())
        self._meter = GradientMeter(1, like, lambda: _call(ends))
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            if not 0.0 <= smoothing < 1.0:
                raise AdaScaleArgumentError(f"smoothing is {smoothing}; it has to be at least 0 and below 1")
            self._smoothing = float(smoothing)
        self._scale = 1.0
        self.set_scale(self._count if scale is None else scale, update_estimate=False)
        self._meter.attach(self.param_groups)
        weakref.finalize(self, self._meter.hooks.remove).atexit = False

    # ---------------------------------------------------------------- facts
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
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
        return self._world_size * self._meter.expected

    @property
    def _averages(self) -> State:
        """The moving averages; they live in the wrapped optimizer's state, and so in its state dict."""
        state: dict[Any, Any] = self._optimizer.state
        if SQUARE not in state.get(_KEY, {}):  # new, or loaded from an optimizer without AdaScale
            state[_KEY] = initial_state(len(self.param_groups))
        return state[_KEY]

    def _parameters(self) -> list[nn.Parameter]:
        return [p for g in self.param_groups for p in g["params"]]

    def gain(self, pg_idx: int | None = None) -> float:
        """By how much the learning rate of a step is multiplied, between 1 and :attr:`scale`.

        Args:
            pg_idx: of this param group; None: of all together.
        """
        self._settle()
        chosen = slice(None) if pg_idx is None else pg_idx
        square, variance = (float(self._averages[name][chosen].sum()) for name in (SQUARE, VARIANCE))
        if square + variance == 0.0:
            return 1.0
        return (variance + square) / (variance / self._scale + square)

    # ---------------------------------------------------------------- ranks
    def _find_world_size(self, given: int | None) -> int:
        group = self._find_group()
        if given is None:
            return 1 if group is None else group.world_size
        if given > 1 and group is not None and group.world_size != given:
            raise AdaScaleArgumentError(
                f"world_size is {given}, but gradients would be compared over a group of {group.world_size} ranks; "
                "pass the group that averages them: shardkit.AdaScale(optimizer, group=...)"
            )
        return given

    def _find_group(self) -> Group | None:
        if isinstance(self._optimizer, OSS) and self._process_group is None:
            return self._optimizer._group
        try:
            return backend_for(self._parameters(), self._backend).group(self._process_group)
        except ConfigurationError:
            if self._process_group is not None or (dist.is_available() and dist.is_initialized()):
                raise
            return None

    def _sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        if self._world_size == 1:
            return values
        group = self._find_group()
        if group is None:
            raise ConfigurationError(
                f"world_size is {self._world_size}, but there is no process group; call "
                "torch.distributed.init_process_group(...) before backward"
            )
        if not self._checked:
            facts = [
                (f"parameter {i} of group {g}", (tuple(p.shape), str(p.dtype)))
                for g, options in enumerate(self.param_groups)
                for i, p in enumerate(options["params"])
            ]
            check_same_everywhere(group, facts, "AdaScale's parameters (put AdaScale around OSS, not inside)")
            self._checked = True
        group.channel("control").all_reduce(values, label="AdaScale: squared norms")
        return values

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
        summed = self._sum_over_ranks(torch.cat([local, self._share_of_total()])).cpu().double()
        if not bool(torch.isfinite(summed).all()):
            return
        local, total = summed.chunk(2)
        if self._is_scaled_loss:
            local = local * self._meter.expected**2
        else:
            total = total / self._meter.expected**2
        square, variance = estimate(local, total, self._count, self._scale)
        update_average(self._averages, SQUARE, square, self._smoothing, self._debias_ewma)
        update_average(self._averages, VARIANCE, variance, self._smoothing, self._debias_ewma)

    def _share_of_total(self) -> torch.Tensor:
        """What adds up over the ranks to |ḡ|², by group [G]."""
        inner, copies = self._optimizer, self._world_size
        if isinstance(inner, OSS):
            inner.gradients()  # where these are parts of a vector, they are in their place from now on
            copies = copies if inner.runs_whole else 1  # each gradient counts at its owner
            inner = inner.optim
        squares = [squared_norm(_gradients(group), self._meter.like) for group in inner.param_groups]
        return torch.stack(squares) / copies

    @torch.no_grad()
    def gradient_correlation(self) -> torch.Tensor:
        """Mean correlation of the gradients that pairs of ranks hold now (0-dim); call it before they are averaged.

        All ranks call it. Parameters without a gradient count as zeros.

        Raises:
            ConfigurationError: there is one rank only.
        """
        group = self._find_group()
        if group is None or self._world_size == 1:
            raise ConfigurationError("a correlation of ranks' gradients needs several ranks")
        flat = [
            (torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad)
            .reshape(-1)
            .to(self._meter.like)
            for p in self._parameters()
        ]
        own = torch.cat(flat)  # [P]
        everybody = own.new_empty(self._world_size, own.numel())
        group.channel("control").all_gather_into(everybody.view(-1), own, label="AdaScale: correlation")
        correlation = torch.corrcoef(everybody)  # [N, N]
        above = torch.ones_like(correlation, dtype=torch.bool).triu(1)
        return correlation[above].mean()

    # ---------------------------------------------------------------- stepping
    def step(self, *args: Any, **kwargs: Any) -> Any:
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
        gradients = {id(g): g for g in _gradients({"params": self._parameters()})}
        if isinstance(self._optimizer, OSS):
            gradients |= {id(g): g for g in self._optimizer.gradients()}
        for gradient in gradients.values():
            gradient.div_(self._meter.expected)

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
        count = num_gradients_to_accumulate * self._world_size
        if num_gradients_to_accumulate < 1 or count < 2:
            raise AdaScaleArgumentError(
                f"world_size={self._world_size} and num_gradients_to_accumulate={num_gradients_to_accumulate}: "
                "AdaScale compares the gradients of a step and needs two at least. AdaScale does not support a "
                "single worker without grad accumulation."
            )
        self._meter.expected = num_gradients_to_accumulate
        if update_smoothing:
            self._smoothing = max(1.0 - count / 1000, 0.0)

    def add_param_group(self, pg: dict[str, Any]) -> None:
        """Adds a param group; its averages start with its first step.

        Raises:
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
        self._refuse_amid_step("add_param_group()")
        averages, before = self._averages, len(self.param_groups)
        self._optimizer.add_param_group(pg)
        add_groups(averages, len(self.param_groups) - before)
        _refuse_fsdp(self._parameters())
        self._checked = False
        self._meter.attach(self.param_groups)

    def unhook(self) -> None:
        """Stops listening to gradients; from then on the gain stays what it is."""
        self._meter.hooks.remove()

    # ---------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's, with ``state["adascale"]``: name -> fp64 tensor [G].

        Raises:
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
        self._refuse_amid_step("state_dict()")
        averages = {name: values.clone() for name, values in self._averages.items()}
        found = self._optimizer.state_dict()
        return {**found, "state": {**found["state"], _KEY: averages}}

    def load_state_dict(self, data: dict[str, Any]) -> None:  # type: ignore[override]
        """Loads a state dict of this class, of fairscale's, or of the plain optimizer (then averages start anew).

        Raises:
            ConfigurationError: its averages are of another number of groups.
            GradientOrderError: some of the step's backwards are missing.
        """
        self._settle()
        self._refuse_amid_step("load_state_dict()")
        saved = data["state"].get(_KEY)
        averages = initial_state(len(self.param_groups)) if saved is None else _as_tensors(saved)
        found, expected = averages[SQUARE].numel(), len(self.param_groups)
        if found != expected:
            raise ConfigurationError(
                f"the state dict has AdaScale's averages of {found} param groups, this optimizer has {expected}; "
                "build it with the same groups first"
            )
        for name, values in averages.items():
            if values.numel() != expected and not (name.endswith("_count") and values.numel() == 1):
                raise ConfigurationError(
                    f"AdaScale's {name!r} has {values.numel()} values, expected one for each of {expected} groups; the "
                    " state dict was damaged, or put together by hand"
                )
        rest = {k: v for k, v in data["state"].items() if k != _KEY}
        self._optimizer.load_state_dict({**data, "state": rest})
        state: dict[Any, Any] = self._optimizer.state
        state[_KEY] = averages

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigurationError(
            "AdaScale can't be pickled or copied: it listens to the gradients of its parameters. Save state_dict(), "
            "and build another one over the copy's parameters"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()


def _refuse_fsdp(params: Sequence[nn.Parameter]) -> None:
    if any(flat_of_registered(p) is not None for p in params):
        raise ConfigurationError(
            "AdaScale compares the gradients that each rank computes, and FSDP's parameters get averaged ones only. "
            "Use DistributedDataParallel, or OSS with ShardedDDP"
        )


def _gradients(group: dict[str, Any]) -> list[torch.Tensor]:
    return [p.grad for p in group["params"] if p.grad is not None]


def _as_tensors(saved: dict[str, Any]) -> State:
    """Own copies of saved averages, numpy arrays (fairscale's) or tensors."""
    return {k: torch.tensor([float(x) for x in v], dtype=torch.float64) for k, v in saved.items()}


def _evaluated_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``step``; a closure among them is evaluated, and gives that value when it is called first."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        values = [closure()]

    def again() -> Any:
        return values.pop() if values else closure()

    return (again, *args[1:]) if args else args, kwargs if args else {**kwargs, "closure": again}
