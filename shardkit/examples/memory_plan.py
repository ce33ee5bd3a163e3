"""What memory a rank needs to train a model of any size with FSDP, computed without holding any of it.

The model is built on the meta device and wrapped by FSDP itself, so units, shards and padding are the real ones.

[Note: activations] What autograd keeps of a transformer block, in numbers of b * t * d elements (b images, t tokens, d
width), with attention that doesn't keep its matrix: inputs of both norms 2, inputs of the linear layers 1 + 1 + 1 + 4,
queries, keys and values 3, input of the activation 4: 16 in all (arXiv 2205.05198, section 4.1, without dropout). With
gradient checkpointing a block keeps its input, 1, and one block at a time has its 16. Stem and head are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from shardkit import FSDP, enable_wrap
from shardkit.backends.imagined import ImaginedBackend

KEPT_BY_BLOCK = 16


class Plan(NamedTuple):
    """Bytes are those of one rank; shards are in fp32, and what is computed with in the dtype that was chosen.

    Attributes:
        parameters: of the whole model, their number.
        ranks, units: how many.
        shards, gradients, state: parameters, their gradients, Adam's two moments.
        largest_unit: the unit with most parameters while it is gathered. FSDP gathers one unit ahead.
        activations, checkpointed: of a step, without and with gradient checkpointing.
    """

    parameters: int
    ranks: int
    units: int
    shards: int
    gradients: int
    state: int
    largest_unit: int
    activations: int
    checkpointed: int

    def report(self, batch_size: int) -> str:
        """As text."""
        lines = {
            "parameters, sharded": self.shards,
            "gradients, sharded": self.gradients,
            "Adam's moments, sharded": self.state,
            "largest unit, gathered": self.largest_unit,
            f"activations of {batch_size} images": self.activations,
            "  with gradient checkpointing": self.checkpointed,
        }
        head = (
            f"{self.parameters:,} parameters in {self.units} units on {self.ranks} ranks; bytes on each rank:"
        )
        rows = [f"{name:32}{count:>18,}  {count / 2**30:9.3f} GiB" for name, count in lines.items()]
        rest = (
            "Activations: 16 elements a token and channel for each block (attention's matrix is not kept); with\n"
            "checkpointing 1 for each block and 16 for the one that is computed again."
        )
        return "\n".join([head, *rows, rest])


def plan(
    build: Callable[[], nn.Module], ranks: int, dtype: torch.dtype, activations: tuple[int, int]
) -> Plan:
    """The plan of a model that passes its units through ``shardkit.wrap`` as it is built.

    Args:
        build: makes the model.
        ranks: how many share it.
        dtype: of gathered parameters and of activations.
        activations: elements of one activation between blocks (b * t * d), and number of blocks.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build().parameters())
        backend = ImaginedBackend(ranks)
        with enable_wrap(wrapper_cls=FSDP, backend=backend):
            model = FSDP(build(), backend=backend)
    gathered = [numel * ranks for numel in own_shard_numels(model)]
    shards = sum(p.numel() * p.element_size() for p in model.parameters())
    between, blocks = activations
    return Plan(
        parameters,
        ranks,
        len(gathered),
        shards,
        gradients=shards,
        state=2 * shards,
        largest_unit=max(gathered) * dtype.itemsize,
        activations=KEPT_BY_BLOCK * blocks * between * dtype.itemsize,
        checkpointed=(blocks + KEPT_BY_BLOCK) * between * dtype.itemsize,
    )


def own_shard_numels(model: nn.Module) -> list[int]:
    """For each unit, the numel of its shards, without those of units inside of it."""
    units = [m for m in model.modules() if isinstance(m, FSDP)]
    found = []
    for unit in units:
        inside = {p for m in units if m is not unit and m in set(unit.modules()) for p in m.parameters()}
        found.append(sum(p.numel() for p in unit.parameters() if p not in inside))
    return found
