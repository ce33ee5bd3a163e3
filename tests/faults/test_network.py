"""A network link that goes down, between two network namespaces of this machine (as root on Linux)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 6.0  # seconds, of the process group
LATEST = 60.0  # the machine is shared

SCRIPT = """
import ctypes, datetime, os, subprocess, sys, time
import torch, torch.distributed as dist
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
    print(f"RANK {kind_of_store} {rank} {kind} {time.monotonic() - began:.0f} {text}".replace("\\n", " "), flush=True)
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
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two, connected by a link whose ends are called as they are."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs Linux, root and iproute2")
    names = [f"sk{end}{os.getpid()}" for end in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                names[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                names[1],
                "netns",
                names[1],
            )
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"this machine allows no network namespaces: {error}")
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.213.77.{number + 1}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


def test_a_link_that_goes_down(namespaces: list[str], tmp_path: Path) -> None:
    """Two jobs at once, whose ranks meet in a file and in a store of rank 0."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(namespaces), str(tmp_path), str(TIMEOUT)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True, timeout=400, capture_output=True, text=True,
    )  # fmt: skip
    found = re.findall(r"RANK (\w+ \d) (\w+) (\d+) (.*)", done.stdout)
    assert sorted(f[0] for f in found) == ["file 0", "file 1", "tcp 0", "tcp 1"], done.stderr
    for _, kind, seconds, text in found:
        assert kind == "RankLostError", found
        assert float(seconds) <= LATEST, found
        assert "of channel" in text, found
