"""fairscale.fair_dev.testing.testing_memory: what is still in memory."""

from __future__ import annotations

import gc

import torch


def find_tensor_by_shape(target_shape: tuple[int, ...], only_param: bool = True) -> bool:
    """Whether a tensor of this shape is alive.

    Args:
        target_shape: the shape.
        only_param: look at parameters only.
    """
    kind = torch.nn.Parameter if only_param else torch.Tensor
    # type(), not isinstance(): the latter runs code of what it finds (proxies, lazy modules)
    return any(x.shape == tuple(target_shape) for x in gc.get_objects() if issubclass(type(x), kind))
