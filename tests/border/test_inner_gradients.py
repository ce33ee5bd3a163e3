"""Gradients, dtypes and files of a module inside of a unit: its values and gradients are elsewhere, on all ranks."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch import nn

from shardkit import FSDP
from shardkit.errors import LifecycleError
from tests.border.strategies import GLOO, loss_of, make_model, run, wrapped


def _gradients(rank: int, world_size: int) -> None:
    for strategy in ("fsdp", "units"):  # without flattening, modules inside list the shards
        model = wrapped(strategy, make_model())
        inner: nn.Module = model.module  # type: ignore[assignment]
        assert inner[0].weight.grad is None  # type: ignore[index]
        loss_of(model, rank).backward()
        for module in (inner, inner[0]):  # type: ignore[index]
            with pytest.raises(LifecycleError, match=r"gradient of parameter .*reduced.*parameters\(\)"):
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            for param in module.parameters():
                with pytest.raises(LifecycleError, match="reduced"):  # it would clear nothing
                    param.grad = None
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        model.zero_grad()
        assert inner[0].weight.grad is None  # type: ignore[index]


@pytest.mark.parametrize("world", GLOO, ids=str)
def test_reduced_gradients_are_not_taken_for_none(world: tuple[int, str]) -> None:
    run(world, _gradients)


def _saved(rank: int, world_size: int) -> None:
    model = FSDP(make_model())
    inner: nn.Module = model.module  # type: ignore[assignment]
    file = io.BytesIO()
    torch.save(inner, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(inner))):
        with pytest.raises(LifecycleError, match=r"weight'.*without the FSDP module"):
            copied.state_dict()
        with pytest.raises(LifecycleError, match="without the FSDP module"):
            copied.load_state_dict(make_model().state_dict())


def test_an_inner_module_from_a_file_says_that_it_has_no_values() -> None:
    run((2, "gloo"), _saved)
