"""Reads files of ``torch.save`` without running what a stranger may have put into them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from typing import Any

import torch

from .errors import UntrustedFileError

__all__ = ["load"]

_DTYPES = ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")


def load(
    path: str | os.PathLike[str],
    *,
    map_location: torch.device | str | None = "cpu",
    trust_pickle: bool = False,
) -> Any:
    """What ``torch.save`` has written: tensors, numbers, strings, containers and numpy arrays of numbers.

    That is all there is in state dicts of OSS, FSDP, AdaScale and the gradient scalers, fairscale's and shardkit's. A
    pickle can hold calls of any function; a file that needs another one to be read is refused.

    Args:
        path: the file.
        map_location: where tensors go, as in ``torch.load``.
        trust_pickle: read it whatever it calls. Only for files of people you trust as you trust their programs.

    Raises:
        UntrustedFileError: the file calls what is in no state dict; the message says what.
    """
    if trust_pickle:
        return torch.load(path, map_location=map_location, weights_only=False)
    with _numpy_is_safe():
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UntrustedFileError(
                f"{os.fspath(path)} is not read, since it holds more than tensors, numbers and containers of them: "
                f"{_what_is_in_it(path, error)}. Reading that means running what it says. If you trust whoever wrote "
                "it, pass trust_pickle=True (--trust-pickle on command lines) and save it anew as a state dict"
            ) from error


def _what_is_in_it(path: str | os.PathLike[str], error: Exception) -> str:
    """The names of what it calls, or else torch's own words."""
    with contextlib.suppress(Exception):  # the file may be anything
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return ", ".join(sorted(names))
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else str(error).partition("\n")[0]


@contextlib.contextmanager
def _numpy_is_safe() -> Iterator[None]:
    """AdaScale keeps its averages in numpy arrays; making one of bytes calls nothing."""
    try:
        import numpy as np
    except ImportError:
        yield
        return
    names: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(d)) for d in _DTYPES)]
    # numpy 1 and 2 pickle under different names.
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names.append((np.ndarray.__reduce__(np.zeros(1))[0], f"{module}._reconstruct"))
        names.append((np.float64(0).__reduce__()[0], f"{module}.scalar"))
    with torch.serialization.safe_globals(names):
        yield
