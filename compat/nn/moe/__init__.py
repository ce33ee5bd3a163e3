"""fairscale.nn.moe."""

from collections.abc import Callable

import torch
from torch import nn

from shardkit.model_parallel import moe as core
from shardkit.model_parallel.moe import Top2Gate
from shardkit.types import ProcessGroup

__all__ = ["MOELayer", "Top2Gate"]


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


gumbel_map: dict[torch.device, Callable] = {}  # nothing is kept: the distribution is two numbers
