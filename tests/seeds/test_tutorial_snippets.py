"""The DDP tutorial: its script with three ranks, its prefix loader; indentation was lost on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import torch

from tests.pools import free_port
from tests.seeds.running import awesome_model, indented, run, snippet

OPEN_ENDS = """
import os
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

epochs = range(2)

class Your_Dataset(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return {"image": torch.randn(5, generator=generator), "label": torch.randn(3, generator=generator)}

class Your_Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)
        Your_Model.last = self

    def forward(self, x):
        return self.used(x["image"])

class Your_Optimizer(torch.optim.SGD):
    def __init__(self):
        super().__init__(Your_Model.last.parameters(), lr=0.1)

Your_Loss = nn.MSELoss
"""
CHECK = """
    start = Your_Model().state_dict()  # of a new one
    same = [None] * world_size
    dist.all_gather_object(same, {k: v for k, v in model.state_dict().items()})
    assert all(torch.equal(v, s[k]) for s in same for k, v in same[0].items())
    assert not torch.equal(start["used.weight"], model.module.used.weight)
    assert torch.equal(start["unused.weight"], model.module.unused.weight)
    print(f"rank {rank} is done\\n", end="", flush=True)  # in one piece: three ranks share the output
    cleanup()
"""


def test_main_and_spawn(tmp_path: Path) -> None:
    main = indented(
        snippet("tutorial_main"),
        {"cleanup()": 1},
    )
    parts = [
        OPEN_ENDS,
        indented(snippet("tutorial_setup", {"12355": str(free_port())})),
        indented(snippet("tutorial_prepare")),
        indented(snippet("tutorial_cleanup")),
        main.replace("    cleanup()\n", CHECK),
        indented(snippet("tutorial_spawn", {"args=(world_size)": "args=(world_size,)"})),
    ]
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(parts))
    finished = subprocess.run(
        [sys.executable, str(script)], env=dict(os.environ), capture_output=True, text=True, timeout=400
    )
    assert finished.returncode == 0, finished.stderr
    done = sorted(
        line for line in finished.stdout.splitlines() if line.startswith("rank ")
    )  # gloo prints too
    assert done == [f"rank {r} is done" for r in range(3)]


def test_prefix_is_taken_off() -> None:
    code = snippet("tutorial_prefix").replace("modelmodel_dict", "model\nmodel_dict")
    code = indented(code, {"if re.search": 1, "else:": 1, "model.load_state_dict": 0})
    trained = torch.nn.Sequential(OrderedDict(module=awesome_model()))
    torch.nn.init.ones_(trained.module[0].weight)
    for state in (trained.state_dict(), trained.module.state_dict()):
        names = run(code, re=re, OrderedDict=OrderedDict, state_dict=state, model=awesome_model())
        assert torch.equal(names["model"][0].weight, trained.module[0].weight)
