"""Saves in forks that are each ended at another moment; the file is whole every time."""

import os
import signal
import sys
import torch
import shardkit

path, count = sys.argv[1], int(sys.argv[2])
versions = [{"version": k, "values": torch.full((1 << 16,), float(k))} for k in range(2)]
shardkit.save(versions[0], path)
for k in range(count):
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_REAL, 1e-4 + k * 1e-2 / count)
        while True:
            for version in versions:
                shardkit.save(version, path)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM, status
    found = shardkit.load(path)
    assert set(found["values"].tolist()) == {float(found["version"])}, k
shardkit.save(versions[1], path)
print(sorted(os.listdir(os.path.dirname(path))))
