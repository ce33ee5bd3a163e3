"""A trainer in the manner of transformers 4.28: one loop, whose `sharded` option puts fairscale's classes into it.

Written from its documentation, with swapped imports. ``sharded`` is a set of words: "simple" (OSS and
ShardedDataParallel), "zero_dp_2" or "zero_dp_3" (FullyShardedDataParallel, which gives memory back after forward or
not), with "offload" and "auto_wrap".
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.nn.data_parallel import FullyShardedDataParallel as FullyShardedDDP
from shardkit.nn.data_parallel import ShardedDataParallel as ShardedDDP
from shardkit.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap
from shardkit.optim import OSS
from shardkit.optim.grad_scaler import ShardedGradScaler


@dataclass(frozen=True)
class Arguments:
    """What the command line says."""

    sharded: frozenset[str] = frozenset()
    fp16: bool = False
    accumulation: int = 1
    max_grad_norm: float = 1.0
    lr: float = 0.05
    weight_decay: float = 0.1
    warmup: int = 2


class Classifier(nn.Module):
    """Embeds tokens [B, T], mixes them, and gives the loss where labels [B] come along."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embeddings(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.classifier(x.mean(dim=1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class Trainer:
    """Trains, evaluates, saves and resumes."""

    def __init__(self, args: Arguments, model: nn.Module) -> None:
        self.args, self.model = args, model
        self.is_simple = "simple" in args.sharded
        self.is_fsdp = bool(args.sharded & {"zero_dp_2", "zero_dp_3"})
        self.is_first = not args.sharded or dist.get_rank() == 0
        if self.is_fsdp:
            self.model = self.wrap(model)
        self.create_optimizer()
        if self.is_simple:
            self.model = ShardedDDP(model, self.optimizer)
        self.scaler = None
        if args.fp16:
            self.scaler = (
                ShardedGradScaler(init_scale=64.0)
                if args.sharded
                else torch.amp.GradScaler("cpu", init_scale=64.0)
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        """FullyShardedDataParallel, around parts too with "auto_wrap"."""
        options = {
            "mixed_precision": self.args.fp16,
            "reshard_after_forward": "zero_dp_3" in self.args.sharded,
            "cpu_offload": "offload" in self.args.sharded,
            "compute_device": torch.device("cpu"),
        }
        if "auto_wrap" in self.args.sharded:
            policy = functools.partial(default_auto_wrap_policy, min_num_params=100)
            with enable_wrap(wrapper_cls=FullyShardedDDP, auto_wrap_policy=policy, **options):
                model = auto_wrap(model)
        return FullyShardedDDP(model, **options).to(torch.device("cpu"))

    def create_optimizer(self) -> None:
        """AdamW with decay for matrices only, by name; a schedule that warms up."""
        norms = {
            f"{n}.{p}"
            for n, m in self.model.named_modules()
            if isinstance(m, nn.LayerNorm)
            for p in ("weight", "bias")
        }
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        decays = {n for n, _ in named if n not in norms and not n.endswith("bias")}
        groups = [
            {"params": [p for n, p in named if n in decays], "weight_decay": self.args.weight_decay},
            {"params": [p for n, p in named if n not in decays], "weight_decay": 0.0},
        ]
        if self.is_fsdp:  # names are those of flat parameters
            groups = [{"params": [p for _, p in named], "weight_decay": 0.0}]
        options: dict[str, Any] = {"lr": self.args.lr, "betas": (0.9, 0.99), "eps": 1e-3}
        if self.is_simple:
            self.optimizer: Any = OSS(params=groups, optim=torch.optim.AdamW, **options)
        else:
            self.optimizer = torch.optim.AdamW(groups, **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: min(1.0, (n + 1) / (self.args.warmup + 1))
        )

    def training_step(self, inputs: dict[str, torch.Tensor], divide_by: int) -> float:
        self.model.train()
        half = (
            torch.autocast("cpu", torch.float16)
            if self.args.fp16 and not self.is_fsdp
            else contextlib.nullcontext()
        )
        with half:
            loss = self.model(**inputs)["loss"] / divide_by
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.item()

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """A step of one or more batches; their mean loss."""
        total = 0.0
        for number, inputs in enumerate(batches):
            is_last = number + 1 == len(batches)
            no_sync = self.model.no_sync() if self.args.sharded and not is_last else contextlib.nullcontext()
            with no_sync:
                total += self.training_step(inputs, len(batches))
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.is_simple:
            self.optimizer.clip_grad_norm(self.args.max_grad_norm)
        elif hasattr(self.model, "clip_grad_norm_"):
            self.model.clip_grad_norm_(self.args.max_grad_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        if self.scaler:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            was_run = before <= self.scaler.get_scale()
        else:
            self.optimizer.step()
            was_run = True
        if was_run:
            self.scheduler.step()
        self.model.zero_grad()
        return total

    @torch.no_grad()
    def evaluate(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.model.eval()
        return self.model(**inputs)["logits"].float()

    def full_state(self) -> dict[str, torch.Tensor]:
        """The whole model's, on all ranks."""
        model = self.model.module if self.is_simple else self.model
        return {k: v.detach().clone() for k, v in model.state_dict().items()}

    def save(self, folder: Path) -> None:
        state = self.full_state()
        if self.is_simple:
            self.optimizer.consolidate_state_dict()
        optimizer = self.model.gather_full_optim_state_dict(self.optimizer) if self.is_fsdp else None
        if self.is_first:
            torch.save(state, folder / "model.pt")
            torch.save(optimizer or self.optimizer.state_dict(), folder / "optimizer.pt")
            torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
            if self.scaler:
                torch.save(self.scaler.state_dict(), folder / "scaler.pt")
        if self.args.sharded:
            dist.barrier()

    def resume(self, folder: Path) -> None:
        state = torch.load(folder / "model.pt")
        (self.model.module if self.is_simple else self.model).load_state_dict(state)
        optimizer = torch.load(folder / "optimizer.pt")
        self.optimizer.load_state_dict(
            self.model.get_shard_from_optim_state_dict(optimizer) if self.is_fsdp else optimizer
        )
        self.scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))
        if self.scaler:
            self.scaler.load_state_dict(torch.load(folder / "scaler.pt"))
