"""A small Llama that learns to count, which the scripts of frameworks train; and checkpoints, whoever wrote them.

Each script gives the weights of one process::

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --folder out --steps 4
    torchrun --nproc-per-node 2 examples/fabric_loop.py --resume out/checkpoint-4 --folder out
    python examples/torch_loop.py --resume out/fabric.ckpt --steps 12        # one process
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit.types import Framework, StateDict

BATCH = 4  # of all ranks together
CLIP = 1.0


def options_of(arguments: Sequence[str] | None) -> Namespace:
    """The flags of a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="of the optimizer, in all")
    parser.add_argument(
        "--folder", type=Path, default=Path("frameworks-out"), help="where checkpoints are written"
    )
    parser.add_argument("--resume", type=Path, help="a checkpoint of any of these scripts")
    return parser.parse_args(arguments)


def make_model() -> Framework:
    """The same on all ranks."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """``eps`` is large, so that what differs in the last bits of small gradients stays small."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)


class Counting(Dataset):
    """Rows of eight numbers that go up by one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(8) + 7 * index) % 64
        return {"input_ids": row, "labels": row}


def loader(rank: int, world_size: int, first_step: int = 0) -> Framework:
    """This rank's part of each batch, in order."""
    rows = range(first_step * BATCH + rank, len(Counting()), world_size)
    return DataLoader(Subset(Counting(), rows), batch_size=BATCH // world_size)


def read(path: Path) -> tuple[StateDict, StateDict, int]:
    """State of model and optimizer, and the number of steps, of a checkpoint of any of these scripts."""
    if path.is_dir():  # transformers' Trainer, accelerate
        model = LlamaForCausalLM.from_pretrained(path).state_dict()
        names = [path / name for name in ("optimizer.pt", "optimizer.bin")]
        optimizer = torch.load(next(p for p in names if p.exists()), weights_only=True)
        return model, optimizer, steps_of(optimizer)
    saved = torch.load(path, weights_only=True)
    if "optimizer_states" in saved:  # Lightning's Trainer
        model = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
        return model, saved["optimizer_states"][0], steps_of(saved["optimizer_states"][0])
    return saved["model"], saved["optimizer"], steps_of(saved["optimizer"])


def steps_of(optimizer: StateDict) -> int:
    """Which an optimizer counts itself."""
    return int(next(iter(optimizer["state"].values()))["step"])
