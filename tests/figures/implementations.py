"""The ways to train data-parallel that are counted and timed against each other."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

ADAMW = {"lr": 1e-3, "fused": True}


class Trainer(NamedTuple):
    """A model ready to train.

    Attributes:
        model: takes a batch.
        optimizer: steps.
        zero_grad: clears gradients the way the library's users do.
    """

    model: nn.Module
    optimizer: Any
    zero_grad: Callable[[], None]


def _sharded(library: str, model: nn.Module, **wrapper: Any) -> Trainer:
    """OSS and ShardedDataParallel; the wrapper clears gradients, as fairscale's has to where its buckets hold them."""
    oss = importlib.import_module(f"{library}.optim.oss").OSS
    sharded = importlib.import_module(f"{library}.nn.data_parallel").ShardedDataParallel
    optimizer = oss(model.parameters(), optim=torch.optim.AdamW, **ADAMW)
    wrapped = sharded(model, optimizer, **wrapper)
    return Trainer(wrapped, optimizer, lambda: wrapped.zero_grad(set_to_none=True))


def bare(model: nn.Module) -> Trainer:
    """One process, no wrapper."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Trainer(model, optimizer, optimizer.zero_grad)


def ddp(model: nn.Module, bucket_view: bool = False) -> Trainer:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


def ddp_zero(model: nn.Module) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


def balanced(model: nn.Module) -> Trainer:
    """shardkit's own API with owners balanced by size."""
    kit = importlib.import_module("shardkit")
    optimizer = kit.OSS(model.parameters(), optim=torch.optim.AdamW, partition="balanced", **ADAMW)
    wrapped = kit.ShardedDDP(model, optimizer)
    return Trainer(wrapped, optimizer, wrapped.zero_grad)


def units(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """What is gathered together: each block of the GPT, each layer of the MLP; the root holds the rest."""
    blocks: nn.ModuleList = model.get_submodule("blocks" if hasattr(model, "blocks") else "layers")  # type: ignore[assignment]
    return [(blocks, name) for name in list(blocks._modules)]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def fsdp(
    model: nn.Module, reshard: bool = True, library: str = "shardkit", compute: torch.dtype | None = None
) -> Trainer:
    """FullyShardedDataParallel through fairscale's API, one unit a block."""
    kit = importlib.import_module(f"{library}.nn").FullyShardedDataParallel
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if compute is not None:
        options |= {"mixed_precision": True, "compute_dtype": compute}
    if library == "fairscale":
        options |= {"compute_device": _device(model), "fp32_reduce_scatter": compute is not None}
    for parent, name in units(model):
        setattr(parent, name, kit(getattr(parent, name), **options))
    wrapped = kit(model, **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), **ADAMW)
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


def fully_shard(model: nn.Module, compute: torch.dtype | None = None, **given: Any) -> Trainer:
    """shardkit's FSDP in place."""
    kit = importlib.import_module("shardkit")
    options: dict[str, Any] = {"precision": kit.PrecisionPolicy(compute=compute), **given}
    for parent, name in units(model):
        kit.fully_shard(getattr(parent, name), **options)
    kit.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Trainer(model, optimizer, optimizer.zero_grad)


def compressed(model: nn.Module, reshard: bool = True) -> Trainer:
    """shardkit's FSDP whose parameters and gradients travel as blocks of int8."""
    kit = importlib.import_module("shardkit")
    options = {
        "precision": kit.PrecisionPolicy(compression=kit.Compression()),
        "reduce": kit.ReducePolicy(compression=kit.Compression()),
        "reshard": kit.ReshardPolicy(after_forward=reshard),
    }
    for parent, name in units(model):
        setattr(parent, name, kit.FSDP(getattr(parent, name), **options))
    wrapped = kit.FSDP(model, **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), **ADAMW)
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


def compressed_ddp(model: nn.Module) -> Trainer:
    """ShardedDDP whose gradients travel as blocks of int8."""
    kit = importlib.import_module("shardkit")
    optimizer = kit.OSS(model.parameters(), optim=torch.optim.AdamW, **ADAMW)
    wrapped = kit.ShardedDDP(model, optimizer, reduce=kit.ReducePolicy(compression=kit.Compression()))
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


def torch_fsdp1(model: nn.Module, reshard: bool = True, compute: torch.dtype | None = None) -> Trainer:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP,
        "device_id": _device(model),
    }
    if compute is not None:
        options["mixed_precision"] = MixedPrecision(param_dtype=compute, reduce_dtype=compute)
    for parent, name in units(model):
        setattr(parent, name, FullyShardedDataParallel(getattr(parent, name), **options))
    root = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(root.parameters(), **ADAMW)
    return Trainer(root, optimizer, optimizer.zero_grad)


def torch_fsdp2(model: nn.Module, reshard: bool = True, compute: torch.dtype | None = None) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(_device(model).type, (torch.distributed.get_world_size(),)),
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute),
    }
    for parent, name in units(model):
        fully_shard(getattr(parent, name), **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Trainer(model, optimizer, optimizer.zero_grad)


def deepspeed_3(model: nn.Module) -> Trainer:
    """ZeRO-3 with buffers fit for small models; its defaults are for large ones (5e8 elements)."""
    kit = importlib.import_module("deepspeed")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 2_000_000,
            "stage3_prefetch_bucket_size": 2_000_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1,
            "stage3_max_reuse_distance": 1,
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, _, _, _ = kit.initialize(model=model, optimizer=optimizer, config=settings)
    return Trainer(engine, engine, lambda: None)  # its step clears the gradients


IMPLEMENTATIONS: dict[str, Callable[[nn.Module], Trainer]] = {
    "bare": bare,
    "ddp": ddp,
    "ddp_view": lambda m: ddp(m, bucket_view=True),
    "ddp_zero": ddp_zero,
    "shardkit": lambda m: _sharded("shardkit", m),
    "balanced": balanced,
    "fsdp": fsdp,
    "fully_shard": fully_shard,
    "dtensors": lambda m: fully_shard(m, dtensors=True),
    "fsdp_keep": lambda m: fsdp(m, reshard=False),
    "in_order": lambda m: fully_shard(
        m, reduce=importlib.import_module("shardkit").ReducePolicy(order="fixed")
    ),
    "compressed": compressed,
    "compressed_keep": lambda m: compressed(m, reshard=False),
    "compressed_ddp": compressed_ddp,
    "torch_fsdp1": torch_fsdp1,
    "torch_fsdp1_keep": lambda m: torch_fsdp1(m, reshard=False),
    "torch_fsdp2": torch_fsdp2,
    "torch_fsdp2_keep": lambda m: torch_fsdp2(m, reshard=False),
    "fairscale_fsdp": lambda m: fsdp(m, library="fairscale"),
    "fairscale_fsdp_keep": lambda m: fsdp(m, reshard=False, library="fairscale"),
    "deepspeed_3": deepspeed_3,
    "fairscale": lambda m: _sharded("fairscale", m),
    "fairscale_unbuffered": lambda m: _sharded("fairscale", m, reduce_buffer_size=0),
}
