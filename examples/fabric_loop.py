"""Lightning's Fabric.

torchrun --nproc-per-node 2 examples/fabric_loop.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning import Fabric

from counting import CLIP, loader, make_model, make_optimizer, options_of, read
from shardkit.integrations.fabric import ShardkitStrategy
from shardkit.types import StateDict


def main(arguments: Sequence[str] | None = None) -> StateDict:
    """Trains; returns the weights."""
    options = options_of(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    strategy = ShardkitStrategy() if world_size > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    net = make_model()
    if options.resume is not None:  # of another script: state as one process has it
        weights, state, _ = read(options.resume)
        net.load_state_dict(weights)
        fabric.save(options.folder / "optimizer.ckpt", state)
        fabric.barrier()
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
    step = 0
    if options.resume is not None:
        fabric.load_raw(options.folder / "optimizer.ckpt", optimizer)
        step = int(next(iter(optimizer.state.values()))["step"])
    for batch in loader(fabric.global_rank, world_size, step):
        if step == options.steps:
            break
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    fabric.print(f"step {step}: loss {loss.item():.4f} on rank 0")
    fabric.save(options.folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    fabric.barrier()
    return net.state_dict()


if __name__ == "__main__":
    main()
