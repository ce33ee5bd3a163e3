"""Records of DCP's data files: each is what ``torch.save`` writes, and is read as data, whoever wrote it."""

from __future__ import annotations

import io

import torch

from ...errors import ConfigurationError, DamagedFileError, UntrustedFileError
from ...types import Tree
from ..files.loading import load_data


def read_object(name: str, data: bytes) -> Tree:
    """What a record of an object holds, on the CPU.

    Raises:
        UntrustedFileError: it holds more than data.
        DamagedFileError: it is no record.
    """
    return load_data(io.BytesIO(data), len(data), name)


def read_tensor(name: str, data: bytes, sizes: tuple[int, ...]) -> torch.Tensor:
    """What a record of a tensor of these sizes holds, on the CPU.

    Raises:
        UntrustedFileError, DamagedFileError: it is no record, or holds something else.
    """
    found = read_object(name, data)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != sizes:
        raise DamagedFileError(
            f"{name} is no tensor of sizes {sizes}, which the checkpoint should have there"
        )
    return found.detach()


def refuse_what_is_no_data(name: str, data: bytes) -> None:
    """Raises for a record that could not be read again.

    Raises:
        ConfigurationError: it holds objects of classes.
    """
    try:
        read_object(name, data)
    except UntrustedFileError as error:
        raise ConfigurationError(
            f"{name!r} can't be saved, since it holds more than tensors, numbers, strings and containers of them: "
            f"{error.__cause__}. Pass its state_dict(), or what it consists of"
        ) from error
