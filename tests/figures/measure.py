"""Counts what a training step costs on each rank, for several implementations, and prints it as JSON.

python -m tests.figures.measure --world-size 2 --implementations bare,shardkit,fairscale
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.figures.network import enter_private_network, loopback_bytes

WARM = 2
SHORT = 16  # tokens: calls and bytes that are sent depend on parameters alone
GROWING = 20  # layers in which something would grow
MEMORY_ALONE = ("torch_fsdp2",)  # what is only the measure of another's memory


def _train_step(trainer: Any, model_name: str, count: int, rank: int, length: int) -> None:
    from tests.figures.gpt import loss

    loss(model_name, trainer.model, count, rank, length).backward()
    trainer.optimizer.step()
    trainer.zero_grad()


@contextlib.contextmanager
def _on_the_wire(sent: list[int], counts: bool) -> Iterator[None]:
    """Adds the bytes that all ranks send inside, if asked to."""
    import torch.distributed as dist

    if not counts:
        yield
        return
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    yield
    dist.barrier()
    sent.append(loopback_bytes() - before)


def memory_of_step(rank: int, implementation: str, model_name: str) -> dict[str, int]:
    """Bytes that one rank holds, with batches as the benchmarks have."""
    from tests.figures.counters import memory_of
    from tests.figures.gpt import build
    from tests.figures.implementations import IMPLEMENTATIONS

    memory = memory_of(
        lambda: IMPLEMENTATIONS[implementation](build(model_name)),
        lambda trainer, count: _train_step(trainer, model_name, count, rank, 0),
    )
    return {"resident": memory.resident, "peak": memory.peak}


def count_step(
    rank: int, implementation: str, model_name: str, wire: bool, length: int = 0
) -> dict[str, Any]:
    """The figures of one rank; all but memory with sequences of so many tokens (0: as the benchmarks have)."""
    import torch.distributed as dist

    from tests.figures.counters import PACKAGE, CallCounter, OperationCounter, quiet_collector
    from tests.figures.gpt import build
    from tests.figures.implementations import IMPLEMENTATIONS

    make, world_size = IMPLEMENTATIONS[implementation], dist.get_world_size()
    trainer = make(build(model_name))
    for count in range(WARM):
        _train_step(trainer, model_name, count, rank, length)
    sent: list[int] = []
    with quiet_collector():
        with _on_the_wire(sent, wire), OperationCounter(world_size) as operations:
            _train_step(trainer, model_name, WARM, rank, length)
        counted = []
        # a thread of gloo's may hold a buffer a moment longer, and views of it are looked for
        for count in range(3):
            with _on_the_wire(sent, wire), CallCounter() as calls:
                _train_step(trainer, model_name, WARM + 1 + count, rank, length)
            counted.append(calls)
        calls = min(counted, key=lambda each: each.calls)
    figures: dict[str, Any] = {
        "operations": operations.operations,
        "calls": calls.calls,
        "files": len({path for path, _ in calls.by_function if path.startswith(PACKAGE)}),
        "tracing": sum(n for (path, _), n in calls.by_function.items() if "/shardkit/tracing/" in path),
        "collectives": dict(operations.collectives),
        "sent": operations.sent,
        "moved": operations.moved,
    }
    if wire:
        # The least of these steps: on a busy machine the kernel now and then sends a packet twice.
        figures["wire"] = min(sent) / world_size
    del trainer
    gc.collect()
    figures |= memory_of_step(rank, implementation, model_name)
    dist.barrier()
    return figures


def wire_of_collectives(rank: int, sizes: list[int]) -> dict[str, float]:
    """Wire bytes that a rank sends (mean over ranks) for the backend's own collectives, as a multiple of N (W-1)/W.

    Args:
        sizes: numel of each rank's part, in fp32.
    """
    import torch
    import torch.distributed as dist

    from shardkit.backend import get_backend

    group = get_backend("gloo").group(None)
    total, world_size = sum(sizes), dist.get_world_size()
    whole, part = torch.ones(total), torch.ones(sizes[rank])
    found = {}
    for name in ("reduce_scatter", "all_gather"):
        least = float("inf")
        for _ in range(3):  # the first may open connections, and any may be cut into more packets than needed
            dist.barrier()
            before = loopback_bytes()
            dist.barrier()
            if name == "reduce_scatter":
                group.reduce_scatter_into(part, whole, sizes)
            else:
                group.all_gather_into(whole, part, sizes)
            dist.barrier()
            least = min(least, (loopback_bytes() - before) / (4 * total * (world_size - 1)))
            dist.barrier()
        found[name] = least
    return found


def growth(rank: int, implementation: str, steps: int) -> dict[str, int]:
    """What grew from one step to ``steps`` later: bytes in tensors, Python objects."""
    from tests.figures.counters import live_tensor_bytes
    from tests.figures.gpt import build
    from tests.figures.implementations import IMPLEMENTATIONS

    model: Any = build("tinymlp")
    model.layers = model.layers[:GROWING]
    trainer = IMPLEMENTATIONS[implementation](model)

    def run(count: int) -> tuple[int, int]:
        for i in range(count):
            _train_step(trainer, "tinymlp", i, rank, 0)
        time.sleep(0.5)  # a thread of gloo lets go of what a collective sent some time after it
        gc.collect()  # which stops tracking tuples, too
        return live_tensor_bytes(), len(gc.get_objects())

    before, after = run(10), run(steps)
    return {"bytes": after[0] - before[0], "objects": after[1] - before[1]}


def ranks_of(implementation: str, world_size: int, timeout: float, **environment: str) -> Any:
    """Rank processes in which it runs."""
    from shardkit.backends.processes import RankPool

    start = None
    if implementation.startswith("fairscale_fsdp"):  # it insists on CUDA
        from shardkit.tools.verify.fairscale_ranks import start_rank as start
    elif implementation.startswith("deepspeed"):
        environment["DS_ACCELERATOR"] = "cpu"
    environment["OMP_NUM_THREADS"] = "1"
    return RankPool(world_size, timeout=timeout, start=start, environment=environment)


def _figures_of(pool: Any, name: str, model: str, wire: bool) -> list[dict[str, Any]]:
    if name in MEMORY_ALONE:
        return pool.run(memory_of_step, name, model)
    return pool.run(count_step, name, model, wire, SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--implementations", default="bare,shardkit,balanced,fairscale")
    parser.add_argument("--model", default="gpt", choices=["gpt", "tinymlp", "lora"])
    parser.add_argument("--extras", action="store_true", help="also wire bytes of collectives, and growth")
    options = parser.parse_args()
    no_wire = enter_private_network()
    found: dict[str, Any] = {"no_wire": no_wire, "figures": {}}
    names = options.implementations.split(",")
    for name in [n for n in names if n.startswith(("fairscale_fsdp", "deepspeed"))]:
        names.remove(name)
        with ranks_of(name, options.world_size, 300) as pool:  # of its own
            found["figures"][name] = _figures_of(pool, name, options.model, not no_wire)
    with ranks_of("", options.world_size, 300) as pool:
        for name in names:
            found["figures"][name] = _figures_of(pool, name, options.model, not no_wire)
        if options.extras:
            if options.world_size == 2:
                found["growth"] = {name: pool.run(growth, name, 50) for name in ("shardkit", "fsdp")}
            if not no_wire:
                even = [1 << 20] * options.world_size
                uneven = [(i + 1) << 19 for i in range(options.world_size)]
                small = [1 << 12] * options.world_size
                found["collectives"] = {
                    name: pool.run(wire_of_collectives, sizes)[0]
                    for name, sizes in (("even", even), ("uneven", uneven), ("small", small))
                }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
