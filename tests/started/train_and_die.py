"""Trains over 480 samples, 12 in a step, and notes which it has used; dies where it is told to, once."""

import os
import signal
import threading
import time
from pathlib import Path


def dies(phase, step):
    if os.environ.get("DIES_IN") == phase and step == 12 and not Path(os.environ["FAULT"]).exists():
        Path(os.environ["FAULT"]).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


dies("start", 12)
import torch
import torch.distributed as dist
import shardkit


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, i):
        return torch.tensor([float(i)])


class Model(torch.nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        dies("forward", now[0])
        if x.requires_grad:
            x.register_hook(lambda _: dies("backward", now[0]))
        return self[1](x)


now = [0]


def train(rank):
    torch.manual_seed(0)
    model = Model(torch.nn.Linear(1, 8), torch.nn.Linear(8, 1))
    shardkit.fully_shard(model[1])
    shardkit.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.register_step_pre_hook(lambda *_: dies("optimizer", now[0]))
    loader, used, ranks = shardkit.ResumableLoader(Numbers(), 12, seed=1), [], dist.get_world_size()
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if shardkit.latest("saved"):
        found = shardkit.restore("saved", **state)
        now[0], used = found.step, list(found.extra["used"])
    if rank == 0:
        print("WITH", ranks, "FROM", now[0], flush=True)
    for x in loader:
        now[0] += 1
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        parts = [None] * ranks
        dist.all_gather_object(parts, x.flatten().int().tolist())
        used += sum(parts, [])
        if now[0] % 4 == 0:
            if (
                os.environ.get("DIES_IN") == "save"
                and now[0] == 12
                and not Path(os.environ["FAULT"]).exists()
            ):
                threading.Timer(0.004, dies, ("save", 12)).start()
            shardkit.save("saved", step=now[0], extra={"used": used}, **state)
        if rank == 0:
            Path("step").write_text(str(now[0]))
        time.sleep(0.05)
    if rank == 0:
        print("USED", len(used), len(set(used)), flush=True)


shardkit.launch(train, int(os.environ["WORLD_SIZE"]))
