"""A loop written for torch's fully_shard; the import is this library's. Without a launcher it is one process's.

torchrun --nproc-per-node 2 examples/torch_loop.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from counting import CLIP, loader, make_model, make_optimizer, options_of, read
from shardkit import fully_shard  # was: from torch.distributed.fsdp import fully_shard
from shardkit.integrations.sharding import load_whole_state, whole_state
from shardkit.types import Kwargs, StateDict


def main(arguments: Sequence[str] | None = None) -> StateDict:
    """Trains; returns the weights."""
    options = options_of(arguments)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model = make_model()
    if world_size > 1:
        if not dist.is_initialized():
            dist.init_process_group()
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
        settings: Kwargs = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
        settings["dtensors"] = False  # state dicts, and files, are those of one process
        for layer in model.model.layers:
            fully_shard(layer, **settings, reshard_after_forward=True)
        fully_shard([model.model.norm, model.lm_head], **settings, reshard_after_forward=False)
        fully_shard(model, **settings)
    optimizer = make_optimizer(model.parameters())
    step = 0
    if options.resume is not None:
        weights, state, step = read(options.resume)
        model.load_state_dict(weights)
        load_whole_state(optimizer, state)
    for batch in loader(rank, world_size, step):
        if step == options.steps:
            break
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    weights, state = model.state_dict(), whole_state(optimizer, keep_on=rank == 0)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f} on rank 0")
        options.folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": weights, "optimizer": state}, options.folder / "torch.ckpt")
    return weights


if __name__ == "__main__":
    main()
