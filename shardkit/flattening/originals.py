"""Original parameters that were registered for a while give their values back to the flat parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import LifecycleError
from .flat_parameter import FlatParameter


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors surely are the same view of the same memory."""
    try:
        return a.is_set_to(b)
    except (NotImplementedError, RuntimeError):  # tensors without storage
        return False


def _with_data(flat_param: FlatParameter, data: torch.Tensor) -> FlatParameter:
    """The flat parameter with other data, as the same object if a tensor can go from one device to the other."""
    grad, flat_param.grad = flat_param.grad, None
    if flat_param.device.type != data.device.type:
        return flat_param._like_this(data.requires_grad_(flat_param.requires_grad))
    flat_param.data = data
    flat_param.grad = None if grad is None else grad.to(data)
    return flat_param


@torch.no_grad()
def take_over_originals(flat_params: Sequence[FlatParameter], module: nn.Module) -> list[FlatParameter]:
    """Original parameters that got other tensors while they were unflattened give their values to the flat parameters.

    Returns:
        The flat parameters; new ones where original parameters moved to a device that a tensor can't change to.

    Raises:
        LifecycleError: original parameters have other shapes, or several dtypes or devices.
    """
    taken = []
    for flat_param in flat_params:
        views = list(flat_param.get_param_views(flat_param.data))
        originals = [getattr(module, name).detach() for _, module, name in flat_param._param_infos]
        kinds = {(m.dtype, m.device) for m in originals}
        if [m.shape for m in originals] != [v.shape for v in views] or len(kinds) > 1:
            raise LifecycleError(
                f"parameters of {type(module).__name__} can't be flattened again as they were left; "
                f"expected one dtype and device and the shapes {[tuple(v.shape) for v in views]}, got {kinds} and "
                f"{[tuple(m.shape) for m in originals]}"
            )
        if kinds != {(flat_param.dtype, flat_param.device)}:
            flat_param = _with_data(flat_param, torch.cat([m.reshape(-1) for m in originals]))
        else:
            for original, view in zip(originals, views, strict=True):
                if not _same_memory(view, original):
                    view.copy_(original)
        taken.append(flat_param)
    return taken
