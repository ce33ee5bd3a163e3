"""fairscale.nn.data_parallel, its sharded_ddp included: ShardedDataParallel with fairscale's arguments."""

from __future__ import annotations

import logging

import torch
from torch import nn

from shardkit.errors import ConfigurationError
from shardkit.optim.oss import OSS
from shardkit.oss.sharded_ddp import ShardedDDP
from shardkit.policy import ReducePolicy
from shardkit.training.adascale import AdaScale
from shardkit.types import ProcessGroup

from .fully_sharded_data_parallel import FullyShardedDataParallel, auto_wrap_bn, get_fsdp_instances

__all__ = [
    "FullyShardedDataParallel",
    "OffloadConfig",
    "ShardedDataParallel",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]

logger = logging.getLogger("shardkit")


class ShardedDataParallel(ShardedDDP):
    """fairscale's ShardedDataParallel: see :class:`shardkit.ShardedDDP` for what it does.

    Args:
        sharded_optimizer: the OSS that owns the parameters, an AdaScale around it, or a list of them.
        process_group: ranks that train together; None for all.
        broadcast_buffers: keep rank 0's buffers on all ranks.
        sync_models_at_startup: begin with rank 0's parameters and buffers.
        reduce_buffer_size: most elements in a gradient bucket; 0 reduces each gradient alone.
        auto_refresh_trainable: notice freezing and unfreezing at each forward.
        reduce_fp16: reduce in fp16; as in fairscale only with ``reduce_buffer_size=0``, else a warning is logged
            (``shardkit.ReducePolicy(dtype=torch.float16)`` does it with buckets).
        warn_on_trainable_params_changed: log a warning when that happens.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | AdaScale | list[OSS | AdaScale],
        process_group: ProcessGroup = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        if reduce_fp16 and reduce_buffer_size > 0:
            logger.warning("reduce_fp16 needs reduce_buffer_size=0; gradients are reduced in their own dtype")
            reduce_fp16 = False
        super().__init__(
            module,
            sharded_optimizer,
            group=process_group,
            broadcast_buffers=broadcast_buffers,
            sync_module_states=sync_models_at_startup,
            reduce=ReducePolicy(reduce_buffer_size, torch.float16 if reduce_fp16 else None),
            watch_trainable=auto_refresh_trainable,
        )
        self._warn_on_change = warn_on_trainable_params_changed
        # as DistributedDataParallel shows them; trainers read both
        self.is_multi_device_module = False
        self.device_type = next((p.device.type for p in module.parameters()), "cpu")

    def to(  # type: ignore[override]
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> ShardedDataParallel:
        """Casts the module, or moves it within its device type; returns the wrapper (fairscale: None).

        Raises:
            ConfigurationError: another device type: the optimizer's state would stay behind.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        target = None if device is None else torch.empty((), device=device).device
        if target is not None and target.type != self.device_type:
            raise ConfigurationError(
                f"the module is on {self.device_type} and its optimizer state stays there; move it to {target.type} "
                "before building OSS and ShardedDataParallel"
            )
        self.module.to(device=target, dtype=dtype, non_blocking=non_blocking)
        self.refresh_trainable()
        return self

    _trainable_params = property(
        lambda self: [p for o in self._sharded_optimizers for p in o._parameters() if p.requires_grad]
    )
    _should_accumulate_grads = property(lambda self: self._connected().state.accumulating)
    _grad_hooks = property(lambda self: self._connected().hook_handles)
    _buckets = property(lambda self: self._connected().buckets)
