"""fairscale's guide to OSS, ShardedDDP, mixed precision, FSDP and wrapping, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pools import rank_pool
from tests.seeds.extract import SNIPPETS, extract
from tests.seeds.running import awesome_model, batches, run, snippet, trained_alone

EPOCHS, RATE = 2, 1e-4
RETURN = {"            optimizer.step()\n": "            optimizer.step()\n    return model\n"}
# The guide builds the optimizer for DDP and OSS; for FSDP it leaves that out.
STEP = {
    "    model = FSDP(model)\n": "    model = FSDP(model)\n"
    "    optimizer = base_optimizer(model.parameters(), **base_optimizer_arguments)\n"
}
ROOT = Path(__file__).resolve().parents[2]


def _train(rank: int, world_size: int, name: str, changes: dict[str, str]) -> dict[str, torch.Tensor]:
    names = run(
        snippet(name, {**RETURN, **changes}),
        dist_init=lambda rank, world_size: None,  # the pool's ranks have a process group
        myAwesomeModel=awesome_model,
        mySuperFastDataloader=lambda: batches(dist.get_rank()),
        myVeryRelevantLoss=nn.MSELoss,
        loss_fn=nn.MSELoss(),
    )
    model = names["train"](rank, world_size, EPOCHS)
    return {k.removeprefix("module."): v.detach().clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "changes"), [("fairscale_ddp", {}), ("fairscale_oss", {}), ("fairscale_fsdp", STEP)]
)
def test_training_equals_one_process(name: str, changes: dict[str, str]) -> None:
    expected = trained_alone(2, EPOCHS, RATE)
    for state in rank_pool(2).run(_train, 2, name, changes):
        assert state.keys() == expected.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)


SCRIPT = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from tests.seeds.running import awesome_model as myAwesomeModel, batches, trained_alone

folder = sys.argv[1]
WORLD_SIZE, EPOCHS = 2, 2
loss_fn = nn.MSELoss()
myVeryRelevantLoss = nn.MSELoss

def dist_init(rank, world_size):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)

def mySuperFastDataloader():
    return batches(dist.get_rank())
"""


def test_spawned_training_ends_well(tmp_path: Path) -> None:
    check = """
    expected = trained_alone(world_size, epochs, 1e-4)
    for key, value in model.module.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)
    dist.destroy_process_group()
"""
    code = SCRIPT + snippet("fairscale_oss") + check + '\nif __name__ == "__main__":\n    '
    script = tmp_path / "train.py"
    script.write_text(code + snippet("fairscale_spawn").replace("\n", "\n    "))
    finished = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert finished.returncode == 0, finished.stderr


def _scale(rank: int, changes: dict[str, str]) -> tuple[dict[str, torch.Tensor], float]:
    names = run(
        snippet("fairscale_scaler", changes),
        Net=awesome_model,
        optim=torch.optim,
        epochs=range(2),
        data=batches(rank),
        loss_fn=nn.MSELoss(),
        autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )
    state = {k: v.detach().clone() for k, v in names["model"].module.state_dict().items()}
    return state, names["scaler"].get_scale()


def test_sharded_grad_scaler_with_autocast() -> None:
    changes = {
        "optimizer = optim.SGD(model.parameters(), ...)\n": "from shardkit.optim.oss import OSS\n"
        "from shardkit.nn.data_parallel import ShardedDataParallel\n"
        "optimizer = OSS(model.parameters(), optim=optim.SGD, lr=0.1)\n"
        "model = ShardedDataParallel(model, optimizer)\n",
    }
    (first, scale), (second, other_scale) = rank_pool(2).run(_scale, changes)
    assert scale == other_scale > 1
    start, expected = awesome_model().state_dict(), trained_alone(2, 2, 0.1)
    for key, value in first.items():
        assert torch.equal(value, second[key])
        assert not torch.equal(value, start[key])
        torch.testing.assert_close(value, expected[key], rtol=0.02, atol=0.02)  # half precision


@pytest.mark.skipif(
    "SEED_DOCUMENTS" not in os.environ, reason="SEED_DOCUMENTS names no folder with the documents"
)
def test_snippets_are_what_the_documents_say() -> None:
    found = extract(Path(os.environ["SEED_DOCUMENTS"]))
    assert found == {path.stem: path.read_text() for path in SNIPPETS.glob("*.txt")}
