"""Recipes of projects that import fairscale, in their manner: what they do with wrapped models besides training."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.errors import LifecycleError
from shardkit.experimental.tooling.layer_memory_tracker import ProcessGroupTracker
from shardkit.nn.data_parallel import FullyShardedDataParallel as FSDP
from shardkit.nn.wrap import enable_wrap, wrap
from tests.pools import on_ranks, rank_pool


class ProteinModel(nn.Module):
    """A language model whose head reads the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(9, 8, padding_idx=1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)
        self.bias = nn.Parameter(torch.zeros(9))

    def forward(self, tokens: torch.Tensor, repr_layers: tuple[int, ...] = ()) -> dict[str, Any]:
        x = self.embed_tokens(tokens)
        found = {}
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in repr_layers:
                found[number] = x
        return {
            "logits": nn.functional.linear(self.norm(x), self.embed_tokens.weight) + self.bias,
            "representations": found,
        }


def _inference(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    with enable_wrap(
        wrapper_cls=FSDP, flatten_parameters=True, state_dict_device=torch.device("cpu"), **options
    ):
        model: nn.Module = ProteinModel().eval()
        for name, child in model.named_children():
            if name == "layers":
                for layer_name, layer in child.named_children():
                    setattr(child, layer_name, wrap(layer))
        model = wrap(model)
    with torch.no_grad():
        found: dict[str, Any] = model(torch.tensor([[0, 4, 5 + rank, 2], [0, 3, 2, 1]]), repr_layers=(1, 2))
    return {
        "logits": found["logits"].float(),
        "representations": {k: v.float() for k, v in found["representations"].items()},
    }


def test_inference_with_parameters_on_the_host() -> None:
    """ESM's: layers wrapped one by one into a model that only infers, offloaded and in half precision."""
    torch.manual_seed(0)
    plain = ProteinModel().eval()
    for options, close in (
        ({"cpu_offload": True}, {"rtol": 1e-5, "atol": 1e-6}),
        ({"cpu_offload": True, "mixed_precision": True}, {"rtol": 0.02, "atol": 0.02}),
    ):
        for rank, found in enumerate(rank_pool(2).run(_inference, options)):
            with torch.no_grad():
                expected = plain(torch.tensor([[0, 4, 5 + rank, 2], [0, 3, 2, 1]]), repr_layers=(1, 2))
            torch.testing.assert_close(found, expected, **close)


class Trunk(nn.Module):
    """Asks its unit to begin anew in forward, where it can't."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unit: list[FSDP] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.unit:
            with pytest.raises(LifecycleError, match="expected to be in states"):
                self.unit[0]._reset_lazy_init()
        return self.layer(x)


@on_ranks(2)
def test_a_trunk_that_is_assembled_later(rank: int, world_size: int) -> None:
    """VISSL's and AllenNLP's: units made one after the other, `_reset_lazy_init`, a group that tracks."""
    torch.manual_seed(0)
    trunk, head = Trunk(), nn.Linear(4, 2)
    plain_trunk, plain_head = copy.deepcopy(trunk), copy.deepcopy(head)
    group = ProcessGroupTracker(dist.group.WORLD)
    own = FSDP(trunk, process_group=group, compute_device=torch.device("cpu"))
    assert own.process_group is group
    values = torch.randn(world_size, 3, 4, generator=torch.Generator().manual_seed(1))

    def train(ours: FSDP, plain: nn.Module) -> None:
        for model, batches in ((ours, values[rank]), (plain, values.flatten(0, 1))):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(batches).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trunk.unit.append(own)
    train(own, plain_trunk)
    trunk.unit.clear()
    for module in own.modules():
        if isinstance(module, FSDP):
            module._is_root = None  # as VISSL's task does
    assert own._is_root is None
    both = FSDP(nn.Sequential(own, head), process_group=group, compute_device=torch.device("cpu"))
    plain = nn.Sequential(plain_trunk, plain_head)
    for _ in range(2):
        train(both, plain)
        both._reset_lazy_init()
    assert own._is_root is None
    with both.summon_full_params():
        for mine, want in zip(both.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, want)


@on_ranks(2)
def test_a_momentum_encoder(rank: int, world_size: int) -> None:
    """MoCo's and BYOL's in VISSL: a copy averages the rank's own shards, and has the group that was passed."""
    values = torch.randn(3, world_size, 4, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    for group in (dist.group.WORLD, ProcessGroupTracker(dist.group.WORLD)):
        online = FSDP(copy.deepcopy(plain), process_group=group, compute_device=torch.device("cpu"))
        results = []
        for model, own in ((online, [rank]), (copy.deepcopy(plain), list(range(world_size)))):
            momentum = copy.deepcopy(model).requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            outputs = []
            for batch in values:
                x = batch[own].flatten(0, 1)
                with torch.no_grad():
                    target = momentum(x)
                (model(x) - target - 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for theirs, mine in zip(momentum.parameters(), model.parameters(), strict=True):
                        theirs.lerp_(mine, 0.2)
                    outputs.append(momentum(values[0].flatten(0, 1)))
            results.append(torch.stack(outputs))
        torch.testing.assert_close(*results)
        assert copy.deepcopy(online).process_group is group
        pickled = pickle.loads(pickle.dumps(online))
        torch.testing.assert_close(pickled(values[0, rank]), online(values[0, rank]))
