"""Twelve optimizers, in the wrappings of FSDP, on 2 to 4 ranks: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from shardkit import WholeParameters
from tests.pools import rank_pool
from tests.whole_parameters.nets import Spec, difference, eager, net, train, trained

CASES = [
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("fully_shard", 2),
    ("fully_shard", 3),
    ("fully_shard", 4),
    ("hybrid", 4),
]
FEWER = [("fsdp", 3), ("fully_shard", 2), ("hybrid", 4)]
LARGE = {"width": 64}  # states of fewer than 4096 elements are not quantized


def of_package(package: str, name: str, **options: Any) -> Callable[[], Spec]:
    def spec() -> Spec:
        module = pytest.importorskip(package, reason="a package of the extra 'libraries'")
        return getattr(module, name), options

    return spec


SPECS: dict[str, tuple[Callable[[], Spec], dict[str, Any]]] = {
    "Muon": (lambda: (torch.optim.Muon, {"lr": 0.02}), {}),
    "Adafactor": (lambda: (torch.optim.Adafactor, {"lr": 0.01}), {}),
    "LBFGS": (lambda: (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 5}), {"closure": True}),
    "SGD": (lambda: (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}), {}),
    "AdamW": (lambda: (torch.optim.AdamW, {"lr": 0.01}), {}),
    "RAdam": (lambda: (torch.optim.RAdam, {"lr": 0.01}), {}),
    "LAMB": (of_package("pytorch_optimizer", "Lamb", lr=0.01), {}),
    "LAMB, norm of all": (of_package("pytorch_optimizer", "Lamb", lr=0.01, pre_norm=True), {}),
    "Shampoo": (of_package("pytorch_optimizer", "Shampoo", lr=0.01), {}),
    "SOAP": (of_package("pytorch_optimizer", "SOAP", lr=0.01), {}),
    "Lion": (of_package("pytorch_optimizer", "Lion", lr=0.01), {}),
    "schedule-free": (of_package("schedulefree", "AdamWScheduleFree", lr=0.01, warmup_steps=2), {}),
    "8 bits": (of_package("torchao.optim", "AdamW8bit", lr=0.01), LARGE),
    "4 bits": (of_package("torchao.optim", "AdamW4bit", lr=0.01), LARGE),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of packages
@pytest.mark.parametrize("name", SPECS)
def test_numbers_of_one_process(name: str) -> None:
    make, options = SPECS[name]
    spec = make()
    with eager():
        (values, state) = trained(0, 1, "plain", spec, options)
        for how, world_size in CASES if options is not LARGE else FEWER:
            (mine, saved), *_ = rank_pool(world_size, "simulated").run(
                trained, world_size, how, spec, options
            )
            assert difference(mine, values) <= 1e-6, (how, world_size)
            assert saved["param_groups"]
            assert str(saved["param_groups"]) == str(state["param_groups"])
            assert difference(saved["state"], state["state"]) <= 1e-5, (how, world_size)


def test_one_process_is_what_torch_does() -> None:
    """WholeParameters over a model that nobody sharded is plain optimizers."""
    for make, closure in (
        (partial(torch.optim.Adafactor, lr=0.01), False),
        (partial(torch.optim.LBFGS, lr=0.1), True),
    ):
        plain, model = net(), net()
        train(plain, make(plain.parameters()), closure=closure)
        train(model, WholeParameters(model, make), closure=closure)
        assert difference(model.state_dict(), plain.state_dict()) == 0.0
    plain, model = net(), net()
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW([p for p in plain.parameters() if p.ndim != 2])
    for step in range(4):
        train(plain, muon, steps=range(step, step + 1), before_step=adamw.step)
        adamw.zero_grad()
    train(model, WholeParameters(model, torch.optim.Muon, lr=0.02))
    assert difference(model.state_dict(), plain.state_dict()) == 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_processes(world_size: int) -> None:
    for name, how in (("Muon", "fsdp"), ("LBFGS", "fully_shard"), ("Adafactor", "DTensors")):
        spec, options = SPECS[name][0](), SPECS[name][1]
        values, state = trained(0, 1, "plain", spec, options)
        (mine, saved), *_ = rank_pool(world_size).run(trained, world_size, how, spec, options)
        assert difference(mine, values) <= 1e-6
        assert difference(saved["state"], state["state"]) <= 1e-6
