"""A self-supervised task in the manner of VISSL: a trunk of FSDP units, heads that are units, all in a root unit.

Written from its documentation, with swapped imports. Crops of several sizes go through the trunk one size after the
other, and their features together through the heads. Checkpoints are one file a rank and a list of these, or one file
for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit.experimental.tooling.layer_memory_tracker import (
    LayerwiseMemoryTracker,
    ProcessGroupTracker,
    ProcessGroupTrackingEvent,
)
from shardkit.nn.checkpoint import checkpoint_wrapper
from shardkit.nn.data_parallel import FullyShardedDataParallel as FSDP
from shardkit.nn.data_parallel import auto_wrap_bn
from shardkit.nn.wrap import enable_wrap, wrap
from shardkit.optim.grad_scaler import ShardedGradScaler

Crops = list[torch.Tensor]  # a batch of images [B, 3, S, S] for each size


@dataclasses.dataclass(frozen=True)
class Config:
    """What a yaml file says."""

    fsdp: bool = True
    flatten_parameters: bool = True
    mixed_precision: bool = False
    compute_dtype: torch.dtype = torch.float16
    fp32_reduce_scatter: bool = False
    checkpoint_activations: bool = True
    track_communications: bool = True
    accumulation: int = 1
    lr: float = 0.05
    clip: float = 1.0


class Tracker(ProcessGroupTracker):
    """All ranks, as a group that counts the elements which are gathered."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD, self._count)
        self.gathered = 0

    def _count(self, event: ProcessGroupTrackingEvent, output: torch.Tensor, shard: torch.Tensor) -> None:
        if event is not ProcessGroupTrackingEvent.allgather or output.numel() != shard.numel() * self.size():
            raise RuntimeError(f"no all-gather: {event}, {output.shape} of {shard.shape}")
        self.gathered += output.numel()


class Wrapping:
    """Makes units as the config says; in one process, modules stay as they are."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tracker = Tracker() if config.fsdp and config.track_communications else None
        self.options: dict[str, Any] = {
            "flatten_parameters": config.flatten_parameters,
            "mixed_precision": config.mixed_precision,
            "compute_dtype": config.compute_dtype if config.mixed_precision else torch.float32,
            "fp32_reduce_scatter": config.fp32_reduce_scatter,
            "compute_device": torch.device("cpu"),
            "bucket_cap_mb": 0,
        }
        if self.tracker is not None:
            self.options["process_group"] = self.tracker

    def unit(self, module: nn.Module, *, is_layer: bool = False) -> nn.Module:
        """The module as a unit; of a layer, batch norms are units in full precision before, and it is recomputed."""
        if not self.config.fsdp:
            return module
        if is_layer:
            module = auto_wrap_bn(module, single_rank_pg=False)
            if self.config.checkpoint_activations:
                module = checkpoint_wrapper(module)
        with enable_wrap(wrapper_cls=FSDP, **self.options):
            return wrap(module)


# ------------------------------------------------------------------ models
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class Trunk(nn.Module):
    """Images [B, 3, S, S] to features [B, 6]."""

    def __init__(self, wrapping: Wrapping) -> None:
        super().__init__()
        self.stem = wrapping.unit(
            nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()), is_layer=True
        )
        self.stage1 = nn.Sequential(*(wrapping.unit(Block(6), is_layer=True) for _ in range(2)))
        self.scale = nn.Parameter(torch.ones(6))  # of the trunk's own unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.stage1(self.stem(x)).mean(dim=(2, 3))
        return y * self.scale.to(y.dtype)


class PrototypesHead(nn.Module):
    """A projection, and scores for prototypes of length 1."""

    def __init__(self, wrapping: Wrapping) -> None:
        super().__init__()
        self.projection = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
        self.prototypes = wrapping.unit(nn.Linear(5, 7, bias=False))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.prototypes(F.normalize(self.projection(features), dim=1))
        return scores

    @torch.no_grad()
    def normalize_prototypes(self) -> None:
        whole: Any = contextlib.nullcontext()
        if isinstance(self.prototypes, FSDP):
            whole = self.prototypes.summon_full_params()
        with whole:
            weight: Any = self.prototypes.weight
            weight.copy_(F.normalize(weight, dim=1))


class BaseModel(nn.Module):
    """Several inputs, several heads."""

    def __init__(self, wrapping: Wrapping) -> None:
        super().__init__()
        self.trunk = wrapping.unit(Trunk(wrapping))
        self.heads = nn.ModuleList([wrapping.unit(PrototypesHead(wrapping)), wrapping.unit(nn.Linear(6, 4))])

    def forward(self, crops: Crops) -> list[torch.Tensor]:
        features = torch.cat([self.trunk(images) for images in crops])
        return [head(features) for head in self.heads]


# ------------------------------------------------------------------ the task
class Task:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.wrapping = Wrapping(config)
        self.rank = dist.get_rank() if config.fsdp else 0
        self.world = dist.get_world_size() if config.fsdp else 1
        self.iteration = 0
        torch.manual_seed(2)
        self.model: Any = self.wrapping.unit(BaseModel(self.wrapping))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, eps=1e-3)
        is_half = config.mixed_precision and config.compute_dtype == torch.float16
        self.scaler = ShardedGradScaler(init_scale=64.0, enabled=is_half) if config.fsdp else None

    @property
    def base_model(self) -> BaseModel:
        base: Any = self.model.module if self.config.fsdp else self.model
        while not isinstance(base, BaseModel):  # flattened parameters are in a wrapper of their own
            base = base.module
        return base

    def loss(self, crops: Crops) -> torch.Tensor:
        """Crops of one image want the same prototype, the brighter channel is to be told."""
        scores, guesses = (y.float() for y in self.model(crops))
        one, *others = scores.chunk(len(crops))
        target = torch.softmax(one.detach() / 0.5, dim=1)
        swapped = sum(F.cross_entropy(other / 0.3, target) for other in others)
        labels = torch.cat([images.mean(dim=(2, 3)).argmax(dim=1) for images in crops])
        return swapped + F.cross_entropy(guesses, labels)

    def step(self, batches: Sequence[Any]) -> dict[str, float]:
        """One step over as many batches as are accumulated."""
        self.model.train()
        self.heads_before_step()
        self.optimizer.zero_grad()
        losses = []
        for number, batch in enumerate(batches):
            is_last = number + 1 == len(batches)
            with contextlib.nullcontext() if is_last or not self.config.fsdp else self.model.no_sync():
                losses.append(self.forward_backward(batch))
        norm = self.clip_and_step()
        self.iteration += 1
        return {"loss": sum(losses) / len(losses), "norm": float(norm)}

    def heads_before_step(self) -> None:
        head: Any = self.base_model.heads[0]
        while not isinstance(head, PrototypesHead):
            head = head.module
        head.normalize_prototypes()

    def forward_backward(self, batch: Any) -> float:
        loss = self.loss(batch)
        self.backward(loss / self.config.accumulation)
        return loss.item()

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip_and_step(self) -> torch.Tensor:
        if self.scaler is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            return norm
        self.scaler.unscale_(self.optimizer)
        norm = self.model.clip_grad_norm_(self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def step_with_memory_tracked(self, batches: Sequence[Any]) -> tuple[dict[str, float], int]:
        """A step, and how many bytes its forward gathered, as memory trackers count them layer by layer."""
        tracker = LayerwiseMemoryTracker()
        tracker.monitor(self.model)
        stats = self.step(batches)
        tracker.stop()
        return stats, sum(trace.all_gathered for trace in tracker.forward_traces)

    @torch.no_grad()
    def extract_features(self, images: torch.Tensor) -> torch.Tensor:
        """Of the trunk alone, which is a root for the time; the whole model goes on training afterwards."""
        self.reset_units()
        self.model.eval()
        trunk: Any = self.base_model.trunk
        features: torch.Tensor = trunk(images)
        if self.config.fsdp and (not trunk._is_root or self.model._is_root is not None):
            raise RuntimeError("the trunk was to be a root")
        self.reset_units()
        return features.float()

    def reset_units(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDP) and module._is_root is not None:
                module._reset_lazy_init()

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        with self.model.summon_full_params() if self.config.fsdp else contextlib.nullcontext():
            yield self.model

    # -------------------------------------------------------------- checkpoints
    def save_shards(self, folder: Path) -> None:
        """One file a rank, and one that lists them."""
        content = {
            "type": "shard",
            "model": self.model.local_state_dict(),
            "meta": self.model.local_metadata_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
        }
        torch.save(content, folder / f"shard{self.rank}.pt")
        if self.rank == 0:
            shards = [f"shard{rank}.pt" for rank in range(self.world)]
            torch.save({"type": "shard_list", "shards": shards}, folder / "checkpoint.pt")
        dist.barrier()

    def load_shards(self, folder: Path) -> None:
        """On as many ranks as saved them."""
        names = torch.load(folder / "checkpoint.pt")["shards"]
        content = torch.load(folder / names[self.rank])
        self.model.load_local_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.iteration = content["iteration"]

    def save_whole_optimizer(self, folder: Path) -> None:
        whole = self.model.gather_full_optim_state_dict(self.optimizer, recipient_rank=0)
        if self.rank == 0:
            torch.save(whole, folder / "optimizer.pt")
        dist.barrier()

    def load_whole(self, folder: Path) -> None:
        """From what :func:`consolidate` has made of the shards, on any number of ranks."""
        content = torch.load(folder / "consolidated.pt")
        optimizer = torch.load(folder / "optimizer.pt")
        self.model.load_state_dict(content["model"])
        if self.config.fsdp:
            optimizer = self.model.get_shard_from_optim_state_dict(optimizer)
        else:
            optimizer = self._in_order(optimizer, content["names"])
        self.optimizer.load_state_dict(optimizer)
        self.iteration = content["iteration"]

    def _in_order(self, optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Parameters of units come unit by unit; the plain model has another order."""
        ids = {name: number for number, (name, _) in enumerate(self.model.named_parameters())}
        (group,) = optimizer["param_groups"]
        return {
            "state": {ids[names[i]]: state for i, state in optimizer["state"].items()},
            "param_groups": [{**group, "params": list(range(len(ids)))}],
        }


def consolidate(folder: Path) -> dict[str, torch.Tensor]:
    """One file of the shards' files, without a process group."""
    shards = [torch.load(folder / name) for name in torch.load(folder / "checkpoint.pt")["shards"]]
    whole: dict[str, torch.Tensor] = FSDP.consolidate_shard_weights(
        shard_weights=[s["model"] for s in shards], shard_metadata=[s["meta"] for s in shards]
    )
    names = [
        f"{unit['fsdp_path']}.{name}".removeprefix(".")
        for unit in shards[0]["meta"]["param_metadata"]
        for param in unit["params"].values()
        for name in param["names"]
    ]
    torch.save(
        {"model": whole, "names": names, "iteration": shards[0]["iteration"]}, folder / "consolidated.pt"
    )
    return whole
