"""Trains on two ranks in namespaces of their own, one of which takes its link down."""

import ctypes
import datetime
import os
import subprocess
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
import shardkit

torch.set_num_threads(1)
names, folder, timeout = sys.argv[1].split(","), sys.argv[2], float(sys.argv[3])


def main(kind_of_store, rank):
    with open(f"/var/run/netns/{names[rank]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = names[rank]
    limit = datetime.timedelta(seconds=timeout)
    if kind_of_store == "file":
        dist.init_process_group(
            "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout=limit
        )
    else:  # of rank 0, beyond the link for the other
        address = "tcp://10.213.77.1:29511"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=limit)

    def meet(where):
        open(f"{folder}/{where} {kind_of_store} {rank}", "w").close()
        until = time.monotonic() + 60
        while len([n for n in os.listdir(folder) if n.startswith(where)]) < 4 and time.monotonic() < until:
            time.sleep(0.05)

    model = shardkit.FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    step()
    meet("ready")
    if rank == 1:
        subprocess.run(["ip", "link", "set", names[1], "down"], check=True)
    began = time.monotonic()
    try:
        for _ in range(1000):
            step()
        kind, text = "none", ""
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    print(
        f"RANK {kind_of_store} {rank} {kind} {time.monotonic() - began:.0f} {text}".replace("\n", " "),
        flush=True,
    )
    meet("done")  # so that the other one is not told by the end of this one


jobs = [(kind, rank) for kind in ("file", "tcp") for rank in range(2)]
for job in jobs:
    if os.fork() == 0:
        try:
            main(*job)
        finally:
            os._exit(0)
for job in jobs:
    os.wait()
