"""Names that are one weight's, as a user says: distributed checkpoints keep each name for itself."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigurationError
from ...types import StateDict
from .comparing import same_bits
from .stored import StoredTensor


def tie(model: StateDict, pairs: Sequence[tuple[str, str]]) -> None:
    """Puts one tensor under both names, in place.

    Args:
        pairs: (name, the name that it is kept under).

    Raises:
        ConfigurationError: one is not there, or they differ.
    """
    for name, kept in pairs:
        tensor, other = model.get(name), model.get(kept)
        if not isinstance(tensor, StoredTensor) or not isinstance(other, StoredTensor):
            missing = name if not isinstance(tensor, StoredTensor) else kept
            raise ConfigurationError(f"--tied {name}={kept}: the model has no tensor {missing!r}")
        if tensor.shape != other.shape or tensor.dtype != other.dtype or not same_bits(tensor, other):
            raise ConfigurationError(f"--tied {name}={kept}: their values differ, so they are two weights")
        both = other.identified(("tied", kept) if other.identity is None else other.identity)
        model[name] = model[kept] = both
