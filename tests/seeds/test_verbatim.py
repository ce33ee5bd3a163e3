"""Snippets exactly as the documents have them, imports aside: "nccl", ``.to(rank)``, ``device_ids=[rank]`` and all.

A rehearsal's ranks are threads whose CUDA devices are the CPU, so nothing of that has to be taken out. What a document
leaves open is supplied as names. ``CANNOT`` has the lines that no Python runs as they stand.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.tools.rehearsal import rehearse
from tests.seeds.running import IMPORTS, SNIPPETS, awesome_model, batches, indented, run, trained_alone

EPOCHS, RATE = 2, 1e-4
# snippet: (what it says, what it means)
CANNOT = {
    "fairscale_fsdp": (
        "    model = FSDP(model)\n",
        "    model = FSDP(model)\n    optimizer = base_optimizer(model.parameters(), **base_optimizer_arguments)\n",
    ),
    "tutorial_spawn": ("args=(world_size)", "args=(world_size,)"),
    "tutorial_gather": ("[1,2,3] + rank", "[1,2,3] + [rank]"),
}


def printed(name: str) -> str:
    """The snippet with shardkit's imports, and with what it can't mean put right."""
    text = (SNIPPETS / f"{name}.txt").read_text()
    for old, new in {**IMPORTS, **dict([CANNOT[name]] if name in CANNOT else [])}.items():
        text = text.replace(old, new)
    return text


def on_ranks(function: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Results of a rehearsal; it has to end well."""
    report = rehearse(function, ranks, memory=False, cpu=True)
    assert report.is_good, str(report)
    return report.results


def locals_of(function: Callable[..., Any], *args: object) -> Mapping[str, Any]:
    """Calls a function; its variables when it returned."""
    found: dict[str, Any] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is function.__code__:
            found.update(frame.f_locals)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return found


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k.removeprefix("module."): v.detach().clone() for k, v in model.state_dict().items()}


def _train(rank: int, name: str) -> dict[str, torch.Tensor]:
    names = run(
        printed(name),
        dist_init=lambda rank, world_size: None,  # the rehearsal's ranks have a process group
        myAwesomeModel=awesome_model,
        mySuperFastDataloader=lambda: batches(dist.get_rank()),
        myVeryRelevantLoss=nn.MSELoss,
        loss_fn=nn.MSELoss(),
    )
    return _whole(locals_of(names["train"], rank, 2, EPOCHS)["model"])


@pytest.mark.parametrize("name", ["fairscale_ddp", "fairscale_oss", "fairscale_fsdp"])
def test_training_equals_one_process(name: str) -> None:
    expected = trained_alone(2, EPOCHS, RATE)
    for state in on_ranks(lambda rank: _train(rank, name)):
        assert state.keys() == expected.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)


def _scale(rank: int) -> tuple[dict[str, torch.Tensor], float]:
    """``optim.SGD(model.parameters(), ...)`` is Python: the dots stand for what ShardedDDP needs, and are ignored."""
    made: list[Any] = []

    def net() -> nn.Module:
        model = awesome_model()
        made.append(shardkit.optim.oss.OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1))
        return shardkit.nn.data_parallel.ShardedDataParallel(model, made[0])

    class optim:
        @staticmethod
        def SGD(params: Any, dots: Any) -> Any:
            return made[0]

    names = run(
        printed("fairscale_scaler"), Net=net, optim=optim, epochs=range(2), data=batches(rank), loss_fn=nn.MSELoss(),
        autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )  # fmt: skip
    return _whole(names["model"]), names["scaler"].get_scale()


def test_scaler() -> None:

    (first, scale), (second, other) = on_ranks(_scale)
    assert scale == other > 1
    expected = trained_alone(2, 2, 0.1)
    for key, value in first.items():
        assert torch.equal(value, second[key])
        torch.testing.assert_close(value, expected[key], rtol=0.02, atol=0.02)  # half precision


def _wrap(rank: int) -> str:
    """What it calls ``tfmr_auto_wrapped`` is ``l2`` in its assertions, which is nowhere: one that is made alike."""
    text = printed("fairscale_wrap")
    made = run(text[: text.index("    assert isinstance(l2")], nn=nn)
    names = run(text, nn=nn, l2=made["tfmr_auto_wrapped"])
    return type(names["l1"]).__name__


def test_wrapping() -> None:
    assert on_ranks(_wrap) == ["FullyShardedDataParallel"] * 2


SCRIPT = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from tests.seeds.running import awesome_model as myAwesomeModel, batches, trained_alone

WORLD_SIZE, EPOCHS = 2, 2
loss_fn = nn.MSELoss()
myVeryRelevantLoss = nn.MSELoss

def dist_init(rank, world_size):
    dist.init_process_group("nccl", init_method="tcp://localhost:12355", rank=rank, world_size=world_size)

def mySuperFastDataloader():
    return batches(dist.get_rank())
"""


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


def test_spawned_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fairscale's training, and the tutorial's main, started by the ``mp.spawn`` that each document prints."""
    call = printed("fairscale_spawn").replace("\n", "\n    ")
    script = tmp_path / "fairscale.py"
    script.write_text(SCRIPT + printed("fairscale_oss") + f'\nif __name__ == "__main__":\n    {call}')
    report = rehearse(script, 2, memory=False, cpu=True)
    assert report.is_good, str(report)
    assert len(report.losses()) == EPOCHS * 2

    parts = [
        OPEN_ENDS,
        indented(printed("tutorial_setup")),
        indented(printed("tutorial_prepare")),
        indented(printed("tutorial_cleanup")),
        indented(printed("tutorial_main"), {"cleanup()": 1}).replace("    cleanup()\n", CHECK),
        indented(printed("tutorial_spawn")),
    ]
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(parts))
    report = rehearse(script, 3, memory=False, cpu=True, show=(0, 1, 2))
    assert report.is_good, str(report)
    assert sorted(re.findall(r"rank (\d) is done", capsys.readouterr().out)) == ["0", "1", "2"]


def _gather(rank: int) -> None:
    run(indented(printed("tutorial_gather")), torch=torch, dist=dist)["main"](rank, 2)


def test_gathering(capsys: pytest.CaptureFixture[str]) -> None:
    on_ranks(_gather)
    found = capsys.readouterr().out
    assert found.count("'list': [1, 2, 3, 1], 'dict': {'rank': 1}") == 1


@pytest.mark.parametrize("name", list(CANNOT))
def test_what_cannot_run_is_as_the_documents_have_it(name: str) -> None:
    """Else it were time to run that as it stands, too."""
    assert CANNOT[name][0] in (SNIPPETS / f"{name}.txt").read_text()


def test_prefix_is_taken_off() -> None:
    code = printed("tutorial_prefix").replace("modelmodel_dict", "model\nmodel_dict")
    code = indented(code, {"if re.search": 1, "else:": 1, "model.load_state_dict": 0})
    trained = torch.nn.Sequential(OrderedDict(module=awesome_model()))
    torch.nn.init.ones_(trained.module[0].weight)
    for state in (trained.state_dict(), trained.module.state_dict()):
        names = run(code, re=re, OrderedDict=OrderedDict, state_dict=state, model=awesome_model())
        assert torch.equal(names["model"][0].weight, trained.module[0].weight)
