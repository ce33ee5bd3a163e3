"""fairscale.optim.oss: the OSS class with fairscale's arguments and the private attributes that users read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from shardkit.compat.redirected import redirected_function
from shardkit.errors import ConfigurationError
from shardkit.internal.params import get_global_rank
from shardkit.oss import optimizer as core
from shardkit.oss.optimizer import part_of_rank
from shardkit.oss.placement import OwnedParameters
from shardkit.training.adascale import AdaScale
from shardkit.types import ProcessGroup, StateDict, Tree


class OSS(core.OSS):
    """fairscale's OSS: see :class:`shardkit.OSS` for what it does.

    Args:
        params: parameters, param groups or named parameters.
        optim: optimizer class.
        group: process group; None for all ranks.
        broadcast_buffer_size: no effect (deprecated in fairscale).
        broadcast_fp16: updated fp32 parameters travel as fp16; every rank's copy is rounded. Other dtypes travel as
            they are (fairscale turns them into fp32).
        force_broadcast_object: no effect: state always travels in a way that works on every device.
        **default: arguments of ``optim``.
    """

    _tells_empty_state = False

    def __init__(
        self,
        params: ParamsT,
        optim: Callable[..., Optimizer] = SGD,
        group: ProcessGroup = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Tree,
    ) -> None:
        kind: object = optim
        if isinstance(kind, type) and issubclass(kind, AdaScale):
            raise ConfigurationError(
                f"OSS would give each rank's {kind.__name__} some of the parameters, and gains are of all ranks' "
                "gradients of one parameter. Put AdaScale around OSS: AdaScale(OSS(...)), or AdaScaleWrapper(params, "
                "optim_cls=OSS, optim=SGD, ...)"
            )
        self.broadcast_fp16 = broadcast_fp16
        self.force_broadcast_object = force_broadcast_object
        super().__init__(
            params, optim, group, broadcast_dtype=torch.float16 if broadcast_fp16 else None, **default
        )
        if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            self.group = torch.distributed.group.WORLD

    # fairscale's private attributes, read by trainers in the wild
    _param_to_rank = property(lambda self: dict(self._owner))
    _param_to_index = property(lambda self: {id(p): i for i, p in enumerate(self._parameters())})
    _index_to_param = property(lambda self: dict(enumerate(self._parameters())))
    _partition_parameters = property(core.OSS.partition_parameters)
    _default_device = property(lambda self: next(self._parameters()).device)

    @property
    def _per_device_params(self) -> dict[torch.device, list[list[nn.Parameter]]]:
        """Returns the device -> rank -> parameters, smallest first."""
        per_device: dict[torch.device, list[list[nn.Parameter]]] = {}
        for p in self._parameters():
            ranks = per_device.setdefault(p.device, [[] for _ in range(self.world_size)])
            ranks[self._owner[p]].append(p)
        for ranks in per_device.values():
            for params in ranks:
                params.sort(key=lambda p: p.numel())
        return per_device

    _local_params = property(  # owned ones that have a gradient
        lambda self: [p for p in self._parameters() if self._owner[p] == self.rank and p.grad is not None]
    )

    @property
    def _all_states(self) -> list[StateDict]:
        """Returns each rank's inner state dict as of the last consolidation; empty before."""
        if self._consolidated is None:
            return []
        whole = self.state_dict()
        owners = [self.owner_of(p) for p in self._parameters()]
        return [part_of_rank(whole, owners, rank) for rank in range(self.world_size)]

    @property
    def buckets(self) -> dict[torch.device, dict[int, torch.Tensor]]:
        """Returns the device -> rank -> the flat buffer that the rank's trainable parameters are views of."""
        found: dict[torch.device, dict[int, torch.Tensor]] = {}
        if not isinstance(self.placement, OwnedParameters):
            return found
        for flat in self.placement.buffers:
            for rank in range(self.world_size):
                segment = flat.segment(rank)
                if segment.numel():
                    found.setdefault(segment.device, {})[rank] = segment
        return found

    # names of fairscale before 0.3.7
    get_global_rank = staticmethod(get_global_rank)
    rank_local_state_dict = staticmethod(
        redirected_function(
            "optim.oss.OSS.rank_local_state_dict",
            "OSS.load_state_dict(state_dict), which takes a rank's part",
            why="it read a format that fairscale gave up in 0.3.7",
        )
    )

    param_to_rank = _param_to_rank
    param_to_index = _param_to_index
    per_device_params = _per_device_params
    local_params = _local_params
    index_to_param = _index_to_param
