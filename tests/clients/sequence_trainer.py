"""A trainer in the manner of fairseq and metaseq: everything comes from a config, FSDP is one of its options.

What was ``from fairscale...`` is ``from shardkit...``; nothing else knows which of the two it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit.nn.checkpoint import checkpoint_wrapper
from shardkit.nn.data_parallel import FullyShardedDataParallel as FSDP
from shardkit.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap
from shardkit.optim.grad_scaler import ShardedGradScaler


@dataclasses.dataclass
class Config:
    """What a command line would give."""

    ddp_backend: str = "fully_sharded"  # or "none": one process
    vocabulary: int = 23
    width: int = 12
    heads: int = 2
    layers: int = 2
    lr: float = 0.02
    weight_decay: float = 0.01
    update_freq: int = 2
    clip_norm: float = 0.5
    fp16: bool = False
    bf16: bool = False
    fp32_reduce_scatter: bool = False
    no_reshard_after_forward: bool = False
    use_sharded_state: bool = False
    checkpoint_activations: bool = True
    flatten_parameters: bool = True
    min_params_to_wrap: int = 200


class ShardedModule(FSDP):
    """FSDP whose state dict is sharded or whole, as the config says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.use_sharded_state = kwargs.pop("use_sharded_state", False)
        super().__init__(*args, **kwargs)

    @property
    def unwrapped_module(self) -> nn.Module:
        return self.module.module if self.flatten_parameters else self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.use_sharded_state:
            return super().local_state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        if self.use_sharded_state:
            return super().load_local_state_dict(state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict=strict)


@contextlib.contextmanager
def fsdp_enable_wrap(config: Config) -> Iterator[None]:
    if config.ddp_backend != "fully_sharded":
        yield
        return
    options = {
        "process_group": dist.group.WORLD,
        "reshard_after_forward": not config.no_reshard_after_forward,
        "mixed_precision": config.fp16 or config.bf16,
        "compute_dtype": torch.bfloat16 if config.bf16 else None,
        "fp32_reduce_scatter": config.fp32_reduce_scatter,
        "flatten_parameters": config.flatten_parameters,
        "compute_device": torch.device("cpu"),
        "bucket_cap_mb": 0,
        "use_sharded_state": config.use_sharded_state,
    }
    with enable_wrap(wrapper_cls=ShardedModule, **options):
        yield


def fsdp_wrap(module: nn.Module, config: Config) -> nn.Module:
    """Wraps a layer if it is worth it."""
    if config.min_params_to_wrap <= sum(p.numel() for p in module.parameters()):
        return wrap(module)
    return module


class DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm, self.final_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.fc1, self.fc2 = (
            nn.Linear(config.width, 4 * config.width),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.fc2(F.gelu(self.fc1(self.final_norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(self.build_layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.register_buffer("updates", torch.zeros(1))

    @staticmethod
    def build_layer(config: Config) -> nn.Module:
        layer: nn.Module = DecoderLayer(config)
        if config.checkpoint_activations:
            layer = checkpoint_wrapper(layer)
        return fsdp_wrap(layer, config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)  # tied


def shared_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where parameters stand that are found in several registries, which a move to another device may separate."""
    places: dict[Any, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            places.setdefault(param, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def tie_again(places: list[list[tuple[nn.Module, str]]]) -> None:
    """One parameter at all of these places."""
    for (first, own), *others in places:
        for module, name in others:
            setattr(module, name, getattr(first, own))


class Trainer:
    """Steps, evaluates, saves and loads; one for every kind of parallelism."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.is_fsdp = config.ddp_backend == "fully_sharded"
        self.rank = dist.get_rank() if self.is_fsdp else 0
        self.world = dist.get_world_size() if self.is_fsdp else 1
        torch.manual_seed(1)
        with fsdp_enable_wrap(config):
            model: nn.Module = LanguageModel(config)
            self.model = (
                fsdp_wrap(model, dataclasses.replace(config, min_params_to_wrap=0)) if self.is_fsdp else model
            )
        shared = shared_places(self.model)
        self.model = self.model.to(torch.device("cpu"))
        tie_again(shared)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay, eps=1e-3
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + 0.1 * n))
        self.scaler = ShardedGradScaler(init_scale=128.0, enabled=config.fp16) if self.is_fsdp else None
        self.num_updates = 0

    # ------------------------------------------------------------ steps
    def loss(self, sample: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sum over tokens, and how many there are: ranks have different numbers."""
        logits = self.model(sample[:, :-1]).float()
        target = sample[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()

    def train_step(self, samples: list[torch.Tensor]) -> dict[str, float]:
        self.model.train()
        self.optimizer.zero_grad()
        total, size = torch.zeros(()), 0
        for i, sample in enumerate(samples):
            last = i + 1 == len(samples)
            with contextlib.nullcontext() if last or not self.is_fsdp else self.model.no_sync():
                loss, tokens = self.loss(sample)
                (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
            total, size = total + loss.detach(), size + tokens
        summed = torch.tensor([float(total), float(size)])
        if self.is_fsdp:
            dist.all_reduce(summed)
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
        # FSDP has averaged over ranks; what counts is the mean over tokens
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(self.world / summed[1])
        norm = self.clip_grad_norm(self.config.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.scheduler.step()
        self.num_updates += 1
        return {"loss": float(summed[0] / summed[1]), "gnorm": float(norm)}

    def clip_grad_norm(self, clip_norm: float) -> torch.Tensor:
        if self.is_fsdp:
            norm: torch.Tensor = self.model.clip_grad_norm_(clip_norm)
            return norm
        return nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)

    @torch.no_grad()
    def valid_step(self, sample: torch.Tensor) -> float:
        self.model.eval()
        loss, tokens = self.loss(sample)
        return float(loss / tokens)

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The model as one process has it."""
        with self.model.summon_full_params() if self.is_fsdp else contextlib.nullcontext():
            yield self.model

    # ------------------------------------------------------------ checkpoints
    def checkpoint_suffix(self) -> str:
        return f"-shard{self.rank}" if self.is_fsdp and self.config.use_sharded_state else ""

    def save_checkpoint(self, folder: str) -> None:
        state: dict[str, Any] = {"model": self.model.state_dict(), "num_updates": self.num_updates}
        if self.is_fsdp and not self.config.use_sharded_state:
            state["optimizer"] = self.model.gather_full_optim_state_dict(self.optimizer)
        else:
            state["optimizer"] = self.optimizer.state_dict()
            if self.is_fsdp:
                state["shard_metadata"] = self.model.local_metadata_dict()
        state["scheduler"] = self.scheduler.state_dict()
        if self.rank == 0 or self.checkpoint_suffix():
            torch.save(state, os.path.join(folder, f"checkpoint{self.checkpoint_suffix()}.pt"))
        if self.is_fsdp:
            dist.barrier()

    def load_checkpoint(self, folder: str) -> None:
        state = torch.load(os.path.join(folder, f"checkpoint{self.checkpoint_suffix()}.pt"))
        self.model.load_state_dict(state["model"])
        optimizer_state = state["optimizer"]
        if self.is_fsdp and not self.config.use_sharded_state:
            optimizer_state = self.model.get_shard_from_optim_state_dict(optimizer_state)
        self.optimizer.load_state_dict(optimizer_state)
        self.scheduler.load_state_dict(state["scheduler"])
        self.num_updates = state["num_updates"]


def consolidate(folder: str, world: int) -> dict[str, torch.Tensor]:
    """Sharded checkpoints as one, as an offline script does it."""
    states = [torch.load(os.path.join(folder, f"checkpoint-shard{rank}.pt")) for rank in range(world)]
    return FSDP.consolidate_shard_weights([s["model"] for s in states], [s["shard_metadata"] for s in states])


def wrapped_by_size(config: Config) -> nn.Module:
    """The same model, wrapped by a policy instead of layer by layer."""
    torch.manual_seed(1)
    plain = LanguageModel(dataclasses.replace(config, ddp_backend="none"))

    def policy(**kwargs: Any) -> bool:
        # the embedding's weight is used outside of it
        return default_auto_wrap_policy(
            **kwargs,
            min_num_params=config.min_params_to_wrap,
            exclude_wrap_modules={nn.ModuleList, nn.Embedding},
        )

    with fsdp_enable_wrap(config):
        return wrap(auto_wrap(plain, policy))
