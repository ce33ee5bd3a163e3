"""On XLA replicas: element-wise optimizers on shards, others on every rank; one program from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardkit import WholeParameters
from shardkit.errors import ConfigurationError
from tests.pools import rank_pool
from tests.whole_parameters.nets import batch, difference, net, train, wrap

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

F32 = torch.float32
RULES: dict[str, Any] = {
    "Muon": [("[024].weight", torch.optim.Muon, {"lr": 0.02}), ("*", torch.optim.AdamW, {"lr": 0.01})],
    "Adafactor": [("*", torch.optim.Adafactor, {"lr": 0.01})],
    "AdamW": [("*", torch.optim.AdamW, {"lr": 0.01})],
    "LBFGS": [("*", torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3})],
}


def on_replicas(rank: int, name: str, how: str) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    import torch_xla.debug.metrics as metrics

    from shardkit.backend import get_backend

    device = get_backend("xla").device()
    model = wrap(net(F32).to(device), how)
    if how == "fsdp":
        with pytest.raises(ConfigurationError, match="one program a flat parameter is updated as one"):
            WholeParameters(model, RULES["Muon"])
    optimizer = WholeParameters(model, RULES[name])
    compiles = []
    for step in range(4):
        inputs, targets = batch(step, torch.empty(6)).chunk(2, dim=1)[rank].to(device)

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).pow(2).mean()
            loss.backward()
            return loss

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        get_backend("xla").mark_step(wait=True)
        compiles.append((metrics.metric_data("CompileTime") or [0])[0])
    values = {k: v.cpu() for k, v in model.state_dict().items()}
    return values, optimizer.state_dict(), compiles


CASES = [
    ("AdamW", "fsdp"),
    ("AdamW", "fully_shard"),
    ("Adafactor", "fsdp"),
    ("Muon", "fully_shard"),
    ("LBFGS", "fsdp"),
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_numbers_of_one_process(name: str, how: str) -> None:
    model = net(F32)
    optimizer = WholeParameters(model, RULES[name])
    train(model, optimizer, dtype=F32, closure=name == "LBFGS")
    # what they make of the last bits in fp32, and XLA of bf16; a step of Muon is 0.02
    tolerance = {"LBFGS": 1e-3, "Muon": 5e-3}.get(name, 1e-6)
    for values, state, compiles in rank_pool(2, "xla").run(on_replicas, name, how):
        assert difference(values, model.state_dict()) <= tolerance
        assert difference(state["state"], optimizer.state_dict()["state"]) <= 100 * tolerance
        if name != "LBFGS":
            assert compiles[-1] == compiles[-2], compiles
