"""Gradient scaling for mixed precision where ranks hold different gradients.

torch.amp.GradScaler looks at the gradients that it finds on its own rank. When gradients are sharded, an overflow
shows on the owner only; that rank would skip its step and halve its scale, alone. :class:`ShardedGradScaler` makes
it one decision of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..backend import Backend, Group, ReduceOp, backend_for
from ..errors import ConfigurationError, LifecycleError, RankMismatchError
from ..reduction.shard_gradients import check_whole, lacks_kernel, unscale
from ..torch_seams.tensors import group_of
from ..tracing.ranges import CLIP
from ..types import ProcessGroup, StateDict, Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Values of the flag that ranks combine with MAX.
_OVERFLOW = 1.0
_OTHER_SCALE = 2.0
_NEVER_SCALED = 3.0

_LOST = "the process group was not pickled"  # stands for it, which can't be
_Lost = str  # in pickles of shardkit 0.2, made of the same text


def _param_gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the gradients of an optimizer's parameters, sparse half-precision ones coalesced in place."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse and p.grad.dtype == torch.float16:
                # what overflows is the sum of the entries of one index
                p.grad = p.grad.coalesce()
            found.append(p.grad)
    return found


class GradScaler(torch.amp.GradScaler):
    """Scales losses as torch.amp.GradScaler, on any device and for gradients of any floating-point dtype.

    It takes the device from what is scaled first. torch's refuses fp16 gradients, which a model in half
    precision has. Use it where every rank holds all gradients; :class:`ShardedGradScaler` also serves there.

    Args:
        init_scale: first scale.
        growth_factor, growth_interval: the scale is multiplied by the one after so many steps without overflow.
        backoff_factor: the scale is multiplied by it after an overflow.
        enabled: with False, nothing is scaled and :meth:`step` only steps.

    Raises:
        ConfigurationError: ``growth_factor`` is not above, or ``backoff_factor`` not below 1.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and not (growth_factor > 1.0 and 0.0 < backoff_factor < 1.0):
            raise ConfigurationError(
                f"growth_factor={growth_factor} has to be above 1, and backoff_factor={backoff_factor} between 0 and 1"
            )
        # "cpu" is the device type for which torch's class never disables itself; the first scale() sets the true one
        # by name: fairscale's scalers have another class of torch's in between, with other arguments
        torch.amp.GradScaler.__init__(
            self, "cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._device = dev.type

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = _param_gradients(optimizer)
        if not gradients:
            return {}
        unscale(gradients, inv_scale, found_inf)
        return {found_inf.device: found_inf}

    def step(self, optimizer: Optimizer, *args: object, **kwargs: object) -> Tree:
        """Unscales the gradients (unless :meth:`unscale_` did) and steps, or skips the step after an overflow.

        Reading whether there was one is the only time that the host waits for the device.

        Args:
            args, kwargs: passed to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned; None if the step was skipped.

        Raises:
            ConfigurationError: a closure was passed.
            RuntimeError: second step since the last :meth:`update`.
        """
        if self._enabled:
            if any(callable(a) for a in args) or kwargs.get("closure") is not None:
                raise ConfigurationError(
                    "a closure computes new gradients in the middle of the step, where they can't be unscaled and "
                    "checked: step without one, or with GradScaler(enabled=False)"
                )
            kwargs.pop("closure", None)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale to what the steps since the last update found, or sets it.

        Args:
            new_scale: a number, or a tensor with one element on any device.

        Raises:
            ConfigurationError: ``new_scale`` has several elements.
        """
        if self._enabled and isinstance(new_scale, torch.Tensor):
            scale, _ = self._check_scale_growth_tracker("update")
            if new_scale.numel() != 1:
                raise ConfigurationError(
                    f"new_scale has shape {tuple(new_scale.shape)}; it has to be one number"
                )
            new_scale = new_scale.detach().to(scale).reshape(())
        elif new_scale is not None:
            new_scale = float(new_scale)
        elif (
            self._enabled
            and self._scale is not None
            and lacks_kernel("_amp_update_scale_", self._scale.device)
        ):
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            found = [f for state in states for f in state["found_inf_per_device"].values()]
            if not found:
                raise LifecycleError(
                    "update() comes after step() or unscale_(); none was called since the last update"
                )
            new_scale = updated_scale(
                scale, tracker, found, self._growth_factor, self._backoff_factor, self._growth_interval
            )
        super().update(new_scale)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads what :meth:`state_dict` returned.

        Raises:
            ConfigurationError: a value is missing, or none that scaling can work with; nothing was loaded.
        """
        if self._enabled:
            _check_state(state_dict)
        super().load_state_dict(state_dict)


class ShardedGradScaler(GradScaler):
    """Scales losses of sharded gradients: an overflow on one rank skips the step, and lowers the scale, on all.

    ::

        scaler = ShardedGradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)              # optional: to clip
        optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()

    :meth:`unscale_` (called by :meth:`step` if the user does not) is a collective of one number: every rank calls it,
    also one that holds no gradients. Scale, state dict and pickling are torch's.

    An optimizer that shards (such as :class:`~shardkit.OSS`) offers ``gradients()``: the list of gradients that this
    rank's step reads. These are checked. Other gradients of its parameters, averaged but owned elsewhere or left
    over, are unscaled too, unchecked, so that a norm over ``model.parameters()`` means something. Tensors of that
    list are either gradients of parameters themselves, or share no memory with them.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as :class:`GradScaler`.
        process_group: ranks that decide together; default: ``optimizer.group`` of an optimizer that shards, else all.
        backend: name or instance of the backend; default that of the scaled loss's device.
        mesh: all of its ranks, in place of ``process_group``.

    Raises:
        ConfigurationError: see :class:`GradScaler`.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup = None,
        *,
        backend: str | Backend | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.group = group_of(mesh, process_group)
        self._backend = backend
        self._never_scaled = False

    def _group_for(self, optimizer: Optimizer, tensor: torch.Tensor) -> Group:
        group = self.group
        if group == _LOST:
            raise LifecycleError(
                "this ShardedGradScaler was unpickled, and process groups can't be pickled; set `scaler.group` to the "
                "process group first (None for all ranks)"
            )
        if group is None and (owners := _of_owners(optimizer)) is not None:
            _, group = owners
        return backend_for([tensor], self._backend).group(group)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        group = self._group_for(optimizer, found_inf)
        check_whole((group,))
        checked, others = _split_gradients(optimizer)
        # as plain tensors: the ranks agree below, each once, and a rank may hold no gradient that would agree by itself
        with torch._C.DisableTorchFunctionSubclass():
            unscale(checked, inv_scale, found_inf)
            unscale(others, inv_scale, torch.zeros_like(found_inf))
        if self._never_scaled:
            found_inf.fill_(_NEVER_SCALED)
        told = torch.stack([found_inf, inv_scale, -inv_scale])
        with CLIP.overflow():
            group.all_reduce(told, op=ReduceOp.MAX, label="whether a gradient overflowed").wait()
        found, most, least = told.unbind()
        differ = (most != -least).to(found.dtype)  # not read here: the host would wait for it
        found_inf.copy_(torch.maximum(found, differ * _OTHER_SCALE))
        return {found_inf.device: found_inf}

    def _join_in_unscaled(self, optimizer: Optimizer) -> None:
        """Lets a rank that forgot to scale take part, so that the error comes on all ranks."""
        if self._enabled and self._scale is None:
            first = next((p for g in optimizer.param_groups for p in g["params"]), torch.empty(0))
            self._lazy_init_scale_growth_tracker(first.device)
            self._never_scaled = True

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, and lets the ranks agree on whether there was an overflow.

        Raises:
            RuntimeError: called twice since the last :meth:`update`, or after :meth:`step`.
            LifecycleError: the scaler was unpickled and lacks its process group.
        """
        self._join_in_unscaled(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: object, **kwargs: object) -> Tree:
        """See :meth:`GradScaler.step`; every rank of the group calls it.

        Raises:
            LifecycleError: on all ranks, if one did not call :meth:`scale` before.
        """
        self._join_in_unscaled(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        if self._never_scaled:  # an optimizer that skips by itself did so
            self._refuse_unscaled_loss(optimizer)
        return result

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: StateDict, *args: Any, **kwargs: Any
    ) -> Tree:
        (found_inf,) = optimizer_state["found_inf_per_device"].values()
        flag = found_inf.item()
        if flag == _NEVER_SCALED:
            self._refuse_unscaled_loss(optimizer)
        if flag == _OTHER_SCALE:
            raise RankMismatchError(
                f"ranks scale their losses by different numbers, this one by {self.get_scale():g}; no step was made. "
                "Build the scaler with the same init_scale= everywhere, and load the same state on all ranks"
            )
        return optimizer.step(*args, **kwargs) if flag < _OVERFLOW else None

    def _refuse_unscaled_loss(self, optimizer: Optimizer) -> None:
        whose = "this rank" if self._never_scaled else "another rank of the group"
        if self._never_scaled:
            self._scale = self._growth_tracker = None
            self._never_scaled = False
        self._per_optimizer_states.pop(id(optimizer), None)
        raise LifecycleError(
            f"{whose} called step() or unscale_() though scale() was never called there; call "
            "scaler.scale(loss).backward() on every rank first"
        )

    def __getstate__(self) -> StateDict:
        state = super().__getstate__()
        if self.group is not None:
            state["group"] = _LOST
        if self._backend is not None and not isinstance(self._backend, str):
            state["_backend"] = self._backend.name
        return state


def _check_state(state: object) -> None:
    """Raises ConfigurationError unless a scaler can go on from there."""
    if not isinstance(state, Mapping) or not state:
        raise ConfigurationError(
            f"this is no state of a gradient scaler that was enabled: {type(state).__name__} of "
            f"{list(state) if isinstance(state, Mapping) else repr(state)[:80]}; pass what its state_dict() returned"
        )
    wanted: dict[str, tuple[str, Callable[[float], bool]]] = {
        "scale": ("a number above 0", lambda v: 0 < v < math.inf),
        "growth_factor": ("a number above 1", lambda v: 1 < v < math.inf),
        "backoff_factor": ("a number between 0 and 1", lambda v: 0 < v < 1),
        "growth_interval": ("a whole number above 0", lambda v: v >= 1 and v == int(v)),
        "_growth_tracker": ("a whole number, 0 or more", lambda v: v >= 0 and v == int(v)),
    }
    for name, (what, is_fine) in wanted.items():
        value = state.get(name)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_fine(value):
            found = f"is {state[name]!r}" if name in state else "is missing"
            raise ConfigurationError(
                f"{name!r} of this gradient scaler's state {found}, it has to be {what}; nothing was loaded. Pass what "
                "state_dict() of a scaler returned"
            )


def _of_owners(optimizer: Tree) -> tuple[Callable[[], Sequence[torch.Tensor]], ProcessGroup] | None:
    """Finds what makes the gradients that an optimizer's step on this rank reads, and the ranks of the others.

    None of one that updates all of its parameters on every rank.
    """
    offer = getattr(optimizer, "gradients", None)
    return (offer, optimizer.group) if callable(offer) and hasattr(optimizer, "group") else None


def _split_gradients(optimizer: Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the gradients that this rank's step reads, and the other gradients of the optimizer's parameters."""
    if (owners := _of_owners(optimizer)) is None:
        return _param_gradients(optimizer), []
    offer, _ = owners
    read = list(offer())  # first: it may finish a reduction
    everything = _param_gradients(optimizer)
    if any(g.is_sparse for g in read):
        read = list(offer())  # again: coalescing put new tensors in their place
    known = {id(g) for g in read}
    return read, [g for g in everything if id(g) not in known]


# ------------------------------------------------------------ arithmetic
@torch.no_grad()
def updated_scale(
    scale: torch.Tensor,
    tracker: torch.Tensor,
    found_inf: Sequence[torch.Tensor],
    growth: float,
    backoff: float,
    interval: int,
) -> torch.Tensor:
    """Returns the next scale [1], as torch's kernel; steps without overflow count in ``tracker`` [1], in place."""
    overflowed = (
        torch.stack([f.to(scale.device).reshape(()) for f in found_inf]).sum().reshape(scale.shape) > 0
    )
    steps = tracker + 1
    grown = scale * growth
    grows = (steps == interval) & torch.isfinite(grown)
    tracker.copy_(torch.where(overflowed | (steps == interval), torch.zeros_like(steps), steps))
    return torch.where(overflowed, scale * backoff, torch.where(grows, grown, scale))
