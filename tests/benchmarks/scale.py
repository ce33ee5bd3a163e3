"""What sharding a 10-billion-parameter vision transformer costs each of many ranks, without any of them.

    python tests/benchmarks/scale.py --world-sizes 128,1024

No tensor has values here (meta device, or torch's FakeTensorMode), and no byte is sent; what a training step allocates
between steps and what it would send is counted, for shardkit's FSDP and for torch's FSDP2 (fully_shard), fp32 with
AdamW, one unit a block. "least" is what even shards without padding need, with the root and the last block gathered
once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.figures.counters import OperationCounter
from vit import Config, VisionTransformer

IMAGE, DEPTH, BATCH = 224, 32, 8
STEPS = 3  # the last one is counted: the order of units is known then


def transformer(depth: int) -> VisionTransformer:
    """10,077,917,160 parameters with 32 blocks."""
    return VisionTransformer(Config(num_blocks=depth))


class Cost(NamedTuple):
    """Of one rank; bytes in fp32. The first three are held between steps, gradients from backward to step.

    Attributes:
        state: Adam's two moments.
        sent: bytes in a step, averaged over ranks.
        operations: dispatched ATen operations of a step.
    """

    parameters: int
    gradients: int
    state: int
    sent: float
    collectives: int
    operations: int


def _bytes(tensors: Iterable[Any]) -> int:
    """Of tensors, or of the part of distributed ones that is here."""
    return sum(t.numel() * t.element_size() for t in (getattr(t, "_local_tensor", t) for t in tensors))


def _train(
    model: nn.Module, world_size: int, counted: Callable[[OperationCounter], tuple[float, int]]
) -> Cost:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(STEPS):
        with OperationCounter(world_size) as counter:
            logits = model(torch.randn(BATCH, 3, IMAGE, IMAGE))
            functional.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long)).backward()
            gradients = _bytes(p.grad for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        sent, collectives = counted(counter)
    moments = (s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))
    return Cost(_bytes(model.parameters()), gradients, _bytes(moments), sent, collectives, counter.operations)


def shardkit_cost(world_size: int, depth: int) -> Cost:
    """shardkit's FSDP."""
    from shardkit import FSDP
    from shardkit.tools.estimate.devices import CountingBackend

    backend = CountingBackend(world_size)
    group = backend.group()

    def counted(_: OperationCounter) -> tuple[float, int]:
        found = group.sent, sum(group.collectives.values())
        group.reset()
        return found

    with torch.device("meta"):
        model = transformer(depth)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = FSDP(block, backend=backend)
        wrapped = FSDP(model, backend=backend)
        group.reset()
        return _train(wrapped, world_size, counted)


def torch_cost(world_size: int, depth: int) -> Cost:
    """torch's FSDP2."""
    # Importing it says what collectives do with tensors without values.
    importlib.import_module("torch.distributed._tools.fake_collectives")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _imagined_ranks(world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        with FakeTensorMode():
            model = transformer(depth)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return _train(model, world_size, lambda c: (c.sent, sum(c.collectives.values())))


@contextmanager
def _imagined_ranks(world_size: int) -> Iterator[None]:
    """torch.distributed as rank 0 of that many sees it; the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def least_cost(world_size: int, depth: int) -> Cost:
    """Without padding, every collective as large as it has to be; nothing of the root or the last block twice."""
    with torch.device("meta"):
        model = transformer(depth)
    whole, block = _bytes(model.parameters()), _bytes(model.blocks[0].parameters())
    again = (depth - 1) * block
    part = -(-whole // world_size)
    return Cost(part, part, 2 * part, (2 * whole + again) * (world_size - 1) / world_size, 3 * depth + 1, 0)


IMPLEMENTATIONS = {"least": least_cost, "shardkit": shardkit_cost, "torch_fsdp2": torch_cost}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-sizes", default="128,1024")
    parser.add_argument("--depth", type=int, default=DEPTH, help="blocks")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    worlds = [int(w) for w in options.world_sizes.split(",")]
    found = {
        w: {name: cost(w, options.depth)._asdict() for name, cost in IMPLEMENTATIONS.items()} for w in worlds
    }
    if options.json:
        print(json.dumps(found))
        return
    print("MB a rank: parameters, gradients, Adam's moments; GB sent, collectives and operations a step")
    print(
        f"{'ranks':>6} {'':12}{'parameters':>12}{'gradients':>11}{'moments':>10}{'sent GB':>10}{'coll.':>7}{'ops':>9}"
    )
    for world_size, costs in found.items():
        for name, cost in costs.items():
            held = "".join(
                f"{cost[k] / 1e6:{width}.2f}"
                for k, width in (("parameters", 12), ("gradients", 11), ("state", 10))
            )
            operations = cost["operations"] or "-"
            print(
                f"{world_size:6} {name:12}{held}{cost['sent'] / 1e9:10.2f}{cost['collectives']:7}{operations:>9}"
            )


if __name__ == "__main__":
    main()
