"""What a reader does to run a snippet: swaps imports, repairs what the document lost, supplies what it leaves open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

SNIPPETS = Path(__file__).parent / "snippets"  # cut from the documents as they are
# shardkit in place of the libraries, everywhere.
IMPORTS = {
    "from fairscale": "from shardkit",
    "torch_xla.distributed.": "shardkit.xla.",
    "torch_xla.core.": "shardkit.xla.",
}
# On a machine without GPUs.
ON_CPU = {
    ".to(rank)": '.to("cpu")',
    ".cuda()": '.to("cpu")',
    "device_ids=[rank], output_device=rank": "device_ids=None",
    "device_ids=[rank]": "device_ids=None",
    "torch.cuda.set_device(rank)": "pass",
    "device=rank": 'device="cpu"',
    '"nccl"': '"gloo"',
}


def snippet(name: str, changes: Mapping[str, str] | None = None) -> str:
    """A snippet's code. Every change has to apply somewhere."""
    text = (SNIPPETS / f"{name}.txt").read_text()
    for old, new in {**IMPORTS, **ON_CPU}.items():
        text = text.replace(old, new)
    for old, new in (changes or {}).items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return text


def indented(text: str, back_to: Mapping[str, int] | None = None) -> str:
    """Code whose indentation the document lost: what follows a colon is in its block, up to the lines named.

    Args:
        text: code; ``def`` may be glued to the line before, and a body to its ``def``.
        back_to: beginnings of lines, and the level they are on.
    """
    text = re.sub(r"(?<=\S)def (?=\w+\()", "\ndef ", text)
    text = re.sub(r"(?m)^(def .*?\):) +(?=\S)", r"\1\n", text)
    lines, level = [], 0
    for line in text.splitlines():
        for start, wanted in (back_to or {}).items():
            if line.startswith(start):
                level = wanted
        lines.append("    " * level + line)
        if line.endswith(":") and not line.startswith("#"):
            level += 1
    return "\n".join(lines) + "\n"


def run(code: str, **names: Any) -> dict[str, Any]:
    """Runs code; returns its names."""
    namespace = {"__name__": "snippet", **names}
    exec(compile(code, "<snippet>", "exec"), namespace)
    return namespace


# ------------------------------------------------------------ what the documents leave open
def awesome_model() -> nn.Module:
    """The same on all ranks; its sizes are not divisible by them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batches(rank: int, count: int = 2, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's (data, target) pairs."""
    generator = torch.Generator().manual_seed(1 + rank)
    return [
        (torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator))
        for _ in range(count)
    ]


def trained_alone(world_size: int, epochs: int, lr: float) -> dict[str, torch.Tensor]:
    """State of the model that one process trains with SGD on the data of all ranks."""
    model = awesome_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    together = list(zip(*(batches(r) for r in range(world_size)), strict=True))
    for _ in range(epochs):
        for parts in together:
            optimizer.zero_grad()
            data, target = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            nn.functional.mse_loss(model(data), target).backward()
            optimizer.step()
    return model.state_dict()
