"""Python objects as byte tensors."""

from __future__ import annotations

import pickle

import torch

from shardkit.errors import ConfigurationError
from shardkit.types import Tree


def pyobject_to_tensor(obj: object, fixed_buffer_size: int = 0) -> torch.Tensor:
    """The pickled object as a uint8 tensor [numel], zeros up to ``fixed_buffer_size`` if that is given.

    Raises:
        ConfigurationError: it is longer than ``fixed_buffer_size``.
    """
    pickled = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    missing = fixed_buffer_size - pickled.numel()
    if not fixed_buffer_size:
        return pickled
    if missing < 0:
        raise ConfigurationError(
            f"the pickled object has {pickled.numel()} bytes; increase fixed_buffer_size ({fixed_buffer_size})"
        )
    return torch.nn.functional.pad(pickled, (0, missing))


def tensor_to_pyobject(tensor: torch.Tensor) -> Tree:
    """Unpickles the object of :func:`pyobject_to_tensor`, running what it says: only for tensors of own ranks."""
    return pickle.loads(bytes(tensor.cpu().tolist()))
