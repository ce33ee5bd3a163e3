"""Saves a training in forks, each killed at another call that changes a folder; then again, in the background."""

import os
import sys
import torch
import shardkit
from shardkit.backend import get_backend
from shardkit.checkpoint.format.manifest import read_manifest, refuse_damage
from tests.started.killing import die_at

launch = get_backend("simulated").launch


def train(rank, folder, background, first, last):
    model = torch.nn.Linear(3, 3)
    for step in range(first, last):
        with torch.no_grad():
            model.weight.fill_(step)
        shardkit.save(folder, model=model, step=step, keep=1, async_=background).wait()


for background in (False, True):
    folder = os.path.join(sys.argv[1], str(background))
    launch(train, 2, (folder, background, 1, 2))
    points = 0
    for k in range(200):
        before = int(shardkit.latest(folder)[-8:])
        child = os.fork()
        if not child:
            die_at(k, ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"))
            launch(train, 2, (folder, background, before + 1, before + 2))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        points += 1
        found = shardkit.latest(folder)
        model = torch.nn.Linear(3, 3)
        step = shardkit.restore(folder, model=model).step
        refuse_damage(found, manifest := read_manifest(found))
        assert manifest.step == step in (before, before + 1), k
        assert set(model.weight.flatten().tolist()) == {float(step)}, k
        if status == 0:
            assert step == before + 1
            break
    assert points > 20 and status == 0, points
    launch(train, 2, (folder, background, before + 5, before + 6))
    print(sorted(os.listdir(folder)) == [f"step-{before + 5:08d}"])
