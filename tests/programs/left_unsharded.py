"""Ends as one rank with units that ``unshard()`` and ``summon_full_params()`` show, and that were written to."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from shardkit import FSDP, fully_shard

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(5, 7), dtensors=sys.argv[1] == "True")
    model.unshard()  # type: ignore[operator]
    other = FSDP(nn.Linear(5, 7))
    shown = other.summon_full_params()
    shown.__enter__()
    with torch.no_grad():
        model.weight.fill_(2.0)
        other.module.weight.fill_(2.0)
    print("end")
