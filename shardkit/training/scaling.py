"""The arithmetic of gradient scaling, for devices with torch's kernels for it and without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..backend import backend_for_device
from ..errors import BackendError

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


def lacks_kernel(operation: str, device: torch.device) -> bool:
    """Whether a device has no kernel of its own for one of torch's operations."""
    key = torch._C._dispatch_key_for_device(device.type)
    return not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", key)


def _is_lazy(device: torch.device) -> bool:
    try:
        return not backend_for_device(device.type).has_storage
    except BackendError:  # a device of which only torch knows
        return False


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


@torch.no_grad()
def unscale(gradients: Iterable[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiplies in place by ``inv_scale`` [], and sets ``found_inf`` [] to 1 if anything is inf or nan."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for g in gradients:
        alike.setdefault((g.device, g.dtype), []).append(_values(g))
    for (device, _), values in alike.items():
        here = device == found_inf.device
        found = found_inf if here else torch.zeros_like(found_inf, device=device)
        inv = inv_scale.to(device)
        if _is_lazy(device) or lacks_kernel(_UNSCALE, device):
            _unscale_by_elementary_operations(values, found, inv)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(values, found, inv)
        if not here:
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))


def _unscale_by_elementary_operations(
    values: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """The same in operations that any device has and any compiler fuses; lazy devices lack it for half precision."""
    for v in values:
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(v)).any().to(found_inf.dtype)))
        # in fp32 at least: 1/scale of fp16 would be a subnormal number, or zero
        wide = torch.promote_types(v.dtype, torch.float32)
        v.copy_((v.to(wide) * inv_scale.to(wide)).to(v.dtype))


@torch.no_grad()
def updated_scale(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: Sequence[torch.Tensor], growth: float, backoff: float,
    interval: int,
) -> torch.Tensor:  # fmt: skip
    """The next scale [1], as torch's kernel has it; steps without overflow are counted in ``tracker`` [1], in place."""
    overflowed = (
        torch.stack([f.to(scale.device).reshape(()) for f in found_inf]).sum().reshape(scale.shape) > 0
    )
    steps = tracker + 1
    grown = scale * growth
    grows = (steps == interval) & torch.isfinite(grown)
    tracker.copy_(torch.where(overflowed | (steps == interval), torch.zeros_like(steps), steps))
    return torch.where(overflowed, scale * backoff, torch.where(grows, grown, scale))
