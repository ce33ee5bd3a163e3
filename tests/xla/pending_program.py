"""Reads the program of tensors that XLA has not computed yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch
import torch_xla

_RUNTIME = torch_xla._XLAC
_HLO_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def hlo(tensors: Sequence[torch.Tensor]) -> str:
    """Returns the program, before XLA's optimizations, that would compute these pending tensors."""
    return _RUNTIME._get_xla_tensors_hlo(list(tensors))


def collectives(tensors: Sequence[torch.Tensor]) -> Counter[str]:
    """Counts how often each collective ("all-gather", "reduce-scatter", ...) is in :func:`hlo` of these tensors."""
    return Counter(_HLO_COLLECTIVE.findall(hlo(tensors)))


def operations(tensors: Sequence[torch.Tensor]) -> int:
    """Counts recorded operations on which these pending tensors depend, their inputs included."""
    return len(re.findall(r"^ *%\d+ = ", _RUNTIME._get_xla_tensors_text(list(tensors)), re.MULTILINE))


def aliased() -> int:
    """Counts buffers that the program compiled last writes over, so that old and new values are not there together."""
    data = _RUNTIME._xla_metric_data("InputOutputAliasCount")
    return int(data[2][-1][1]) if data else 0
