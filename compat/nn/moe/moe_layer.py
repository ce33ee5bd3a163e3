"""fairscale.nn.moe.moe_layer: MOELayer with fairscale's arguments and marks on parameters."""

from __future__ import annotations

import torch
from torch import nn

from shardkit.compat.redirected import redirected_names
from shardkit.model_parallel import moe as core
from shardkit.types import ProcessGroup

__getattr__ = redirected_names(__name__)


class MOELayer(core.MOELayer):
    """fairscale's MOELayer: see :class:`shardkit.model_parallel.moe.MOELayer` for what it does.

    Args:
        gate, experts, group: as there. Parameters of experts get an attribute ``expert`` that is True.
    """

    def __init__(
        self, gate: nn.Module, experts: nn.Module | nn.ModuleList, group: ProcessGroup = None
    ) -> None:
        super().__init__(gate, experts, group)
        if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            self.group = torch.distributed.group.WORLD
        for p in self.experts.parameters():
            p.expert = True  # type: ignore[attr-defined]
