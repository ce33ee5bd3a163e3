"""PyTorch/XLA's guides to DDP and FSDP: DDP on XLA replicas, FSDP on replicas and on gloo."""

from __future__ import annotations

import importlib.util
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.fsdp.state import clean
from tests.backends.environments import environments
from tests.benchmarks import xla_training
from tests.benchmarks.xla_trainers import DDP, NATIVE
from tests.pools import on_ranks, rank_pool
from tests.seeds.running import SNIPPETS, run, snippet
from tests.started import output_of

# Not importorskip: importing torch_xla changes the environment of this process.
MISSING = importlib.util.find_spec("torch_xla") is None
ROOT = Path(__file__).resolve().parents[2]
EACH = [p for p in environments("gloo", "xla") if p.values[1] == 2]


class TwoInputs(nn.Module):
    """What the guide calls my_module; convolutions for its policy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Conv2d(1, 3, 3)
        self.two = nn.Conv2d(3, 3, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(torch.tanh(self.one(x))).mean((2, 3))) * y


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 1, 6, 6, generator=generator), torch.randn(2, 5, generator=generator)


def _full(model: Any) -> dict[str, torch.Tensor]:
    with model.summon_full_params():
        return {clean(n): p.detach().cpu().clone() for n, p in model.named_parameters()}


def _trained_alone(world_size: int) -> dict[str, torch.Tensor]:
    model = TwoInputs()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0001)
    (sum(model(*_inputs(r)).sum() for r in range(world_size)) / world_size).backward()
    optimizer.step()
    return model.state_dict()


def _on_device(rank: int) -> list[torch.Tensor]:
    from shardkit.xla import xla_model as xm

    return [t.to(xm.xla_device()) for t in _inputs(rank)]


def _fsdp(rank: int, auto_wrap: bool, folder: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    from shardkit.xla import xla_model as xm

    options = {}
    if auto_wrap:
        options = run(snippet("xla_auto_wrap"), partial=partial, torch=torch)
        from shardkit.xla.fsdp import XlaFullyShardedDataParallel

        options |= run(snippet("xla_auto_wrapper"), XlaFullyShardedDataParallel=XlaFullyShardedDataParallel)
    named = {k: options[k] for k in ("auto_wrap_policy", "auto_wrapper_callable") if k in options}
    changes = {"FSDP(my_module)": "FSDP(my_module, **options)"} if auto_wrap else {}
    x, y = _on_device(rank)
    names = run(snippet("xla_fsdp", changes), my_module=TwoInputs(), x=x, y=y, options=named)
    model = names["model"]
    xm.mark_step()
    code = snippet("xla_checkpoint", {"/tmp/": f"{folder}/"})
    repairs = {"‘": "'", "’": "'", "} ckpt_path": "}\nckpt_path", "' xm.": "'\nxm."}  # noqa: RUF001
    for lost, meant in repairs.items():
        code = code.replace(lost, meant)
    code = "\n".join(line.strip() for line in code.splitlines())
    run(code, model=model, optimizer=names["optim"], xm=xm)
    wrapped = [clean(n) for n, m in model.named_modules() if type(m) is type(model)]
    return _full(model), wrapped


@pytest.mark.parametrize(("backend", "world_size"), EACH)
@pytest.mark.parametrize("auto_wrap", [False, True], ids=["one unit", "auto_wrap, checkpoint_module"])
def test_fsdp_checkpoint_and_consolidation(
    backend: str, world_size: int, auto_wrap: bool, tmp_path: Path
) -> None:
    expected = _trained_alone(world_size)
    for state, wrapped in rank_pool(world_size, backend).run(_fsdp, auto_wrap, str(tmp_path)):
        assert wrapped == (["", "one", "two"] if auto_wrap else [""])
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    command = snippet("xla_consolidate", {"/tmp/mnist-fsdp/final_ckpt": f"{tmp_path}/", "_rank-": "rank-"})
    arguments = shlex.split(command.replace("\\\n", " "))
    output_of(*arguments[1:])
    consolidated = torch.load(f"{tmp_path}/_consolidated.pth")["model"]
    assert set(consolidated) == set(expected)
    for key, value in consolidated.items():
        assert torch.equal(value, state[key])


@pytest.mark.xla
@pytest.mark.skipif(MISSING, reason="needs torch_xla")
@on_ranks((2, "xla"))
def test_process_group_and_ranks(rank: int, world_size: int) -> None:
    names = run(snippet("xla_imports"))
    names = run(snippet("xla_ranks"), xm=names["xm"])
    assert (names["new_rank"], names["world_size"]) == (rank, world_size)
    run(snippet("xla_init"), dist=dist, rank=rank, world_size=world_size)
    total = torch.ones(3, device="xla") * (rank + 1)
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 3
    dist.destroy_process_group()


@pytest.mark.xla
@pytest.mark.skipif(MISSING, reason="needs torch_xla")
@pytest.mark.parametrize("count", ["CPU_NUM_DEVICES", "nprocs"])
def test_ddp_script(count: str, tmp_path: Path) -> None:
    """As printed, with its 16 million parameters, where the environment says how many ranks there are."""
    code = snippet("xla_ddp")
    environment = {}
    if count == "nprocs":  # a reader's own change
        code = code.replace("xmp.spawn(demo_fn)", "xmp.spawn(demo_fn, nprocs=2)").replace("1000000", "1000")
    else:
        environment["CPU_NUM_DEVICES"] = "2"
    script = tmp_path / "ddp.py"
    script.write_text(code)
    printed = [
        line for line in output_of(str(script), **environment).splitlines() if line.startswith("Running")
    ]
    assert sorted(printed) == [f"Running basic DDP example on rank {r}." for r in range(2)]


def test_both_guides_show_the_same_script() -> None:
    assert (SNIPPETS / "xla_ddp.txt").read_text() == (SNIPPETS / "xla_ddp_text.txt").read_text()


def test_the_benchmark_has_the_guides_columns() -> None:
    """With the guide's own medians of MNIST: 41.47 % below native."""
    times = {
        NATIVE: [(0.1, 0.2, 64 / rate) for rate in (1.0, 20108.96, 24351.74)],
        DDP: [(0.1, 0.5, 64 / rate) for rate in (1.0, 11770.00, 14313.78)],
    }
    heads, native, ddp = xla_training.rates("mnist", times, 2)
    for head in ("Mean", "Median", "90th %", "Std Dev", "CV"):
        assert head in heads
    assert native.split()[-6:-4] == ["14820.57", "20108.96"]
    assert ddp.endswith("41.47%")
